"""What stored queries say about cached keys: how stale slid tokens are, and how much they are in demand.

*Staleness* is two-sided. A token paid attention to donor tokens that the prompt no longer has (*gone mass*), and would
pay attention e / (1 + e), e = Σ exp(q·k − lse), to tokens that were not there (*new mass*). Each brings values along:
where what is new says the same as what is gone, the token hardly changes. So a token's staleness is the distance
between what its attention gathers from new values and what it gathered from gone ones, over these values' mean norm.
What it was left with by earlier turns (its debt) is added by the caller: changes add up to no more than their sum.

*Demand* is the attention that new text pays to a token. All are averaged over the heads of the probe layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.spec import ModelSpec
from ..position.rope import Rotary, rotate_keys, turn_by
from ..slide.block_table import BlockTable
from ..slide.pages import PagePool
from ..slide.queries import StoredQueries

CHUNK_SCORES = 1 << 21
"""Most scores worked on at a time, over all heads."""

_MAX_SCORE = 60.0
"""Larger ones are cut, so that sums of their exponentials stay finite in float32."""


class Keys:
    """Cached keys, and the values beside them, to be asked about: their slots and token order in one sequence.

    Attributes:
        tokens: (keys,) int64, increasing: token indices.
        slots: (keys,) int64, on the pool's device.
    """

    def __init__(self, tokens: np.ndarray, table: BlockTable, device: torch.device) -> None:
        self.tokens = tokens
        self.slots = torch.from_numpy(table.slots(tokens)).to(device)


@dataclass(frozen=True)
class Asking:
    """From where stored queries look at some keys.

    Attributes:
        keys: What is asked about.
        tokens: (rows,) int64: token index of each query in the keys' sequence; it sees only keys before it.
        turns: (rows,) int64: positions by which each query is turned before it meets the keys.
    """

    keys: Keys
    tokens: np.ndarray
    turns: np.ndarray


def attention_change(
    pool: PagePool, queries: StoredQueries, spec: ModelSpec, slots: Tensor, gone: Asking, new: Asking
) -> Tensor:
    """How much the attention of each of some stored queries changes when some keys go and others come.

    Args:
        pool: Holds keys and values.
        queries: Holds the queries.
        spec: The model's geometry.
        slots: (rows,) int64, on the pool's device: where the queries lie. Their log-sum-exps have seen no new key, and
            the gone ones unless these came after the query was computed.
        gone: How the queries look at the keys that go.
        new: How they look at the keys that come.

    Returns:
        (rows,) float32: ‖new values' sum − gone values' sum‖ by the mean norm of all these values, mean over layers
        and heads; 0 where neither is seen or both give the same. May pass 1: opposite or unusually long values.
    """
    total = torch.zeros(len(slots), dtype=torch.float32, device=pool.kv.device)
    sides = [
        (_Side(pool, spec, asking), goes) for asking, goes in ((gone, True), (new, False)) if len(asking.keys.tokens)
    ]
    if not sides or not len(slots):
        return total
    num_keys = len(gone.keys.tokens) + len(new.keys.tokens)
    for layer_idx in queries.layers:
        query, lse = queries.read(layer_idx, slots)
        for side, _ in sides:
            side.read(layer_idx, query, lse)
        values = [side.values() for side, _ in sides]
        norms = torch.cat([value.norm(dim=-1) for value in values], 1).mean(1)
        summed = [F.pad(value, (0, 1), value=1.0) for value in values]  # the last column adds up what is paid
        for part in _chunks(len(slots), spec.num_heads * max(spec.head_dim, num_keys)):
            change = torch.zeros((), device=total.device)
            for (side, goes), value in zip(sides, summed, strict=True):
                gathered, paid = (side.weights(part) @ value).split((spec.head_dim, 1), dim=-1)
                change = change - gathered / paid.clamp_min(1.0) if goes else change + gathered / (1 + paid)
            sizes = change.norm(dim=-1) / norms.clamp_min(1e-30).unsqueeze(1)
            total[part] += sizes.view(spec.num_kv_heads, part.stop - part.start, -1).mean((0, 2))
    return total / max(1, len(queries.layers))


def demand(pool: PagePool, queries: StoredQueries, spec: ModelSpec, slots: Tensor, asking: Asking) -> Tensor:
    """How much attention each of some keys gets from some stored queries.

    Args:
        pool: Holds the keys.
        queries: Holds the queries.
        spec: The model's geometry.
        slots: (rows,) int64, on the pool's device: where the queries lie; their log-sum-exps have seen the keys.
        asking: How they look at the keys.

    Returns:
        (keys,) float32: mean over layers, heads and queries, from 0 to 1; at most 1 over all keys of a sequence.
    """
    total = torch.zeros(len(asking.keys.tokens), dtype=torch.float32, device=pool.kv.device)
    if not len(total) or not len(slots):
        return total
    side = _Side(pool, spec, asking)
    for layer_idx in queries.layers:
        side.read(layer_idx, *queries.read(layer_idx, slots))
        for part in _chunks(len(slots), spec.num_heads * len(total)):
            total += side.weights(part).sum((0, 1))
    return total / max(1, len(queries.layers)) / (len(slots) * spec.num_heads)


def _chunks(rows: int, scores_per_row: int) -> Iterator[slice]:
    step = max(1, CHUNK_SCORES // scores_per_row)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class _Side:
    """Stored queries over some keys, one probe layer after another: `read` comes before `weights` and `values`."""

    def __init__(self, pool: PagePool, spec: ModelSpec, asking: Asking) -> None:
        device = pool.kv.device
        self._asking = asking
        self._keys = asking.keys
        self._pool = pool
        self._spec = spec
        self._tokens = torch.from_numpy(asking.tokens).to(device)
        self._key_tokens = torch.from_numpy(self._keys.tokens).to(device)
        turned = bool(np.any(asking.turns))
        self._turn: Rotary | None = turn_by(torch.from_numpy(asking.turns), spec.rope, device) if turned else None

    def read(self, layer_idx: int, query: Tensor, lse: Tensor) -> None:
        """Takes a layer's keys, and its queries (rows, heads, head_dim) and their lse (rows, heads), both float32."""
        spec = self._spec
        self._layer = self._pool.layer(layer_idx)
        key = self._layer[:, : spec.num_kv_heads].index_select(0, self._keys.slots).float()
        if self._turn is not None:
            query = rotate_keys(query, self._turn, spec.rope)
        # One dimension more takes the log-sum-exps off the scores in the same product.
        self._key = F.pad(key.permute(1, 2, 0) * spec.attention_scale, (0, 0, 0, 1), value=1.0)
        query = torch.cat((query, -lse.unsqueeze(-1)), -1)
        self._query = query.view(len(query), spec.num_kv_heads, -1, spec.head_dim + 1).transpose(0, 1)
        self._window = spec.windows[layer_idx]

    def values(self) -> Tensor:
        """The layer's values, (kv_heads, keys, head_dim) float32."""
        return self._layer[:, self._spec.num_kv_heads :].index_select(0, self._keys.slots).float().transpose(0, 1)

    def weights(self, part: slice) -> Tensor:
        """exp(scaled scores − lse) of some rows, 0 where a key is hidden: (kv_heads, rows * group, keys) float32."""
        heads, keys = self._spec.num_kv_heads, len(self._keys.tokens)
        scores = self._query[:, part].flatten(1, 2) @ self._key
        # Some rows at a time too: a mask of all would take gigabytes for a long prompt.
        if self._window is not None or self._asking.tokens[part].min() <= self._keys.tokens[-1]:
            by_row = scores.view(heads, part.stop - part.start, -1, keys)
            by_row.masked_fill_(self._hidden(part).unsqueeze(1), -torch.inf)
        weights: Tensor = scores.clamp_max_(_MAX_SCORE).exp_()
        return weights

    def _hidden(self, part: slice) -> Tensor:
        """(rows, keys) True where a query does not see a key."""
        rows = self._tokens[part].unsqueeze(1)
        hidden: Tensor = self._key_tokens >= rows
        if self._window is not None:
            hidden |= self._key_tokens <= rows - self._window
        return hidden
