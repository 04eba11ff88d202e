"""Which slid tokens are computed again: stale ones that the new text looks at, until little stale attention is left."""

from __future__ import annotations

import math

import numpy as np

DEMAND_POWER = 0.5
"""How strongly demand counts beside staleness. Below 1 because the answer will look at other tokens than the text
before it did: over long conversations lower powers do better, over short prompts higher ones, by little."""


def share_of(share: float, num_tokens: int) -> int:
    """A share of so many tokens, rounded up; a rounding error never adds one."""
    return min(num_tokens, math.ceil(share * num_tokens - 1e-9))


def select_needed(staleness: np.ndarray, demand: np.ndarray, bound: float, cap_share: float) -> np.ndarray:
    """The tokens to correct, in the order of staleness times demand to the power of `DEMAND_POWER`.

    So many are taken that the others' stale attention, the sum of demand times staleness, is at most `bound`, within
    a cap.

    Args:
        staleness: (tokens,) float32: of every slid token, 0 to 1.
        demand: (tokens,) float32: share of the new text's attention that each gets.
        bound: Stale attention that may be left, as a share of all attention; 0 spends the whole cap.
        cap_share: Most of the slid tokens that may be chosen, as a share.

    Returns:
        (n,) int64, increasing: indices into `staleness`. Of equally needed tokens the earlier come first.
    """
    cap = int(cap_share * len(staleness) + 1e-9)  # a rounding error never takes one away
    # In float64, or the sum over a long prompt would drown the last tokens' shares.
    need, stale_attention = staleness.astype(np.float64), staleness.astype(np.float64) * demand
    order = np.argsort(-need * demand**DEMAND_POWER, kind="stable")
    left = stale_attention[order][::-1].cumsum()[::-1]  # at each place: what is left if the tokens from here on stay
    enough = len(order) if bound == 0.0 else int((left > bound).sum())
    return np.sort(order[: min(cap, enough)]).astype(np.int64)
