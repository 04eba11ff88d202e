"""Time: cold prefill and decode against transformers, time to the first token under the policies."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from cacheslide_agents.bench.turns import Turns
from cacheslide_agents.engine import Engine, EngineConfig, SamplingParams
from cacheslide_agents.engine.attention import select_attention
from cacheslide_agents.engine.config import PAGE_TOKENS
from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.model.loading import load_model
from cacheslide_agents.engine.run.forward import Forward
from cacheslide_agents.engine.slide.block_table import BlockTable
from cacheslide_agents.engine.slide.pages import PagePool
from cacheslide_agents.engine.slide.queries import StoredQueries

from .workload import sized_turns

DECODE_TOKENS = 32
SCATTERED_TOKENS = 1700
SIZES = {"system_tokens": 256, "old_tokens": 128, "new_tokens": 193, "suffix_tokens": 1280, "query_tokens": 32}


def against_transformers(repeats: int) -> dict[str, Any]:
    """Cold prefill and decode of the engine and of transformers' own forward and `generate`, by turns."""
    with Engine.load(EngineConfig(policy="recompute", repair=False, gate_share=0.0)) as engine:
        assert engine.model_path is not None
        plain = AutoModelForCausalLM.from_pretrained(engine.model_path, dtype=engine.model.dtype).eval()
        prefill: dict[str, list[float]] = {"engine": [], "transformers": []}
        decode: dict[str, list[float]] = {"engine": [], "transformers": []}
        for repeat in range(repeats + 1):
            turns = _turns(engine, repeat)
            ids = torch.tensor([turns.second.token_ids(engine.tokenizer)])
            ours = _engine_times(engine, turns)
            theirs = _seconds(partial(plain, ids, logits_to_keep=1)), _generate_step(plain, ids)
            if repeat:  # the first round warms up
                for times, engine_time, plain_time in zip((prefill, decode), ours, theirs, strict=True):
                    times["engine"].append(engine_time)
                    times["transformers"].append(plain_time)
        return {
            "prompt_tokens": ids.shape[1],
            "dtype": str(plain.dtype).removeprefix("torch."),
            "prefill_seconds": {name: median(times) for name, times in prefill.items()},
            "decode_step_seconds": {name: median(times) for name, times in decode.items()},
            "prefill_ratio": _ratio(prefill, "engine", "transformers"),
            "decode_speedup": _ratio(decode, "transformers", "engine"),
        }


def time_to_first_token(repeats: int) -> dict[str, Any]:
    """Time to the first token of the second turn, each policy with a first turn of its own."""
    settings: dict[str, dict[str, Any]] = {
        "recompute": {"policy": "recompute"},
        "prefix": {"policy": "prefix"},
        "slide, no correction": {"policy": "slide", "correction_share": 0.0},
        "head, 10 % corrected": {"policy": "head", "correction_share": 0.10},
        "slide": {"policy": "slide"},
    }
    times: dict[str, list[float]] = {name: [] for name in settings}
    counts: dict[str, dict[str, int]] = {}
    shared = Engine.load(EngineConfig(repair=False, gate_share=0.0))
    engines = {
        name: Engine.from_model(shared.model, shared.tokenizer, shared.config.with_changes(**changes))
        for name, changes in settings.items()
    }
    for repeat in range(repeats + 1):
        turns = _turns(shared, repeat)
        for name, engine in engines.items():
            session = f"{repeat}"
            engine.generate(turns.first, SamplingParams(max_tokens=1), session=session)
            receipt = engine.generate(turns.second, SamplingParams(max_tokens=1), session=session).receipt
            engine.forget(session)
            if repeat:
                times[name].append(receipt.ttft_seconds)
            counts[name] = {"tokens": receipt.prompt_tokens, "computed": receipt.computed_tokens}
    for engine in (*engines.values(), shared):
        engine.close()
    return {
        "sizes": SIZES,
        "tokens": counts,
        "seconds": {name: median(values) for name, values in times.items()},
        "share_of_prefix": {name: _ratio(times, name, "prefix") for name in settings},
    }


def scattered_pages(repeats: int) -> dict[str, Any]:
    """A decode step over contiguous pages (read as views) and over scattered ones (one gather per layer)."""
    loaded = load_model(EngineConfig())
    decoder = Decoder.from_transformers(loaded.model)
    num_pages = -(-SCATTERED_TOKENS // PAGE_TOKENS)
    pool = PagePool(decoder.spec, 2 * num_pages, decoder.dtype, decoder.device)
    pool.kv.normal_(generator=torch.Generator().manual_seed(0))
    queries = StoredQueries(decoder.spec, 2 * num_pages * PAGE_TOKENS, decoder.dtype, decoder.device)
    forward = Forward(decoder, pool, queries, select_attention("auto", decoder.device, decoder.dtype))
    tables = {"contiguous": BlockTable(range(num_pages)), "scattered": BlockTable(range(0, 2 * num_pages, 2))}
    token = np.array([SCATTERED_TOKENS - 1])
    times: dict[str, list[float]] = {name: [] for name in tables}
    for repeat in range(8 * repeats + 4):
        for name, table in tables.items():
            seconds = _seconds(partial(forward.rows, np.array([1]), token, token, table, wanted=1))
            if repeat >= 4:
                times[name].append(seconds)
    return {
        "context_tokens": SCATTERED_TOKENS,
        "step_seconds": {name: median(values) for name, values in times.items()},
        "gather_share": 1 - _ratio(times, "contiguous", "scattered"),
    }


def _turns(engine: Engine, variant: int) -> Turns:
    return sized_turns(engine.tokenizer, variant=variant, **SIZES)


def _engine_times(engine: Engine, turns: Turns) -> tuple[float, float]:
    """Seconds to the first token, and the median seconds between two tokens after it."""
    marks, receipt = [], None
    params = SamplingParams(max_tokens=DECODE_TOKENS, ignore_eos=True)
    for piece in engine.stream(turns.second, params):
        marks.append(time.perf_counter())
        receipt = piece.receipt
    assert receipt is not None
    return receipt.ttft_seconds, _step(marks)


def _generate_step(model: Any, ids: torch.Tensor) -> float:
    """Median seconds between two tokens of transformers' `generate`."""

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.marks: list[float] = []

        def put(self, value: torch.Tensor) -> None:
            self.marks.append(time.perf_counter())

        def end(self) -> None:
            pass

    clock = Clock()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=DECODE_TOKENS,
            min_new_tokens=DECODE_TOKENS,
            do_sample=False,
            streamer=clock,
        )
    return _step(clock.marks[1:])  # the first call hands over the prompt


def _step(marks: list[float]) -> float:
    return median(later - earlier for earlier, later in pairwise(marks))


def _seconds(call: Callable[[], object]) -> float:
    with torch.inference_mode():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _ratio(times: dict[str, list[float]], above: str, below: str) -> float:
    """Median over the repetitions of the ratio within one repetition."""
    return median(a / b for a, b in zip(times[above], times[below], strict=True))
