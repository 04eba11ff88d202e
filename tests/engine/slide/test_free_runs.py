from __future__ import annotations

import time

from cacheslide_agents.engine.slide.free_runs import GROWTH_PAGES, FreeRuns


def test_one_run_is_given_when_the_pool_is_empty() -> None:
    free = FreeRuns(100)
    assert free.take(30) == list(range(30))
    assert free.num_free == 70


def test_a_sequence_stays_one_run_when_there_is_room_behind_it() -> None:
    free = FreeRuns(1_000)
    first = free.take(10)
    second = free.take(10)
    for _ in range(GROWTH_PAGES):
        first += free.take(1, after=first[-1])
        second += free.take(1, after=second[-1])
    assert first == list(range(first[0], first[0] + len(first)))
    assert second == list(range(second[0], second[0] + len(second)))


def test_the_smallest_hole_that_fits_is_used_when_no_run_has_room_to_spare() -> None:
    free = FreeRuns(100)
    free.take(100)
    free.give(range(10, 20))
    free.give(range(40, 45))
    assert free.take(5) == [40, 41, 42, 43, 44]
    assert free.take(10) == list(range(10, 20))


def test_few_long_runs_are_given_when_no_run_is_long_enough() -> None:
    free = FreeRuns(100)
    free.take(100)
    for start, stop in [(0, 3), (10, 20), (30, 35), (50, 51)]:
        free.give(range(start, stop))
    assert free.take(17) == [*range(10, 20), *range(30, 35), 0, 1]
    assert free.runs() == [(2, 3), (50, 51)]


def test_neighbours_are_joined_when_pages_come_back_in_any_order() -> None:
    free = FreeRuns(64)
    free.take(64)
    for page in [*range(1, 64, 2), *range(62, -1, -2)]:
        free.give([page])
    assert free.runs() == [(0, 64)]
    free.take(64)
    free.give(reversed(range(64)))
    assert free.runs() == [(0, 64)]


def test_nothing_is_taken_when_no_page_is_wanted() -> None:
    free = FreeRuns(0)
    assert free.take(0) == [] and free.runs() == []
    free.give([])
    assert free.num_free == 0


def test_taking_and_giving_stays_quick_when_a_large_pool_is_full_of_holes() -> None:
    free = FreeRuns(200_000)
    free.take(200_000)
    free.give(range(0, 200_000, 2))
    started = time.process_time()
    for _ in range(1_000):
        free.give([free.take(1)[0]])
    assert time.process_time() - started < 2.0  # about 0.1 s; looking at every page would take many seconds
