"""What stored queries say about cached keys: how stale slid tokens are, and how much they are in demand.

*Staleness* is two-sided: *gone mass* is the attention that a token paid to donor tokens that the prompt no longer has;
*new mass* is what it would pay to tokens that were not there, e / (1 + e) with e = Σ exp(q·k − lse). What a token was
left with by earlier turns (its debt) is added by the caller. *Demand* is the attention that new text pays to a token.
All are averaged over the heads of the probe layers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..model.spec import ModelSpec
from ..position.rope import Rotary, rotate_keys, turn_by
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


class Asking:
    """Stored queries that ask: where they lie, and from where in the keys' sequence they look.

    Attributes:
        tokens: (rows,) int64: token index of each query in the keys' sequence; it sees only keys before it.
        slots: (rows,) int64, on the pool's device: where the queries lie.
        turns: (rows,) int64: positions by which each query is turned before it meets the keys.
    """

    def __init__(self, tokens: np.ndarray, slots: Tensor, turns: np.ndarray) -> None:
        self.tokens = tokens
        self.slots = slots
        self.turns = turns


def attention_mass(
    pool: PagePool, queries: StoredQueries, spec: ModelSpec, asking: Asking, keys: Keys, *, bounded: bool
) -> Tensor:
    """How much attention each of some stored queries pays to some keys, as a share of what it paid in all.

    Args:
        pool: Holds the keys.
        queries: Holds the queries.
        spec: The model's geometry.
        asking: Which queries.
        keys: What is asked about.
        bounded: Whether the sum e becomes e / (1 + e), for keys that were not among those paid for.

    Returns:
        (rows,) float32: mean over layers and heads, from 0 to 1.
    """
    total = torch.zeros(len(asking.tokens), dtype=torch.float32, device=pool.kv.device)
    if not len(keys.tokens):
        return total
    for part, scores in _scores(pool, queries, spec, asking, keys):
        mass = scores.exp_().sum(-1)
        # e / (1 + e), which also holds where e is too large for float32.
        total[part] += (mass.log_().sigmoid_() if bounded else mass.clamp_max_(1.0)).mean((1, 2))
    return total / max(1, len(queries.layers))


def demand(pool: PagePool, queries: StoredQueries, spec: ModelSpec, asking: Asking, keys: Keys) -> Tensor:
    """How much attention each of some keys gets from some stored queries.

    Args:
        pool: Holds the keys.
        queries: Holds the queries.
        spec: The model's geometry.
        asking: Which queries; their log-sum-exps have seen the keys.
        keys: What is asked about.

    Returns:
        (keys,) float32: mean over layers, heads and queries, from 0 to 1; at most 1 over all keys of a sequence.
    """
    total = torch.zeros(len(keys.tokens), dtype=torch.float32, device=pool.kv.device)
    if not len(keys.tokens):
        return total
    for _, scores in _scores(pool, queries, spec, asking, keys):
        total += scores.exp_().sum((0, 1, 2))
    return total / max(1, len(queries.layers) * len(asking.tokens) * spec.num_heads)


def _scores(
    pool: PagePool, queries: StoredQueries, spec: ModelSpec, asking: Asking, keys: Keys
) -> Iterator[tuple[slice, Tensor]]:
    """Scaled scores less log-sum-exp, layer by layer and some rows at a time.

    Yields:
        The rows, and (rows, kv_heads, group, keys) float32, −inf where a query does not see a key; may be changed.
    """
    rows, heads, device = len(asking.tokens), spec.num_heads, pool.kv.device
    askers, asked = (torch.from_numpy(tokens).to(device) for tokens in (asking.tokens, keys.tokens))
    turn: Rotary | None = None
    if np.any(asking.turns):
        turn = turn_by(torch.from_numpy(asking.turns), spec.rope, device)
    chunk = max(1, CHUNK_SCORES // (heads * len(keys.tokens)))
    for layer_idx in queries.layers:
        window = spec.windows[layer_idx]
        key = pool.layer(layer_idx)[:, : spec.num_kv_heads].index_select(0, keys.slots).float()
        key = key.permute(1, 2, 0)  # (kv_heads, head_dim, keys)
        query, lse = queries.read(layer_idx, asking.slots)
        if turn is not None:
            query = rotate_keys(query, turn, spec.rope)
        for start in range(0, rows, chunk):
            part = slice(start, start + chunk)
            grouped = query[part].view(-1, spec.num_kv_heads, heads // spec.num_kv_heads, spec.head_dim)
            count = len(grouped)
            folded = grouped.transpose(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim)
            scores = (folded @ key).view(spec.num_kv_heads, count, -1, len(keys.tokens)).transpose(0, 1)
            scores = scores.mul_(spec.attention_scale) - lse[part].view(count, spec.num_kv_heads, -1, 1)
            # Some rows at a time too: a mask of all would take gigabytes for a long prompt.
            if window is not None or asking.tokens[part].min() <= keys.tokens[-1]:
                scores.masked_fill_(_hidden(askers[part], asked, window).view(count, 1, 1, -1), -torch.inf)
            yield part, scores


def _hidden(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """(rows, keys) True where a query does not see a key; both are token indices (n,) int64."""
    hidden = keys >= queries.unsqueeze(1)
    if window is not None:
        hidden |= keys <= queries.unsqueeze(1) - window
    return hidden
