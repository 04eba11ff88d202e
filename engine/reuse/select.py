"""Which slid tokens are computed again: the stalest, until none above a bound is left or the budget is spent."""

from __future__ import annotations

import math

import numpy as np


def select_stalest(staleness: np.ndarray, bound: float, cap_share: float) -> np.ndarray:
    """The smallest set whose correction leaves every token's staleness below `bound`, within a cap.

    Args:
        staleness: (tokens,) float32: of every slid token.
        bound: Staleness from which on a token is corrected; 0 corrects all that the cap allows.
        cap_share: Most of the slid tokens that may be chosen, as a share.

    Returns:
        (n,) int64, increasing: indices into `staleness`, the stalest if the cap cuts the set. Of equally stale tokens
        the earlier come first.
    """
    cap = min(len(staleness), math.ceil(cap_share * len(staleness) - 1e-9))
    order = np.argsort(-staleness, kind="stable")[:cap]
    return np.sort(order[staleness[order] >= bound]).astype(np.int64)
