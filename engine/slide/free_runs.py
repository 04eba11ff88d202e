"""Which pages of a pool are free, as contiguous runs. Plain numbers; who owns a page is the `PagePool`'s business."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import pairwise

GROWTH_PAGES = 64
"""Free pages left between a sequence and a new neighbour where there is room (1,024 tokens to grow in place)."""


class FreeRuns:
    """The free pages of a pool as maximal runs, found by either border and by length.

    Taking and giving back a run costs a binary search among the runs, however many pages the pool has.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_free = 0
        self._stops: dict[int, int] = {}  # a run's first page -> one past its last
        self._starts: dict[int, int] = {}  # the reverse, to join a run with the one before it
        self._by_length: list[tuple[int, int]] = []  # (length, first page), sorted
        if num_pages:
            self._insert(0, num_pages)

    def runs(self) -> list[tuple[int, int]]:
        """The free runs (first page, one past the last) in page order; for tests and statistics."""
        return sorted(self._stops.items())

    def take(self, num_pages: int, after: int | None = None) -> list[int]:
        """Takes pages out, in the order in which a sequence should use them.

        Args:
            num_pages: At most `num_free`.
            after: A page in use that the sequence ends with. If all pages fit directly behind it they are taken
                there, so that a growing sequence stays one run.

        Returns:
            One run if any free run is long enough: the smallest that also leaves `GROWTH_PAGES` on both sides, else
            the smallest that fits. Otherwise as few runs as possible, the longest first.
        """
        assert 0 <= num_pages <= self.num_free
        if after is not None and self._stops.get(after + 1, 0) - (after + 1) >= num_pages > 0:
            return self._cut(after + 1, after + 1, num_pages)
        pages: list[int] = []
        while num_pages > len(pages) and self._by_length[-1][0] < num_pages - len(pages):
            length, start = self._by_length[-1]
            pages += self._cut(start, start, length)
        return pages + self._take_run(num_pages - len(pages)) if len(pages) < num_pages else pages

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back; none of them is free now."""
        ordered = sorted(pages)
        if not ordered:
            return
        start = ordered[0]
        for page, following in pairwise([*ordered, -1]):
            if following != page + 1:
                self._insert(start, page + 1)
                start = following

    def _take_run(self, num_pages: int) -> list[int]:
        """Takes one run; a free run is at least that long."""
        roomy = bisect_left(self._by_length, (num_pages + 2 * GROWTH_PAGES, -1))
        fitting = roomy if roomy < len(self._by_length) else bisect_left(self._by_length, (num_pages, -1))
        length, start = self._by_length[fitting]
        # The page before the run belongs to a sequence that may grow, and so may the one placed here.
        gap = min(GROWTH_PAGES, (length - num_pages) // 2) if start > 0 else 0
        return self._cut(start, start + gap, num_pages)

    def _cut(self, run_start: int, start: int, num_pages: int) -> list[int]:
        """Takes `[start, start + num_pages)` out of the free run that begins at `run_start`."""
        run_stop = self._stops[run_start]
        self._remove(run_start, run_stop)
        if run_start < start:
            self._add(run_start, start)
        if start + num_pages < run_stop:
            self._add(start + num_pages, run_stop)
        return list(range(start, start + num_pages))

    def _insert(self, start: int, stop: int) -> None:
        """Adds a run, joined with its free neighbours."""
        if start in self._starts:
            before = self._starts[start]
            self._remove(before, start)
            start = before
        if stop in self._stops:
            behind = self._stops[stop]
            self._remove(stop, behind)
            stop = behind
        self._add(start, stop)

    def _add(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        self._starts[stop] = start
        insort(self._by_length, (stop - start, start))
        self.num_free += stop - start

    def _remove(self, start: int, stop: int) -> None:
        del self._stops[start]
        del self._starts[stop]
        del self._by_length[bisect_left(self._by_length, (stop - start, start))]
        self.num_free -= stop - start
