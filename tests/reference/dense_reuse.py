"""Reuse of isolated segments by its description: whole attention matrices in float64, no pages, no rotation of keys.

A segment's K and V in isolation are those of one pass over the whole prompt in which no token sees another segment;
positions are the prompt's own, which is what a rotation into place must come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine.model.decoder import Decoder


class DenseRun:
    """One pass over a whole prompt, every row in every layer, over K and V that may be others than the rows' own.

    Attributes:
        kv: By layer (tokens, 2 * kv_heads, head_dim) float32: what was attended to.
        logits: (tokens, vocab) float32.
    """

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        token_ids: np.ndarray,
        held: Callable[[int, Tensor], Tensor] = lambda _, kv: kv,
        segments: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Runs it.

        Args:
            decoder: Projects and finishes rows.
            token_ids: (tokens,) int64, at positions from 0 on.
            held: From a layer's index and its rows' K and V to those that are attended to.
            segments: Token ranges that do not see each other; None is one segment.
        """
        spec, count = decoder.spec, len(token_ids)
        hidden = decoder.embed(torch.from_numpy(token_ids))
        rotary = decoder.rotary(torch.arange(count))
        self.kv: list[Tensor] = []
        for layer_idx in range(spec.num_layers):
            query, own = decoder.project(layer_idx, hidden, rotary)
            kv = held(layer_idx, own)
            self.kv.append(kv)
            sees = causal(count, spec.windows[layer_idx])
            if segments is not None:
                sees &= _same_segment(count, segments)
            hidden = decoder.finish(layer_idx, hidden, attend(query, kv, sees, spec.attention_scale))
        self.logits = decoder.logits(hidden)


def in_isolation(decoder: Decoder, token_ids: np.ndarray, segments: Sequence[tuple[int, int]]) -> list[Tensor]:
    """K and V of all tokens when every segment is computed alone, by layer."""
    return DenseRun(decoder, token_ids, segments=segments).kv


def over_cached(decoder: Decoder, token_ids: np.ndarray, cached: list[Tensor], reused: np.ndarray) -> DenseRun:
    """A pass in which some tokens' K and V are cached ones in every layer: (tokens,) bool, all others are computed."""
    keep = torch.from_numpy(reused)[:, None, None]
    return DenseRun(decoder, token_ids, lambda layer_idx, own: torch.where(keep, cached[layer_idx], own))


def ends(segments: Sequence[tuple[int, int]], head_tokens: int, tail_tokens: int) -> np.ndarray:
    """The first and last tokens of some ranges, increasing."""
    chosen: set[int] = set()
    for start, stop in segments:
        chosen |= {*range(start, min(stop, start + head_tokens)), *range(max(start, stop - tail_tokens), stop)}
    return np.array(sorted(chosen), dtype=np.int64)


def causal(count: int, window: int | None) -> Tensor:
    """(tokens, tokens) True where a row sees a key."""
    behind = torch.arange(count)[:, None] - torch.arange(count)
    return (behind >= 0) & (behind < (window or count))


def attend(query: Tensor, kv: Tensor, sees: Tensor, scale: float) -> Tensor:
    """(rows, heads, head_dim), the query's dtype: by the definition, in float64."""
    kv_heads = kv.shape[1] // 2
    group = query.shape[1] // kv_heads
    key, value = (part.double().repeat_interleave(group, 1) for part in (kv[:, :kv_heads], kv[:, kv_heads:]))
    scores = torch.einsum("rhd,khd->hrk", query.double(), key) * scale
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value).to(query.dtype)


def _same_segment(count: int, segments: Sequence[tuple[int, int]]) -> Tensor:
    number = torch.zeros(count, dtype=torch.long)
    borders = sorted({0, count, *(edge for segment in segments for edge in segment)})
    for idx, (start, stop) in enumerate(pairwise(borders)):
        number[start:stop] = idx
    return number[:, None] == number
