"""Oracles of the page pool and the cache index: sets, dictionaries and lists, nothing clever."""

from __future__ import annotations


class NaivePages:
    """Who owns which page: a count for every page of the pool."""

    def __init__(self, num_pages: int) -> None:
        self.references = dict.fromkeys(range(num_pages), 0)

    def free(self) -> set[int]:
        return {page for page, count in self.references.items() if count == 0}

    def take(self, pages: list[int]) -> None:
        assert len(set(pages)) == len(pages)
        assert set(pages) <= self.free()
        self.add(pages, 1)

    def add(self, pages: list[int], owners: int) -> None:
        for page in pages:
            self.references[page] += owners

    def longest_free_run(self) -> int:
        longest = length = 0
        for count in self.references.values():
            length = 0 if count else length + 1
            longest = max(longest, length)
        return longest


def evicted_ids(
    idle: list[tuple[int, list[int]]], references: dict[int, int], num_free: int, num_pages_wanted: int
) -> list[int]:
    """Ids to evict from `idle` (id, pages), least recently used first; none if all of them would not be enough."""
    counts = dict(references)
    evicted: list[int] = []
    for sequence_id, pages in idle:
        if num_free >= num_pages_wanted:
            break
        evicted.append(sequence_id)
        for page in pages:
            counts[page] -= 1
            num_free += counts[page] == 0
    return evicted if num_free >= num_pages_wanted else []
