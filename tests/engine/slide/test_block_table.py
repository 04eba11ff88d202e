"""Where tokens lie: in page order, with slots left out where positions leave a gap."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.engine.slide.block_table import BlockTable, slot_gaps

STEPS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 7, 16, 17, 33, 400]), min_size=1, max_size=120)


def positions_of(steps: list[int]) -> np.ndarray:
    return np.cumsum([0, *steps])


@given(STEPS, st.randoms(use_true_random=False))
def test_tokens_keep_their_place_in_a_page_when_positions_leave_gaps(steps: list[int], random) -> None:
    positions = positions_of(steps)
    pages = list(range(len(positions) * 2))
    random.shuffle(pages)
    table = BlockTable(pages, slot_gaps(positions))
    slots = table.slots(np.arange(len(positions)))
    assert (slots % 16 == positions % 16).all()
    assert len(set(slots.tolist())) == len(slots), "no slot is used twice"
    indices = table.page_indices(np.arange(len(positions)))
    assert (np.diff(indices) <= 1).all() and (np.diff(indices) >= 0).all(), "no page is skipped"
    assert [pages.index(slot // 16) for slot in slots.tolist()] == indices.tolist()


@given(STEPS, st.data())
def test_runs_hold_the_tokens_in_order_when_pages_are_scattered(steps: list[int], data) -> None:
    positions = positions_of(steps)
    pages = data.draw(st.permutations(range(len(positions) + 2)))
    table = BlockTable(pages, slot_gaps(positions))
    start = data.draw(st.integers(0, len(positions) - 1))
    stop = data.draw(st.integers(start, len(positions)))
    runs = table.runs(start, stop)
    slots = [slot for first, last in runs for slot in range(first, last)]
    assert slots == table.slots(np.arange(start, stop)).tolist()
    assert all(before[1] != after[0] for before, after in pairwise(runs)), "neighbours are merged"


@given(STEPS, st.data())
def test_first_pages_hold_the_first_tokens_when_a_table_is_cut(steps: list[int], data) -> None:
    positions = positions_of(steps)
    whole = BlockTable(range(len(positions) + 2), slot_gaps(positions))
    count = data.draw(st.integers(1, len(positions)))
    cut = whole.first_pages(count)
    assert np.array_equal(cut.slots(np.arange(count)), whole.slots(np.arange(count)))
    assert count <= cut.capacity_tokens < count + 16 + 15
    assert len(cut.pages) == cut.page_indices(np.array([count - 1]))[0] + 1


def test_nothing_is_left_out_when_positions_are_contiguous_or_leap_by_pages() -> None:
    assert not len(slot_gaps(np.arange(50))) and not len(slot_gaps(np.array([0, 1, 2 + 32, 3 + 32])))
    assert BlockTable(range(3)).capacity_tokens == 48
