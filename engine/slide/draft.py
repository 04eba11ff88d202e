"""A draft of a cached sequence: pages in which some of its tokens can be computed again without anybody seeing it.

The cached pages are never written, whoever shares them: what is to be written goes to pages of its own, which take the
place of the cached ones once all layers are done, or are given back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .block_table import BlockTable
from .pages import PagePool
from .queries import StoredQueries
from .slots import Slots


class Draft:
    """A block table with pages of its own for some tokens, and the cached ones for the rest.

    Attributes:
        table: For reading all tokens and writing those that were asked for.
    """

    def __init__(self, table: BlockTable, num_tokens: int, tokens: np.ndarray, pool: PagePool, queries: StoredQueries):
        """Takes free pages; nothing cached is forgotten for them.

        Args:
            table: The cached sequence's pages; must stay as they are until `commit` or `discard`.
            num_tokens: Tokens of it that count; the pages behind them are left out.
            tokens: (n,) int64, increasing, at least one: those that will be written, in every layer.
            pool: Where all pages lie.
            queries: The stored queries beside them.

        Raises:
            PoolFullError: Fewer pages are free; nothing was taken.
        """
        self._pool = pool
        self._queries = queries
        self._cached = table
        self._page_idxs = np.unique(table.page_indices(tokens)).tolist()
        first = self._page_idxs[0]
        self._own = pool.allocate(len(self._page_idxs), after=table.pages[first - 1] if first else None)
        self.table = table.first_pages(num_tokens)
        for page_idx, page in zip(self._page_idxs, self._own, strict=True):
            self.table.pages[page_idx] = page
        beside = np.flatnonzero(np.isin(table.page_indices(np.arange(num_tokens)), self._page_idxs))
        beside = np.setdiff1d(beside, tokens, assume_unique=True)
        device = pool.kv.device
        self._copied = (
            (Slots(table.slots(beside), device), Slots(self.table.slots(beside), device)) if len(beside) else None
        )

    def copies(self, check: Callable[[], None]) -> Callable[[int], None]:
        """What to call with each layer's index before that layer is read (`Forward.rows`).

        Args:
            check: Called before each layer; raises to stop.
        """

        def before_layer(layer_idx: int) -> None:
            check()
            self.copy(layer_idx)

        return before_layer

    def copy(self, layer_idx: int) -> None:
        """Brings along what one layer holds of the other tokens in the draft's own pages; before that is read."""
        if self._copied is None:
            return
        source, target = self._copied
        layer = self._pool.layer(layer_idx)
        target.write(layer, source.read(layer))
        if self._queries.wants(layer_idx):
            self._queries.move(layer_idx, source, target)

    def commit(self) -> None:
        """Puts the draft's own pages into the cached table and gives the old ones back, in no step that can fail."""
        old = [self._cached.pages[page_idx] for page_idx in self._page_idxs]
        for page_idx, page in zip(self._page_idxs, self._own, strict=True):
            self._cached.pages[page_idx] = page
        self._pool.release(old)

    def discard(self) -> None:
        """Gives the draft's own pages back; the cached sequence is as it was."""
        self._pool.release(self._own)
