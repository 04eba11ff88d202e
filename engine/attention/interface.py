"""What an attention backend is, and what a forward pass tells it once for all layers.

Rows are the active tokens of one sequence; keys are all of its tokens, in its pages. A row sees every token up to and
including its own, or the last `window` of them. Positions play no part here: keys and queries come rotated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..config import PAGE_TOKENS
from ..slide.block_table import BlockTable

COPIED_RUNS = 16
"""Up to so many runs of slots, a CPU copies slices instead of gathering by number: 0.04 ms for 1,760 keys in 4 runs
(bfloat16), where a gather takes as long alone and, on a busy machine, waits for its threads."""


class RowRun(NamedTuple):
    """Rows that are neighbours in the sequence: row `row_start + i` is token `token_start + i`."""

    row_start: int
    row_stop: int
    token_start: int

    @property
    def token_stop(self) -> int:
        """One past the run's last token."""
        return self.token_start + self.row_stop - self.row_start


def row_runs(tokens: np.ndarray) -> tuple[RowRun, ...]:
    """Splits strictly increasing token indices (rows,) into runs of neighbours."""
    borders = [0, *(np.flatnonzero(np.diff(tokens) != 1) + 1).tolist(), len(tokens)]
    return tuple(RowRun(start, stop, int(tokens[start])) for start, stop in pairwise(borders))


@dataclass(frozen=True)
class Layout:
    """Where one forward pass's rows and keys lie, the same in all layers.

    Attributes:
        tokens: (rows,) int64, strictly increasing: the rows' token indices.
        runs: The rows in runs of neighbouring tokens.
        num_keys: Keys of the sequence that some row may see: tokens `[0, num_keys)`.
        first_slot: The slot of token 0 if all keys lie one after the other in the pool, else None.
        slots: On a CPU, where the keys lie in a few runs: their slot ranges (first, past last), in token order.
        pages: (pages,) int64 on the device: the pages that hold the keys, in token order; None if one of the two above
            is set or slots are left out.
        numbers: (keys,) int64 on the device: the keys' slots where none of the others is set.
        prepared: What a backend worked out for a window (its groups of rows, masks), by window.
    """

    tokens: np.ndarray
    runs: tuple[RowRun, ...]
    num_keys: int
    first_slot: int | None
    slots: tuple[tuple[int, int], ...] = ()
    pages: Tensor | None = None
    numbers: Tensor | None = None
    prepared: dict[int | None, Any] = field(default_factory=dict)


class Attention(Protocol):
    """A way to attend. One instance serves one engine and is not safe for several threads at once."""

    def layout(self, table: BlockTable, tokens: np.ndarray) -> Layout:
        """Prepares a forward pass.

        Args:
            table: The sequence's pages.
            tokens: (rows,) int64, strictly increasing: the active rows' token indices. For later steps with fewer
                rows (the last layer needs only those whose logits are wanted) make another layout.
        """
        ...

    def attend(
        self,
        query: Tensor,
        kv: Tensor,
        layout: Layout,
        *,
        scale: float,
        window: int | None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attends from the rows to all tokens up to their own.

        Args:
            query: (rows, heads, head_dim), rotated; any strides with dense heads.
            kv: (slots, 2 * kv_heads, head_dim), contiguous: one layer's pool, keys (rotated) before values. The rows'
                own keys and values have been written to it.
            layout: Of the same rows.
            scale: Factor on query-key products.
            window: How many tokens a row sees, itself included, or None for all.
            lse: (rows, heads) float32, receives the log of the sum of the exponentials of each row's scaled scores.

        Returns:
            (rows, heads, head_dim), the query's dtype.
        """
        ...


def make_layout(table: BlockTable, tokens: np.ndarray, device: torch.device) -> Layout:
    """The layout of some rows; host work only, apart from one small copy to the device if the pages are scattered."""
    assert len(tokens) > 0, "a forward pass has at least one row"
    num_keys = int(tokens[-1]) + 1
    rows = row_runs(tokens)
    slots = table.runs(0, num_keys)
    if len(slots) == 1:
        return Layout(tokens, rows, num_keys, first_slot=slots[0][0])
    if device.type == "cpu" and len(slots) <= COPIED_RUNS:
        return Layout(tokens, rows, num_keys, None, slots=tuple(slots))
    table = table.first_pages(num_keys)
    if len(table.gaps):
        return Layout(tokens, rows, num_keys, None, numbers=to_device(table.slots(np.arange(num_keys)), device))
    return Layout(tokens, rows, num_keys, None, pages=to_device(np.asarray(table.pages, dtype=np.int64), device))


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A small host array on the device, without waiting for it where the device can copy on its own."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class KeyReader:
    """Reads a sequence's keys and values as one tensor: a view of the pool, or a gather into a reused buffer."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def read(self, kv: Tensor, layout: Layout, start: int = 0, padded_tokens: int | None = None) -> tuple[Tensor, int]:
        """The keys and values of tokens `[first, layout.num_keys)`.

        Args:
            kv: (slots, 2 * kv_heads, head_dim), contiguous.
            layout: Of the forward pass.
            start: First token that is needed.
            padded_tokens: Returns at least this many rows; those past the sequence's end hold anything.

        Returns:
            (tokens, 2 * kv_heads, head_dim), valid until the next call, and `first`, which is at most `start`.
        """
        wanted = layout.num_keys if padded_tokens is None else start + padded_tokens
        if layout.first_slot is not None and layout.first_slot + wanted <= len(kv):
            return kv[layout.first_slot + start : layout.first_slot + wanted], start
        if layout.slots:
            return self._copied(kv, layout.slots, start, wanted), start
        if layout.numbers is not None:
            buffer = self._room(kv, wanted - start)
            target = buffer[: layout.num_keys - start].view(layout.num_keys - start, -1)
            torch.index_select(kv.view(len(kv), -1), 0, layout.numbers[start:], out=target)
            return buffer[: wanted - start], start
        first_page = start // PAGE_TOKENS
        first = first_page * PAGE_TOKENS
        pages = layout.pages
        if pages is None:
            assert layout.first_slot is not None
            page = layout.first_slot // PAGE_TOKENS
            pages = torch.arange(page, page - (-layout.num_keys // PAGE_TOKENS), device=kv.device)
        pages = pages[first_page:]
        rows = max(len(pages) * PAGE_TOKENS, wanted - first)
        buffer = self._room(kv, rows)
        by_page = kv.view(-1, PAGE_TOKENS * kv.shape[1] * kv.shape[2])
        target = buffer[: len(pages) * PAGE_TOKENS].view(len(pages), -1)
        torch.index_select(by_page, 0, pages, out=target)
        return buffer[: wanted - first], first

    def _copied(self, kv: Tensor, runs: tuple[tuple[int, int], ...], start: int, wanted: int) -> Tensor:
        """The keys from token `start` on, run by run, in a buffer of at least `wanted - start` rows."""
        buffer = self._room(kv, wanted - start)
        token = 0
        for slot, stop in runs:
            skipped = max(0, start - token)
            if slot + skipped < stop:
                at = token + skipped - start
                buffer[at : at + stop - slot - skipped] = kv[slot + skipped : stop]
            token += stop - slot
        return buffer[: wanted - start]

    def _room(self, kv: Tensor, rows: int) -> Tensor:
        """A buffer of at least so many rows, contiguous, in the pool's dtype."""
        buffer = self._buffer
        fits = buffer is not None and buffer.shape[1:] == kv.shape[1:] and buffer.dtype == kv.dtype
        if buffer is None or not fits or len(buffer) < rows or buffer.device != kv.device:
            # A normal tensor, so that it can be written in and out of inference mode; some room to grow into.
            # Zeros, because whatever lies past the sequence's end must at least be finite.
            with torch.inference_mode(False):
                buffer = torch.zeros((rows + rows // 4 + PAGE_TOKENS, *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
            self._buffer = buffer
        return buffer
