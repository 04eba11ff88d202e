"""Attention by its definition: float64, one dense mask, keys looked up token by token."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine.slide.block_table import BlockTable


def dense_attention(
    query: Tensor, kv: Tensor, table: BlockTable, tokens: np.ndarray, scale: float, window: int | None
) -> Tensor:
    """Rows (rows, heads, head_dim), being `tokens`, over all tokens up to their own, or the last `window` of them."""
    scores, value = _scores(query, kv, table, tokens, scale, window)
    return torch.einsum("hrk,khd->rhd", scores.softmax(-1), value)


def dense_lse(
    query: Tensor, kv: Tensor, table: BlockTable, tokens: np.ndarray, scale: float, window: int | None
) -> Tensor:
    """(rows, heads): log of the sum of the exponentials of the scores that `dense_attention` gives weight to."""
    scores, _ = _scores(query, kv, table, tokens, scale, window)
    return scores.exp().sum(-1).log().T


def _scores(
    query: Tensor, kv: Tensor, table: BlockTable, tokens: np.ndarray, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """(heads, rows, keys) with −inf where nothing is seen, and values (keys, heads, head_dim)."""
    num_keys = int(tokens[-1]) + 1
    kv_heads = kv.shape[1] // 2
    read = kv[torch.from_numpy(table.slots(np.arange(num_keys)))].double()
    group = query.shape[1] // kv_heads
    key, value = (part.repeat_interleave(group, dim=1) for part in (read[:, :kv_heads], read[:, kv_heads:]))
    scores = torch.einsum("rhd,khd->hrk", query.double(), key) * scale
    behind = torch.from_numpy(tokens)[:, None] - torch.arange(num_keys)
    seen = (behind >= 0) & (behind < (window or num_keys))
    return scores.masked_fill(~seen, -torch.inf), value
