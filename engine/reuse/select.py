"""Which slid tokens are computed again: the stalest, until little staleness is left or the budget is spent."""

from __future__ import annotations

import math

import numpy as np


def select_stalest(staleness: np.ndarray, bound: float, cap_share: float) -> np.ndarray:
    """The smallest set whose correction leaves a mean staleness of at most `bound`, within a cap.

    Args:
        staleness: (tokens,) float32: of every slid token.
        bound: Mean staleness over all slid tokens that may be left; 0 spends the whole cap.
        cap_share: Most of the slid tokens that may be chosen, as a share.

    Returns:
        (n,) int64, increasing: indices into `staleness`. Of equally stale tokens the earlier come first.
    """
    count = len(staleness)
    cap = min(count, math.ceil(cap_share * count - 1e-9))
    order = np.argsort(-staleness, kind="stable")
    left = staleness.sum(dtype=np.float64) - np.cumsum(staleness[order], dtype=np.float64)
    if bound > 0.0:
        enough = int(np.searchsorted(-left, -bound * count)) + 1 if staleness.sum() > bound * count else 0
        cap = min(cap, enough)
    return np.sort(order[:cap]).astype(np.int64)
