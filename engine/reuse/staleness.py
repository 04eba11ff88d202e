"""Staleness: how much a slid token's KV depended on what is gone, and how much it would depend on what is new.

Two-sided, from stored queries (DESIGN section 4): *gone mass* is the attention that the token paid to donor tokens
that the prompt no longer has; *new mass* is what it would pay to tokens that were not there, e / (1 + e) with
e = Σ exp(q·k − lse). Both are averaged over the heads of the probe layers. What a token was left with by earlier turns
(its debt) is added by the caller.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..model.spec import ModelSpec
from ..position.rope import rotate_keys, turn_by
from ..slide.block_table import BlockTable
from ..slide.pages import PagePool
from ..slide.queries import StoredQueries

CHUNK_SCORES = 1 << 21
"""Most scores worked on at a time, over all heads."""


class Keys:
    """Cached keys to be asked about: their slots and token order in one sequence.

    Attributes:
        tokens: (keys,) int64, increasing: token indices.
        slots: (keys,) int64, on the pool's device.
    """

    def __init__(self, tokens: np.ndarray, table: BlockTable, device: torch.device) -> None:
        self.tokens = tokens
        self.slots = torch.from_numpy(table.slots(tokens)).to(device)


def attention_mass(
    pool: PagePool,
    queries: StoredQueries,
    spec: ModelSpec,
    query_slots: Tensor,
    query_turns: np.ndarray,
    query_tokens: np.ndarray,
    keys: Keys,
    *,
    bounded: bool,
) -> Tensor:
    """How much attention stored queries pay to some keys, as a share of what they paid in all.

    Args:
        pool: Holds the keys.
        queries: Holds the queries.
        spec: The model's geometry.
        query_slots: (rows,) int64, on the pool's device: where the stored queries lie.
        query_turns: (rows,) int64: positions by which each query is turned before it meets the keys.
        query_tokens: (rows,) int64: token index of each query in the keys' sequence; it sees only keys before it.
        keys: What is asked about.
        bounded: Whether the sum e becomes e / (1 + e), for keys that were not among those paid for.

    Returns:
        (rows,) float32: mean over layers and heads, from 0 to 1.
    """
    rows, heads = len(query_tokens), spec.num_heads
    device = pool.kv.device
    total = torch.zeros(rows, dtype=torch.float32, device=device)
    if not rows or not len(keys.tokens):
        return total
    hidden = _hidden(query_tokens, keys.tokens, None, device)
    turned = np.any(query_turns)
    turn = turn_by(torch.from_numpy(query_turns), spec.rope, device) if turned else None
    chunk = max(1, CHUNK_SCORES // (heads * len(keys.tokens)))
    for layer_idx in queries.layers:
        window = spec.windows[layer_idx]
        mask = hidden if window is None else _hidden(query_tokens, keys.tokens, window, device)
        key = pool.layer(layer_idx)[:, : spec.num_kv_heads].index_select(0, keys.slots).float()
        key = key.permute(1, 2, 0)  # (kv_heads, head_dim, keys)
        query, lse = queries.read(layer_idx, query_slots)
        if turn is not None:
            query = rotate_keys(query, turn, spec.rope)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            grouped = query[part].view(-1, spec.num_kv_heads, heads // spec.num_kv_heads, spec.head_dim)
            count = len(grouped)
            folded = grouped.transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim)
            scores = (folded @ key).view(spec.num_kv_heads, count, -1, len(keys.tokens)).transpose(0, 1)
            scores = scores.mul_(spec.attention_scale) - lse[part].view(count, spec.num_kv_heads, -1, 1)
            if mask is not None:
                scores.masked_fill_(mask[part].view(count, 1, 1, -1), -torch.inf)
            mass = scores.exp_().sum(-1)
            # e / (1 + e), which also holds where e is too large for float32.
            total[part] += (mass.log_().sigmoid_() if bounded else mass.clamp_max_(1.0)).mean((1, 2))
    return total / max(1, len(queries.layers))


def _hidden(queries: np.ndarray, keys: np.ndarray, window: int | None, device: torch.device) -> Tensor | None:
    """(rows, keys) True where a query does not see a key, or None if every query sees every key."""
    hidden = keys[None, :] >= queries[:, None]
    if window is not None:
        hidden |= keys[None, :] <= queries[:, None] - window
    return torch.from_numpy(hidden).to(device) if hidden.any() else None
