from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.reuse.select import DEMAND_POWER, select_needed

# Few different values, so that ties and sums right at the bound are common; exact in binary.
tokens = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=12)
eighths = st.integers(0, 8).map(lambda count: count / 8)
numbers = st.floats(0, 1, width=32)


def arrays(pairs: Sequence[tuple[float, float]], scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    values = np.array(pairs, dtype=np.float32).reshape(-1, 2) / scale
    return values[:, 0], values[:, 1]


def one_by_one(staleness: np.ndarray, demand: np.ndarray, bound: float, cap: int) -> list[int]:
    """Takes the most needed token again and again until little stale attention is left or the cap is spent."""
    left = set(range(len(staleness)))
    chosen: list[int] = []
    while len(chosen) < cap:
        stale_attention = math.fsum(float(staleness[idx]) * float(demand[idx]) for idx in left)
        if not left or (bound > 0 and stale_attention <= bound):
            break
        need = {idx: float(staleness[idx]) * float(demand[idx]) ** DEMAND_POWER for idx in left}
        best = max(need.values())
        token = min(idx for idx in left if need[idx] == best)
        left.remove(token)
        chosen.append(token)
    return sorted(chosen)


@settings(deadline=None)
@given(tokens, eighths, eighths)
def test_the_most_needed_go_until_enough_is_paid_when_taken_one_by_one(
    pairs: list[tuple[int, int]], bound: float, cap_share: float
) -> None:
    staleness, demand = arrays(pairs, scale=8)
    chosen = select_needed(staleness, demand, bound, cap_share)
    assert chosen.dtype == np.int64
    assert chosen.tolist() == one_by_one(staleness, demand, bound, math.floor(cap_share * len(staleness)))


@given(st.lists(st.tuples(numbers, numbers), max_size=200), numbers, numbers)
def test_the_bound_is_met_or_the_cap_is_spent_when_numbers_are_not_round(
    pairs: list[tuple[float, float]], bound: float, cap_share: float
) -> None:
    staleness, demand = arrays(pairs)
    chosen = select_needed(staleness, demand, bound, cap_share)
    assert (np.diff(chosen) > 0).all()
    left = math.fsum((np.delete(staleness, chosen).astype(float) * np.delete(demand, chosen)).tolist())
    assert len(chosen) == math.floor(cap_share * len(staleness) + 1e-9) or left <= bound * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize(
    ("cap_share", "count"), [(0.0, 0), (0.001, 0), (0.01, 1), (0.26, 26), (0.269, 26), (0.29, 29), (1.0, 100)]
)
def test_the_whole_cap_is_spent_when_the_bound_is_zero(cap_share: float, count: int) -> None:
    nothing = np.zeros(100, dtype=np.float32)
    assert select_needed(nothing, nothing, 0.0, cap_share).tolist() == list(range(count))


def test_nothing_is_chosen_when_nothing_stale_is_looked_at() -> None:
    stale, looked_at = arrays([(0.5, 0.0), (0.0, 0.25), (1.0, 0.0)])
    assert select_needed(stale, looked_at, 1e-9, 1.0).tolist() == []


def test_small_shares_count_when_the_prompt_is_long() -> None:
    """A hundred thousand tokens of almost no stale attention each are too much together."""
    staleness, demand = np.full(100_000, 0.1, dtype=np.float32), np.full(100_000, 1e-5, dtype=np.float32)
    assert len(select_needed(staleness, demand, 0.05, 1.0)) == pytest.approx(50_000, abs=2)
