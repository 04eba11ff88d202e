"""Attention with the flash-attn package on CUDA: sparse rows as variable-length sequences in one call a layer.

Every run of neighbouring rows is one sequence whose keys are all tokens up to its last; flash-attn aligns its causal
mask to the bottom right, which is just that. The sequences share their keys through flash-attn's block table, whose
blocks of 256 tokens are read from the pool as a view, or from one gather per layer where pages are scattered (its
blocks must be multiples of 256 tokens, ours are of 16).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..slide.block_table import BlockTable
from .interface import KeyReader, Layout, make_layout, to_device

BLOCK_TOKENS = 256
"""The size of block that flash-attn's block table asks for."""


class _Sequences(NamedTuple):
    """The runs of a layout as flash-attn's variable-length sequences.

    Attributes:
        query_ends: (runs + 1,) int32 on the device: where each run's rows end.
        key_ends: (runs + 1,) int32 on the device: running sums of the runs' key counts.
        blocks: (runs, key blocks) int32 on the device: every run reads the same blocks.
        most_rows: Rows of the longest run.
    """

    query_ends: Tensor
    key_ends: Tensor
    blocks: Tensor
    most_rows: int


class FlashAttention:
    """flash-attn's variable-length kernel over the runs of active rows."""

    def __init__(self, device: torch.device, varlen: Callable[..., Any] | None = None) -> None:
        """Imports flash-attn unless a function with the contract of its `flash_attn_varlen_func` is given.

        Raises:
            ImportError: flash-attn is not installed.
        """
        if varlen is None:
            varlen = import_module("flash_attn").flash_attn_varlen_func
        assert varlen is not None
        self._device = device
        self._varlen = varlen
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
        # The sequences are the same for every window, so they are kept under one key.
        sequences: _Sequences | None = layout.prepared.get(None)
        if sequences is None:
            sequences = layout.prepared[None] = _sequences(layout, self._device)
        padded = sequences.blocks.shape[1] * BLOCK_TOKENS
        keys, _ = self._reader.read(kv, layout, 0, padded)
        blocks = keys.view(-1, BLOCK_TOKENS, *keys.shape[1:])
        kv_heads = kv.shape[1] // 2
        result: Any = self._varlen(
            query,
            blocks[:, :, :kv_heads],
            blocks[:, :, kv_heads:],
            cu_seqlens_q=sequences.query_ends,
            cu_seqlens_k=sequences.key_ends,
            max_seqlen_q=sequences.most_rows,
            max_seqlen_k=layout.num_keys,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=sequences.blocks,
            return_attn_probs=lse is not None,
        )
        if lse is None:
            out: Tensor = result
            return out
        out, row_lse = result[0], result[1]  # the log-sum-exp is (heads, rows)
        lse.copy_(row_lse.transpose(0, 1))
        return out


def _sequences(layout: Layout, device: torch.device) -> _Sequences:
    """The runs as sequences, copied to the device once per forward pass."""
    rows = np.array([run.row_stop - run.row_start for run in layout.runs])
    keys = np.array([run.token_stop for run in layout.runs])
    num_blocks = -(-layout.num_keys // BLOCK_TOKENS)
    return _Sequences(
        query_ends=to_device(np.concatenate(([0], rows.cumsum())).astype(np.int32), device),
        key_ends=to_device(np.concatenate(([0], keys.cumsum())).astype(np.int32), device),
        blocks=torch.arange(num_blocks, dtype=torch.int32, device=device).expand(len(rows), -1).contiguous(),
        most_rows=int(rows.max()),
    )
