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
    num_keys = int(tokens[-1]) + 1
    kv_heads = kv.shape[1] // 2
    read = kv[torch.from_numpy(table.slots(np.arange(num_keys)))].double()
    group = query.shape[1] // kv_heads
    key, value = (part.repeat_interleave(group, dim=1) for part in (read[:, :kv_heads], read[:, kv_heads:]))
    scores = torch.einsum("rhd,khd->hrk", query.double(), key) * scale
    behind = torch.from_numpy(tokens)[:, None] - torch.arange(num_keys)
    seen = (behind >= 0) & (behind < (window or num_keys))
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, value)
