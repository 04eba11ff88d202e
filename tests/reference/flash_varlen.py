"""A plain twin of `flash_attn.flash_attn_varlen_func` with a block table, checking what the CUDA kernel asks for.

Contract: sequence i has query rows [cu_seqlens_q[i], cu_seqlens_q[i + 1]) and cu_seqlens_k[i + 1] - cu_seqlens_k[i]
keys, read block by block; the causal mask is aligned to the bottom right; `window_size` counts keys to the left and
right of the aligned diagonal, −1 for no limit. With `return_attn_probs` the log-sum-exp is returned too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    assert block_table is not None and softmax_scale is not None and causal
    assert dropout_p == softcap == 0.0 and alibi_slopes is None and not deterministic
    for index in (cu_seqlens_q, cu_seqlens_k, block_table):
        assert index.dtype == torch.int32 and index.is_contiguous()
    for tensor in (q, k, v):
        assert tensor.stride(-1) == 1
    assert k.shape == v.shape and k.shape[1] % 256 == 0 and k.stride() == v.stride()
    assert q.shape[1] % k.shape[2] == 0
    row_counts, key_counts = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max(row_counts) == max_seqlen_q and max(key_counts) <= max_seqlen_k
    assert int(cu_seqlens_q[-1]) == len(q) and block_table.shape[0] == len(row_counts)

    out = torch.empty_like(q)
    lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32)
    group = q.shape[1] // k.shape[2]
    left, right = window_size
    for idx, (rows, keys) in enumerate(zip(row_counts, key_counts, strict=True)):
        blocks = block_table[idx].long()
        key, value = (part[blocks].flatten(0, 1)[:keys].transpose(0, 1).unsqueeze(1).float() for part in (k, v))
        start = int(cu_seqlens_q[idx])
        query = q[start : start + rows].float().unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        ahead = torch.arange(keys) - (torch.arange(rows)[:, None] + keys - rows)
        hidden = ahead > 0
        if left >= 0:
            hidden |= ahead < -left
        if right >= 0:
            hidden |= ahead > right
        scores = (query @ key.mT * softmax_scale).masked_fill(hidden, -torch.inf)
        lse[:, start : start + rows] = scores.logsumexp(-1).flatten(0, 1)
        out[start : start + rows] = (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    # Without dropout the kernel gives no probabilities, only the log-sum-exp, (heads, rows) as the rows are packed.
    return (out, lse, None) if return_attn_probs else out
