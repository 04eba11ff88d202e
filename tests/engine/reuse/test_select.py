from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.reuse.select import select_stalest

# Few different values, so that ties and tokens right at the bound are common.
eighths = st.integers(0, 8).map(lambda count: count / 8)
numbers = st.floats(0, 1, width=32)


def smallest_set(staleness: list[float], bound: float) -> int:
    """Size of the smallest set without which every token is below the bound, by trying every set."""
    for size in range(len(staleness) + 1):
        for chosen in combinations(range(len(staleness)), size):
            if all(owed < bound for idx, owed in enumerate(staleness) if idx not in chosen):
                return size
    raise AssertionError("correcting everything leaves nothing")


@settings(deadline=None)
@given(st.lists(eighths, max_size=9), eighths, eighths)
def test_the_set_is_the_smallest_that_is_enough_when_the_cap_allows(
    staleness: list[float], bound: float, cap_share: float
) -> None:
    chosen = select_stalest(np.array(staleness, dtype=np.float32), bound, cap_share)
    cap = math.ceil(cap_share * len(staleness))
    assert len(chosen) == min(cap, smallest_set(staleness, bound))
    assert chosen.dtype == np.int64 and (np.diff(chosen) > 0).all()
    taken = sorted((staleness[idx] for idx in chosen), reverse=True)
    assert taken == sorted(staleness, reverse=True)[: len(chosen)], "the stalest go first"
    for idx in chosen:
        earlier = {other for other in range(idx) if staleness[other] == staleness[idx]}
        assert earlier <= set(chosen.tolist()), "of equals the earlier"


@given(st.lists(numbers, max_size=200), numbers, numbers)
def test_the_bound_is_met_or_the_cap_is_spent_when_numbers_are_not_round(
    staleness: list[float], bound: float, cap_share: float
) -> None:
    owed = np.array(staleness, dtype=np.float32)
    chosen = select_stalest(owed, bound, cap_share)
    left = np.delete(owed, chosen)
    assert (owed[chosen] >= bound).all()
    assert len(chosen) == math.ceil(cap_share * len(owed) - 1e-9) or (left < bound).all()
    assert not len(chosen) or not len(left) or owed[chosen].min() >= left.max()


@pytest.mark.parametrize(("cap_share", "count"), [(0.0, 0), (0.001, 1), (0.26, 26), (0.261, 27), (1.0, 100)])
def test_the_whole_cap_is_spent_when_the_bound_is_zero(cap_share: float, count: int) -> None:
    assert select_stalest(np.zeros(100, dtype=np.float32), 0.0, cap_share).tolist() == list(range(count))


def test_only_tokens_from_the_bound_on_are_chosen_when_the_cap_is_wide() -> None:
    staleness = np.array([0.0, 0.5, 0.125, 0.5, 0.25], dtype=np.float32)
    assert select_stalest(staleness, 0.25, 1.0).tolist() == [1, 3, 4]
    assert select_stalest(staleness, 0.51, 1.0).tolist() == []
    assert select_stalest(staleness, 0.01, 0.2).tolist() == [1]
