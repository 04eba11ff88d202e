"""A sequence's block table: its pages in token order, and the slots that are left out where positions leave a gap."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..config import PAGE_TOKENS

NO_GAPS = np.empty((0, 2), dtype=np.int64)
"""The gaps of a sequence whose positions are contiguous."""


def slot_gaps(positions: np.ndarray) -> np.ndarray:
    """Where a sequence leaves slots out, so that its tokens keep their place in a page while an update varies.

    A token's place in its page follows its position, modulo the page: behind a reserved range that is not full (a gap
    in the positions) up to 15 slots stay unused. Text whose positions stay then lies in pages as it lay before, however
    many tokens stand in front of it, and shares them.

    Args:
        positions: (tokens,) int64, strictly increasing.

    Returns:
        (gaps, 2) int64: a token, increasing, and how many slots are left out up to it in all.
    """
    left_out = (np.diff(positions) - 1) % PAGE_TOKENS
    tokens = np.flatnonzero(left_out)
    return np.column_stack([tokens + 1, left_out[tokens].cumsum()]) if len(tokens) else NO_GAPS


class BlockTable:
    """The pages of one sequence, in token order, the same page numbers in every layer.

    Token `t` has place `p = t + slots left out up to it` and lies in slot
    `pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS` of every layer's pool tensor.
    It counts no references: whoever puts a page in or takes it out tells the `PagePool`.

    Attributes:
        pages: The pages in order.
        gaps: (gaps, 2) int64, see `slot_gaps`; none by default.
    """

    def __init__(self, pages: Iterable[int] = (), gaps: np.ndarray = NO_GAPS) -> None:
        self.pages: list[int] = list(pages)
        self.gaps = gaps

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the pages held now."""
        return len(self.pages) * PAGE_TOKENS - (int(self.gaps[-1, 1]) if len(self.gaps) else 0)

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """Places of the given tokens among all slots of the pages, (n,) int64."""
        if not len(self.gaps):
            return tokens
        left_out = np.append(0, self.gaps[:, 1])
        places: np.ndarray = tokens + left_out[np.searchsorted(self.gaps[:, 0], tokens, side="right")]
        return places

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """Slots of the given tokens, (n,) int64."""
        places = self.places(tokens)
        pages = np.asarray(self.pages, dtype=np.int64)[places // PAGE_TOKENS]
        slots: np.ndarray = pages * PAGE_TOKENS + places % PAGE_TOKENS
        return slots

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Slot ranges (first, past last) that hold tokens `[start, stop)` in order, neighbours merged."""
        slots = self.slots(np.arange(start, stop))
        borders = np.flatnonzero(np.diff(slots) != 1)
        firsts, lasts = np.append(0, borders + 1), np.append(borders, len(slots) - 1)
        return list(zip(slots[firsts].tolist(), (slots[lasts] + 1).tolist(), strict=True)) if len(slots) else []

    def page_indices(self, tokens: np.ndarray) -> np.ndarray:
        """For each of the given tokens the index in `pages` of the page that holds it, (n,) int64."""
        indices: np.ndarray = self.places(tokens) // PAGE_TOKENS
        return indices

    def first_pages(self, num_tokens: int) -> BlockTable:
        """The table of the first tokens alone, at least one."""
        num_pages = int(self.page_indices(np.array([num_tokens - 1]))[0]) + 1
        return BlockTable(self.pages[:num_pages], self.gaps[self.gaps[:, 0] < num_tokens])
