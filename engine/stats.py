"""What an engine holds and has done: the numbers that `Engine.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .run.gate import GateState


@dataclass(frozen=True)
class EngineStats:
    """What an engine holds and has done so far.

    Attributes:
        model: The model's name.
        device: Where it runs.
        dtype: In what it computes.
        context_tokens: Longest prompt plus answer.
        pool_pages: Pages of the KV pool.
        free_pages: Pages that nothing refers to.
        cached_sequences: Sequences that may be reused.
        cached_tokens: Their tokens, shared ones counted once for each.
        exact_cached_tokens: Those of them that are exact: computed as if nothing had ever been slid.
        evicted_sequences: Sequences dropped for room since the start.
        waiting_requests: Calls in the queue.
        requests: Calls answered.
        fallbacks: Answered calls that reused less than their policy allows.
        prompt_tokens: Prompt tokens of answered calls; the next four say what happened to them.
        exact_tokens: See `Receipt`.
        slid_tokens: See `Receipt`.
        corrected_tokens: See `Receipt`.
        fresh_tokens: See `Receipt`.
        generated_tokens: Tokens of answers.
        repaired_tokens: Cached tokens that repair made exact.
        repair_seconds: Time spent on repair while nobody asked.
        interrupted_repairs: Steps of repair that a request stopped.
        shadow_runs: Answers whose drift was measured.
        dropped_shadow_runs: Those that were to be measured, but a request or another use of their pages came first.
        gates: For each kind of prompt that was to be measured, what is known of its drift and whether it may slide.
    """

    model: str
    device: str
    dtype: str
    context_tokens: int
    pool_pages: int
    free_pages: int
    cached_sequences: int
    cached_tokens: int
    exact_cached_tokens: int
    evicted_sequences: int
    waiting_requests: int
    requests: int = 0
    fallbacks: int = 0
    prompt_tokens: int = 0
    exact_tokens: int = 0
    slid_tokens: int = 0
    corrected_tokens: int = 0
    fresh_tokens: int = 0
    generated_tokens: int = 0
    repaired_tokens: int = 0
    repair_seconds: float = 0.0
    interrupted_repairs: int = 0
    shadow_runs: int = 0
    dropped_shadow_runs: int = 0
    gates: tuple[GateState, ...] = ()
