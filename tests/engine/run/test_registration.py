"""Segments computed alone: what is kept of them after an answer, who finds it, and that it is what it should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.config import PolicyName
from cacheslide_agents.engine.receipt import Receipt
from tests.reference.dense_reuse import DenseRun, ends, in_isolation, over_cached
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = Segment.system("You are a helpful assistant with a memory of what the user told you.\n")
OLD = Segment.update("memory: the user lives in Paris and has code 4821.\n")
NEW = Segment.update("memory: the user moved to a small house by the sea, likes coffee now, and has a dog.\n")
NOTES = Segment.suffix("".join(f"note {n}: bread at {n * 3}.\n" for n in range(9)))
HISTORY = Segment.suffix("".join(f"user: question number {n}?\nassistant: the answer is {n * 7}.\n" for n in range(9)))
QUERY = Segment.suffix("user: what does it say?\nassistant:")
FIRST, SECOND = Prompt([SYSTEM, OLD, NOTES, HISTORY]), Prompt([SYSTEM, NEW, NOTES, HISTORY, QUERY])
ONE = SamplingParams(max_tokens=1)
ANSWER = " the memory says that"
FAMILIES = ("llama", "qwen3", "phi3", "mistral+24")


def tiny_engine(family: str = "llama", **settings: Any) -> Engine:
    name, _, window = family.partition("+")
    model = tiny_model(name, sliding_window=int(window)) if window else tiny_model(name)
    config = EngineConfig(**{"pool_tokens": 8192, "dtype": "float32", **settings})
    return Engine.from_model(model, tiny_tokenizer(None), config)


def ask(engine: Engine, prompt: Prompt, policy: PolicyName, session: str | None = "s", **call: Any) -> Receipt:
    """A turn whose registration is over."""
    receipt = engine.generate(prompt, ONE, session=session, policy=policy, **call).receipt
    engine.forget("nobody")
    return receipt


def ranges(engine: Engine, prompt: Prompt) -> list[tuple[int, int]]:
    return list(prompt.encode(engine.tokenizer).segment_ranges())


def decoder(engine: Engine) -> Any:
    runner: Any = engine._runner
    return runner._decoder


def assert_equals(engine: Engine, prompt: Prompt, policy: PolicyName, cached: list[torch.Tensor], kept: Any) -> None:
    """K, V and logits of a prompt are those of a dense pass over cached K and V of the tokens `kept`."""
    ids = np.array(prompt.token_ids(engine.tokenizer))
    continued = np.concatenate([ids, engine.tokenizer.encode(ANSWER, add_special_tokens=False)[:-1]])
    reused = np.zeros(len(continued), dtype=np.bool_)
    reused[kept] = True
    rows = len(continued) - len(ids)
    padded = [torch.cat((kv, torch.zeros(rows, *kv.shape[1:]))) for kv in cached]
    expected = over_cached(decoder(engine), continued, padded, reused)
    kv = engine.trace(prompt, session="s", policy=policy).keys_values
    for layer_idx, wanted in enumerate(expected.kv):
        torch.testing.assert_close(kv[layer_idx], wanted[: len(ids)], atol=2e-4, rtol=1e-4)
    logits = engine.logits(prompt, ANSWER, session="s", policy=policy)
    torch.testing.assert_close(logits, expected.logits[len(ids) - 1 :], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_promptcache_equals_the_dense_pass_when_segments_stay_in_place(family: str) -> None:
    same_length = Prompt([SYSTEM, Segment.update(OLD.text.replace("4821", "7390")), NOTES, HISTORY, QUERY])
    with tiny_engine(family) as engine:
        first, second = ranges(engine, FIRST), ranges(engine, same_length)
        assert first[2:] == second[2:4]
        ask(engine, FIRST, "promptcache")
        receipt = ask(engine, same_length, "promptcache", store=False)
        assert (receipt.exact_tokens, receipt.corrected_tokens) == (second[0][1], 0)
        assert receipt.slid_tokens == second[3][1] - second[2][0]
        ids = np.array(same_length.token_ids(engine.tokenizer))
        kept = np.r_[slice(*second[0]), slice(second[2][0], second[3][1])]
        assert_equals(engine, same_length, "promptcache", in_isolation(decoder(engine), ids, second), kept)


def test_promptcache_misses_what_moved_and_keeps_a_copy_for_each_place() -> None:
    with tiny_engine() as engine:
        ask(engine, FIRST, "promptcache")
        copies = engine.stats().cached_sequences
        assert copies == 4
        receipt = ask(engine, SECOND, "promptcache")
        system, _, notes, history, query = ranges(engine, SECOND)
        assert receipt.treatments == ((0, system[1], "exact"), (system[1], query[1], "fresh"))
        assert engine.stats().cached_sequences == copies + 4  # the system's copy serves both
        again = ask(engine, SECOND, "promptcache", store=False)
        assert again.slid_tokens == query[1] - 1 - system[1] and again.fresh_tokens == 1
        for prompt in (FIRST, SECOND):
            assert ask(engine, prompt, "promptcache", store=False).fresh_tokens == 1
        assert notes[1] == history[0]


@pytest.mark.parametrize("sizes", [(0, 0), (8, 8), (32, 0), (10_000, 0)])
@pytest.mark.parametrize("family", FAMILIES)
def test_epic_equals_the_dense_pass_when_segments_move(family: str, sizes: tuple[int, int]) -> None:
    with tiny_engine(family, epic_head_tokens=sizes[0], epic_tail_tokens=sizes[1]) as engine:
        ask(engine, FIRST, "epic")
        receipt = ask(engine, SECOND, "epic", store=False)
        system, _, notes, history, query = segments = ranges(engine, SECOND)
        corrected = ends([notes, history], *sizes)
        assert (receipt.exact_tokens, receipt.corrected_tokens) == (system[1], len(corrected))
        assert receipt.slid_tokens == history[1] - notes[0]
        rows = receipt.fresh_tokens + receipt.corrected_tokens
        assert receipt.computed_share == pytest.approx(rows / query[1])
        ids = np.array(SECOND.token_ids(engine.tokenizer))
        kept = np.setdiff1d(np.r_[slice(*system), slice(notes[0], history[1])], corrected)
        assert_equals(engine, SECOND, "epic", in_isolation(decoder(engine), ids, segments), kept)
        if sizes[0] > 1_000:
            full = DenseRun(decoder(engine), ids).logits[-1:]
            torch.testing.assert_close(
                engine.logits(SECOND, "x", session="s", policy="epic"), full, atol=1e-3, rtol=1e-3
            )


def test_isolated_segments_are_not_seen_by_other_policies() -> None:
    with tiny_engine() as engine:
        ask(engine, FIRST, "epic")
        for policy in ("slide", "head", "prefix"):
            receipt = ask(engine, SECOND, policy, store=False)
            assert receipt.fresh_tokens == receipt.prompt_tokens
        ask(engine, FIRST, "slide")
        engine.forget("s")
        ask(engine, FIRST, "slide")
        assert ask(engine, SECOND, "epic", store=False).fresh_tokens == ranges(engine, SECOND)[-1][1]


def test_isolated_segments_serve_all_sessions_of_a_namespace_until_their_own_is_forgotten() -> None:
    with tiny_engine() as engine:
        ask(engine, FIRST, "epic", session="a")
        assert ask(engine, SECOND, "epic", session=None, store=False).slid_tokens > 0
        assert ask(engine, SECOND, "epic", session="b", namespace="other", store=False).slid_tokens == 0
        engine.forget("b")
        assert ask(engine, SECOND, "epic", session="b", store=False).slid_tokens > 0
        engine.forget("a")
        assert ask(engine, SECOND, "epic", session="b", store=False).slid_tokens == 0
        assert engine.stats().free_pages == engine.stats().pool_pages


def test_nothing_is_registered_when_a_request_stores_nothing() -> None:
    with tiny_engine() as engine:
        ask(engine, FIRST, "epic", store=False)
        assert engine.stats().cached_sequences == 0


def test_less_is_registered_when_the_pool_is_small() -> None:
    with tiny_engine() as measuring:
        tokens = len(FIRST.token_ids(measuring.tokenizer)) + 32
    with tiny_engine(pool_tokens=tokens) as engine:
        for _ in range(3):
            for policy in ("epic", "promptcache", "slide"):
                receipt = ask(engine, FIRST, policy)
                assert receipt.prompt_tokens + 32 == tokens
        full = engine.logits(FIRST, ANSWER, policy="recompute")
        assert ask(engine, FIRST, "epic").policy == "epic"
        assert engine.logits(FIRST, ANSWER, policy="recompute").equal(full)
        engine.forget("s")
        assert engine.stats().free_pages == engine.stats().pool_pages


def test_a_segment_is_found_when_the_text_behind_it_changes_its_last_token() -> None:
    with tiny_engine() as engine:
        merged = Segment.suffix("tail of a text that ends in the")
        ask(engine, Prompt([SYSTEM, merged]), "epic")
        longer = Prompt([SYSTEM, NEW, merged, Segment.suffix("re it goes on with more")])
        before = Prompt([SYSTEM, merged]).token_ids(engine.tokenizer)
        start, stop = ranges(engine, longer)[2]
        own, kept = longer.token_ids(engine.tokenizer)[start:stop], before[ranges(engine, Prompt([SYSTEM]))[0][1] :]
        common = next((i for i, (a, b) in enumerate(zip(own, kept, strict=False)) if a != b), min(len(own), len(kept)))
        receipt = ask(engine, longer, "epic", store=False)
        assert receipt.slid_tokens == common >= 16
