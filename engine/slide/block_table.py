"""A sequence's block table: its pages in token order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..config import PAGE_TOKENS


class BlockTable:
    """The pages of one sequence, in token order, the same page numbers in every layer.

    Token `t` lies in slot `pages[t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS` of every layer's pool tensor.
    It counts no references: whoever puts a page in or takes it out tells the `PagePool`.
    """

    def __init__(self, pages: Iterable[int] = ()) -> None:
        self.pages: list[int] = list(pages)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the pages held now."""
        return len(self.pages) * PAGE_TOKENS

    def slots(self, tokens: np.ndarray) -> np.ndarray:
        """Slots of the given tokens, (n,) int64."""
        pages = np.asarray(self.pages, dtype=np.int64)[tokens // PAGE_TOKENS]
        slots: np.ndarray = pages * PAGE_TOKENS + tokens % PAGE_TOKENS
        return slots

    def runs(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Slot ranges (first, past last) that hold tokens `[start, stop)` in order, neighbours merged."""
        runs: list[tuple[int, int]] = []
        token = start
        while token < stop:
            page, offset = divmod(token, PAGE_TOKENS)
            count = min(PAGE_TOKENS - offset, stop - token)
            slot = self.pages[page] * PAGE_TOKENS + offset
            if runs and runs[-1][1] == slot:
                runs[-1] = (runs[-1][0], slot + count)
            else:
                runs.append((slot, slot + count))
            token += count
        return runs
