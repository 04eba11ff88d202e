"""From a prompt and what is cached to a plan: which tokens are exact, slid, corrected or fresh. Pure; no tensors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..receipt import Treatment
from .policies import PlanRequest, policy_named
from .spans import Plan

__all__ = ["PlanRequest", "assert_valid", "plan", "treatments"]


def plan(policy: str, request: PlanRequest) -> Plan:
    """Plans a prompt with the policy of that name.

    Raises:
        ConfigError: The policy does not exist.
    """
    return policy_named(policy).plan(request)


def treatments(plan: Plan) -> tuple[tuple[int, int, Treatment], ...]:
    """The plan as runs (start, stop, treatment) for the receipt; corrected tokens are runs of their own."""
    if plan.num_tokens == 0:
        return ()
    names: tuple[Treatment, ...] = ("exact", "slid", "corrected", "fresh")
    codes = np.empty(plan.num_tokens, dtype=np.int8)
    for span in plan.spans:
        codes[span.start : span.stop] = names.index(span.treatment)
    codes[plan.corrected] = names.index("corrected")
    borders = [0, *(np.flatnonzero(np.diff(codes)) + 1).tolist(), plan.num_tokens]
    return tuple((start, stop, names[codes[start]]) for start, stop in pairwise(borders))


def assert_valid(plan: Plan) -> None:
    """Asserts what holds for every plan, whatever the policy and the cache.

    Spans partition the prompt, an exact span only comes first, positions increase, corrected tokens are slid and
    increase, and the last token is fresh.
    """
    assert plan.spans and plan.spans[0].start == 0
    for before, span in pairwise(plan.spans):
        assert before.stop == span.start, f"{before} and {span} leave a gap or overlap"
        assert span.treatment != "exact" or before.treatment == "exact", f"{span} comes after {before}"
    for span in plan.spans:
        assert len(span) > 0, f"{span} is empty"
        reuses = span.treatment != "fresh"
        assert (span.source is not None) == (span.source_start is not None) == reuses, f"{span} has a wrong source"
        assert span.treatment == "slid" or not span.after_change, f"{span} is not slid"
        assert span.treatment != "exact" or span.source_start == span.start, f"{span} moved"
    assert plan.positions.shape == (plan.num_tokens,) and (np.diff(plan.positions) > 0).all()
    slid = np.zeros(plan.num_tokens, dtype=np.bool_)
    for span in plan.spans:
        slid[span.start : span.stop] = span.treatment == "slid"
    assert slid[plan.corrected].all(), "a corrected token is not slid"
    assert (np.diff(plan.corrected) > 0).all(), "corrected tokens do not increase"
    assert plan.spans[-1].treatment == "fresh", "the last token's logits are needed, so it is computed"
