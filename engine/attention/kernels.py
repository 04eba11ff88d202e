"""Dense attention of a block of rows over a block of keys, with the log-sum-exp that lets blocks be merged.

Torch's own kernels return it through private operators; where one is missing or does not take a shape, a plain twin
of a few lines stands in. Nothing here knows pages, runs or windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[[Tensor, Tensor, Tensor, bool, "Tensor | None", float], tuple[Tensor, Tensor]]
"""(query, key, value, causal, mask, scale) → (out, lse).

query (batch, heads, rows, head_dim); key and value (batch, kv_heads, keys, head_dim), any strides with dense heads;
causal aligns row 0 with key 0; mask (rows, keys) in the query's dtype is added to the scaled products, and no row is
masked out whole. out has the query's shape and dtype, lse is float32 (batch, heads, rows).
"""


def plain(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, in float32 with a dense matrix of scores. The fallback where torch has no kernel."""
    batch, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads, rows, head_dim)
    scores = grouped @ key.float().unsqueeze(2).transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is not None:
        scores = scores + mask.float()
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ value.float().unsqueeze(2)
    return out.reshape(query.shape).to(query.dtype), lse.reshape(batch, heads, rows)


def cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for the CPU; groups of query heads share key heads natively."""
    out: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out


def cuda_flash(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for CUDA in 16 bit, its memory-efficient kernel for masks, float32 and odd widths."""
    if mask is None and query.dtype != torch.float32 and query.shape[-1] % 8 == 0:
        result: Any = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return result[0], result[1]
    return _cuda_efficient(query, key, value, causal, mask, scale)


def _cuda_efficient(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Torch's memory-efficient attention, which knows no groups: each key head is lent to its query heads."""
    batch, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1:3]
    if heads != kv_heads:
        # Expanding over a group of its own costs no memory; the kernel reads keys through their strides.
        lent = (batch, kv_heads, heads // kv_heads, keys, head_dim)
        if batch == 1:
            query = query.reshape(kv_heads, heads // kv_heads, rows, head_dim)
            key, value = (part.unsqueeze(2).expand(lent)[0] for part in (key, value))
        else:
            key, value = (part.unsqueeze(2).expand(lent).reshape(batch, heads, keys, head_dim) for part in (key, value))
    bias = None if mask is None else _aligned(mask).expand(query.shape[0], query.shape[1], rows, keys)
    result: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, causal, scale=scale
    )
    # The kernel pads the rows of its log-sum-exp.
    lse = result[1][..., :rows].reshape(batch, heads, rows)
    return result[0].reshape(batch, heads, rows, head_dim), lse


def _aligned(mask: Tensor) -> Tensor:
    """The mask with rows that begin at multiples of 16 elements, as the memory-efficient kernel asks for."""
    rows, keys = mask.shape
    if mask.stride(0) % 16 == 0 and mask.stride(1) == 1:
        return mask
    padded = mask.new_zeros(rows, -(-keys // 16) * 16)
    padded[:, :keys] = mask
    return padded[:, :keys]


def kernel_for(device: torch.device) -> Kernel:
    """The best kernel for a device; the plain one where torch lacks its private operators."""
    aten: Any = torch.ops.aten
    if device.type == "cpu" and hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return cpu_flash
    if device.type == "cuda" and hasattr(aten, "_scaled_dot_product_flash_attention"):
        return cuda_flash
    return plain


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys from attention over each.

    Args:
        out: (rows, heads, head_dim) over the first set.
        lse: (rows, heads) float32, log of the sum of its exponentials.
        other: Over the second set, same shape.
        other_lse: Same shape as `lse`.
    """
    share = torch.sigmoid(lse - other_lse).unsqueeze(-1)
    return torch.lerp(other, out, share.to(out.dtype))
