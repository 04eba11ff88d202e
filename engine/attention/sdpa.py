"""Attention with torch's own kernels, split into blocks of keys and merged by log-sum-exp. Works everywhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..slide.block_table import BlockTable
from .groups import Block, groups_for
from .interface import KeyReader, Layout, make_layout
from .kernels import Kernel, kernel_for, merge
from .products import attend_by_products, products_pay

FOLD_ROWS = 64
"""Up to so many rows, query heads that share a key head are folded into rows: on a CPU the kernel then reads the keys
once per key head and works on more rows at a time (1 row over 1,761 keys: 0.19 ms instead of 1.1). Measured on 2
cores in bfloat16; the difference is gone at about 128 rows."""


class SdpaAttention:
    """Torch kernels on views of the pool, or on one gather per layer where a sequence's pages are scattered.

    In bfloat16 on a CPU that multiplies it in hardware, matrix products on a copy by heads take the kernels' place.
    """

    def __init__(self, device: torch.device, kernel: Kernel | None = None) -> None:
        """Takes the best kernel for `device` unless one is given."""
        self._device = device
        self._kernel = kernel or kernel_for(device)
        self._products = kernel is None and products_pay(device)
        self._reader = KeyReader()

    def layout(self, table: BlockTable, tokens: np.ndarray) -> Layout:
        """See `Attention.layout`."""
        return make_layout(table, tokens, self._device)

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
        """See `Attention.attend`."""
        planned = groups_for(layout, window, query.dtype, query.device)
        groups = planned.groups
        keys, first_key = self._reader.read(kv, layout, planned.first_key)
        if self._products and query.dtype == torch.bfloat16:
            return attend_by_products(query, keys, planned, first_key, scale, lse)
        kv_heads = kv.shape[1] // 2
        by_head = keys.transpose(0, 1).unsqueeze(0)
        key, value = by_head[:, :kv_heads], by_head[:, kv_heads:]
        if len(groups) == 1:
            return self._group(query, key, value, groups[0].blocks, first_key, scale, lse)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for row_start, row_stop, blocks in groups:
            rows = slice(row_start, row_stop)
            rows_lse = None if lse is None else lse[rows]
            out[rows] = self._group(query[rows], key, value, blocks, first_key, scale, rows_lse)
        return out

    def _group(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: tuple[Block, ...],
        first_key: int,
        scale: float,
        lse: Tensor | None,
    ) -> Tensor:
        """One group's rows over its one or two blocks of keys."""
        out, block_lse = self._block(query, key, value, blocks[0], first_key, scale)
        total = block_lse
        for block in blocks[1:]:
            other, other_lse = self._block(query, key, value, block, first_key, scale)
            out = merge(out, block_lse, other, other_lse)
            total = torch.logaddexp(block_lse, other_lse) if lse is not None else total
        if lse is not None:
            lse.copy_(total)
        return out

    def _block(
        self, query: Tensor, key: Tensor, value: Tensor, block: Block, first_key: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Rows over one block of keys: out (rows, heads, head_dim), lse (rows, heads)."""
        rows, heads, head_dim = query.shape
        start, stop = block.key_start - first_key, block.key_stop - first_key
        if start or stop != key.shape[2]:
            key, value = key[:, :, start:stop], value[:, :, start:stop]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        if group > 1 and rows <= FOLD_ROWS and not block.causal and block.mask is None:
            folded = query.view(rows, kv_heads, group, head_dim).transpose(0, 1).reshape(1, kv_heads, -1, head_dim)
            out, lse = self._kernel(folded, key, value, False, None, scale)
            out = out.view(kv_heads, rows, group, head_dim) if rows > 1 else out[0].unsqueeze(1)
            return (
                out.transpose(0, 1).reshape(rows, heads, head_dim),
                lse.reshape(kv_heads, rows, group).transpose(0, 1).reshape(rows, heads),
            )
        out, lse = self._kernel(query.transpose(0, 1).unsqueeze(0), key, value, block.causal, block.mask, scale)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)
