"""The oracle tests on a CUDA device: reuse against recomputation, the engine against transformers' own forward."""

from __future__ import annotations

import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SYSTEM = Segment.system("You are a helpful assistant with a memory of what the user told you.\n")
OLD = Segment.update("memory: the user lives in Paris and likes tea.\n")
NEW = Segment.update("memory: the user moved to a small house by the sea and likes coffee now.\n")
HISTORY = Segment.suffix("".join(f"user: question {n}?\nassistant: the answer is {n * 7}.\n" for n in range(12)))
QUERY = Segment.suffix("user: what does the memory say?\nassistant:")
FEW = SamplingParams(max_tokens=8, ignore_eos=True)
ANSWER = " the memory says that the user lives in Paris"


def gpu_engine(family: str, **settings) -> Engine:
    dtype = settings.pop("dtype", torch.float32)
    model = tiny_model(family)
    torch.nn.Module.to(model, device="cuda", dtype=dtype)
    return Engine.from_model(model, tiny_tokenizer(None), EngineConfig(pool_tokens=8192, **settings))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own_when_nothing_is_reused(family):
    with gpu_engine(family) as engine:
        prompt = Prompt([SYSTEM, OLD, HISTORY])
        ids = prompt.token_ids(engine.tokenizer)
        answer = engine.tokenizer.encode(ANSWER, add_special_tokens=False)
        with torch.inference_mode():
            own = engine.model(torch.tensor([ids + answer], device="cuda")).logits[0, len(ids) - 1 : -1]
        torch.testing.assert_close(engine.logits(prompt, ANSWER), own.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("policy", ["head", "slide"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_correction_equals_recompute_when_the_update_changes(family, policy):
    with gpu_engine(family, policy=policy, correction_share=1.0, staleness_bound=0.0) as engine:
        engine.generate(Prompt([SYSTEM, OLD, HISTORY]), FEW, session="s")
        prompt = Prompt([SYSTEM, NEW, HISTORY, QUERY])
        full = engine.logits(prompt, ANSWER, session="s", policy="recompute")
        torch.testing.assert_close(engine.logits(prompt, ANSWER, session="s"), full, atol=1e-3, rtol=1e-3)
        assert engine.generate(prompt, FEW, session="s").receipt.slid_tokens > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefix_is_exact_when_the_update_changes(dtype):
    with gpu_engine("llama", dtype=dtype) as engine:
        engine.generate(Prompt([SYSTEM, OLD, HISTORY]), FEW, session="s")
        prompt = Prompt([SYSTEM, NEW, HISTORY, QUERY])
        full = engine.logits(prompt, ANSWER, session="s", policy="recompute")
        reused = engine.logits(prompt, ANSWER, session="s", policy="prefix")
        tolerance = 1e-3 if dtype is torch.float32 else 0.25
        torch.testing.assert_close(reused, full, atol=tolerance, rtol=tolerance)


def test_decode_synchronises_once_a_token():
    """Every token needs one host round trip, to know what was sampled."""
    with gpu_engine("llama") as engine:
        prompt = Prompt([SYSTEM, OLD, HISTORY])
        engine.generate(prompt, FEW)
        num_tokens = 20
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            engine.generate(prompt, params)
        waits = sum(
            event.count
            for event in profile.key_averages()
            if event.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
        )
        assert waits <= num_tokens + 8
