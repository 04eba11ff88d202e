"""How rows are grouped for dense kernels: each group attends to one or two blocks of keys. Plain numbers and masks.

A long run of neighbouring rows attends unmasked to everything before it and causally to itself. Short runs are
attended together: unmasked to everything before the first, and with one mask to the rest. Beyond a sliding window rows
go in chunks under a mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .interface import Layout, RowRun, to_device

LONG_RUN_ROWS = 64
"""A run of at least so many rows is a group of its own; shorter neighbours share one."""

GROUP_ROWS = 128
"""Most rows that short runs put into one group: more means fewer calls, but more masked keys."""

WINDOW_ROWS = 256
"""Rows of a chunk beyond a sliding window; its keys are the window and the chunk."""


class Block(NamedTuple):
    """Keys `[key_start, key_stop)`, by token, all seen (mask None, not causal), causally or under a mask."""

    key_start: int
    key_stop: int
    causal: bool = False
    mask: Tensor | None = None


class Group(NamedTuple):
    """Rows `[row_start, row_stop)` and the one or two disjoint blocks of keys that they attend to."""

    row_start: int
    row_stop: int
    blocks: tuple[Block, ...]


class Groups(NamedTuple):
    """All groups of a forward pass for one window.

    Attributes:
        first_key: The first token that any row sees.
        groups: In the order of the rows, covering them all.
    """

    first_key: int
    groups: tuple[Group, ...]


def groups_for(layout: Layout, window: int | None, dtype: torch.dtype, device: torch.device) -> Groups:
    """The groups of a layout, worked out once per window and kept in it."""
    ready: Groups | None = layout.prepared.get(window)
    if ready is None:
        ready = layout.prepared[window] = _make(layout, window, dtype, device)
    return ready


def _make(layout: Layout, window: int | None, dtype: torch.dtype, device: torch.device) -> Groups:
    masks = _Masks(dtype, device)
    groups: list[Group] = []
    # A window that no row outgrows is none.
    reach = layout.num_keys if window is None or window >= layout.num_keys else window
    for start, stop in _cut(layout.runs, layout.tokens, reach):
        tokens = layout.tokens[start:stop]
        first, last = int(tokens[0]), int(tokens[-1])
        whole = len(tokens) == last + 1 - first
        if start + 1 == stop:
            blocks: tuple[Block, ...] = (Block(max(0, first + 1 - reach), first + 1),)
        elif last < reach:
            own = (
                Block(first, last + 1, True) if whole else Block(first, last + 1, mask=masks.get(tokens, first, reach))
            )
            blocks = (Block(0, first), own) if first else (own,)
        else:
            low = max(0, first + 1 - reach)
            blocks = (Block(low, last + 1, mask=masks.get(tokens, low, reach)),)
        groups.append(Group(start, stop, blocks))
    return Groups(min(group.blocks[0].key_start for group in groups), tuple(groups))


def _cut(runs: tuple[RowRun, ...], tokens: np.ndarray, reach: int) -> list[tuple[int, int]]:
    """Row ranges of the groups: long runs alone, short ones together, chunks beyond the window."""
    ranges: list[tuple[int, int]] = []
    open_start: int | None = None
    for run in runs:
        start = run.row_start
        long = run.row_stop - start >= LONG_RUN_ROWS
        if open_start is not None and (long or run.row_stop - open_start > GROUP_ROWS):
            ranges.append((open_start, start))
            open_start = None
        if not long:
            open_start = start if open_start is None else open_start
            continue
        # Rows within the window's reach of token 0 see everything before them; the others go in chunks.
        near = min(max(start, start + reach - run.token_start), run.row_stop)
        if near > start:
            ranges.append((start, near))
        ranges += [(row, min(row + WINDOW_ROWS, run.row_stop)) for row in range(near, run.row_stop, WINDOW_ROWS)]
    if open_start is not None:
        ranges.append((open_start, runs[-1].row_stop))
    return ranges


class _Masks:
    """Additive masks; chunks of neighbouring rows that lie alike share one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._shared: dict[tuple[int, int, int], Tensor] = {}

    def get(self, tokens: np.ndarray, low: int, reach: int) -> Tensor:
        """(rows, keys) for keys `[low, tokens[-1]]`: 0 where a row sees a key, −inf elsewhere."""
        span = int(tokens[-1]) + 1 - low
        shape = (len(tokens), int(tokens[0]) - low, span)
        whole = shape[0] == span - shape[1]
        if whole and shape in self._shared:
            return self._shared[shape]
        rows = to_device(np.ascontiguousarray(tokens - low), self._device).unsqueeze(1)
        keys = torch.arange(span, device=self._device)
        hidden = (keys > rows) | (keys <= rows - reach)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        if whole:
            self._shared[shape] = mask
        return mask
