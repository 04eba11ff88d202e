"""Attention as two matrix products with a softmax between them, for bfloat16 on a CPU.

Torch's flash kernel for the CPU reaches a third of what the processor's bfloat16 products do, and the matrix of scores
fits into the cache if rows come in chunks. Keys and values are first copied head by head: a product reads the pool's
own order so much slower from cold memory that the copy pays even for one row (1,761 keys: 0.31 ms instead of 0.50,
flash kernel 0.68, one core). The scores are rounded to bfloat16, as in transformers' eager attention,
but after a shift: a score is taken relative to that of the first key, which the softmax does not notice, and
rounding errors shrink with it. Measured against float32 on real prompts, answers are as close as the flash kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .groups import Groups

CHUNK_ROWS = 128
"""Most rows whose scores are worked on at a time. Fewer waste less of the causal triangle and of the cache, but make
the threads wait for each other more often: over a whole prefill 128 beat 64 and 256."""

CHUNK_SCORES = 2 << 20
"""Most scores of a chunk, over all heads (4 MiB), unless that leaves too few rows for a product to be fast."""

LEAST_ROWS = 16
"""Fewest rows that a chunk is cut down to."""


class _Chunk(NamedTuple):
    """Rows over keys `[key_start, key_stop)`; `mask` (rows, n) or None is added to the scores of the last n keys."""

    row_start: int
    row_stop: int
    key_start: int
    key_stop: int
    mask: Tensor | None


def products_pay(device: torch.device) -> bool:
    """Whether this processor multiplies bfloat16 in hardware (with AMX torch's flash kernel does that itself)."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.cpu._is_avx512_bf16_supported()) and not torch.cpu._is_amx_tile_supported()


def attend_by_products(
    query: Tensor, keys: Tensor, groups: Groups, first_key: int, scale: float, lse: Tensor | None = None
) -> Tensor:
    """Attends from all rows of some groups.

    Args:
        query: (rows, heads, head_dim) bfloat16, rotated.
        keys: (tokens, 2 * kv_heads, head_dim): keys, rotated, and values from token `first_key` on.
        groups: Which keys the rows see.
        first_key: The token of `keys[0]`.
        scale: Factor on query-key products.
        lse: See `Attention.attend`.

    Returns:
        (rows, heads, head_dim), contiguous.
    """
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1] // 2
    by_head = keys[groups.first_key - first_key :].transpose(0, 1).contiguous()
    key, value = by_head[:kv_heads].transpose(1, 2), by_head[kv_heads:]
    nothing = torch.zeros(1, dtype=query.dtype, device=query.device)
    if rows == 1:
        # One row sees all these keys: what is below, without its bookkeeping.
        part = query.view(kv_heads, -1, head_dim)
        shift = torch.baddbmm(nothing, part, key[:, :, :1], beta=0, alpha=-scale)
        scores = torch.baddbmm(shift, part, key, alpha=scale)
        weights = scores.softmax(-1)
        if lse is not None:
            lse[0] = _logsumexp(scores, weights, shift).flatten()
        return torch.bmm(weights, value).view(query.shape)
    # Query heads that share a key head become rows of one product: (kv_heads, rows, heads / kv_heads, head_dim).
    shared = (rows, kv_heads, heads // kv_heads, head_dim)
    folded = query.view(shared).transpose(0, 1).contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    target = out.view(shared).transpose(0, 1)
    shifts = torch.baddbmm(nothing, folded.flatten(1, 2), key[:, :, :1], beta=0, alpha=-scale).view(
        *folded.shape[:3], 1
    )
    for row_start, row_stop, key_start, key_stop, mask in _chunks(groups, heads, query):
        seen = slice(key_start - groups.first_key, key_stop - groups.first_key)
        part, shift = (each[:, row_start:row_stop].flatten(1, 2) for each in (folded, shifts))
        scores = torch.baddbmm(shift, part, key[:, :, seen], alpha=scale)
        if mask is not None:
            by_row = scores.view(kv_heads, row_stop - row_start, -1, key_stop - key_start)
            by_row[..., -mask.shape[1] :] += mask.unsqueeze(1)
        weights = scores.softmax(-1)
        if lse is not None:
            total = _logsumexp(scores, weights, shift).view(kv_heads, row_stop - row_start, -1)
            lse[row_start:row_stop] = total.transpose(0, 1).flatten(1)
        mixed = torch.bmm(weights, value[:, seen])
        target[:, row_start:row_stop] = mixed.view(kv_heads, row_stop - row_start, -1, head_dim)
    return out


def _logsumexp(scores: Tensor, weights: Tensor, shift: Tensor) -> Tensor:
    """(..., rows) float32 from shifted scores (..., rows, keys), their softmax and their shift (..., rows, 1).

    A key's score and its weight give the sum of all: no second pass over the scores. That takes the first key; where
    it is hidden or its weight too small for bfloat16, the sum is made.
    """
    first = weights[..., 0].float()
    if first.min() > 0.0:
        total = scores[..., 0].float() - first.log()
    else:
        total = scores.float().logsumexp(-1)
    return total - shift.float().squeeze(-1)


def _chunks(groups: Groups, heads: int, like: Tensor) -> Iterator[_Chunk]:
    """The groups' rows in chunks whose scores stay in the cache."""
    triangle: Tensor | None = None
    for row_start, row_stop, blocks in groups.groups:
        low, last = blocks[0].key_start, blocks[-1]
        chunk_rows = max(LEAST_ROWS, min(CHUNK_ROWS, CHUNK_SCORES // (heads * (last.key_stop - low))))
        for row in range(row_start, row_stop, chunk_rows):
            stop = min(row + chunk_rows, row_stop)
            if not last.causal:
                mask = None if last.mask is None else last.mask[row - row_start : stop - row_start]
                yield _Chunk(row, stop, low, last.key_stop, mask)
                continue
            if triangle is None or len(triangle) < chunk_rows:
                shape = (chunk_rows, chunk_rows)
                triangle = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device).triu(1)
            key_stop = last.key_start + stop - row_start
            yield _Chunk(row, stop, low, key_stop, triangle[: stop - row, : stop - row])
