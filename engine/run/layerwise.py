"""Correction by deviation: slid tokens go through the layers until it shows which of them deviate; the others stop.

Carries out `ByDeviation`: every slid token is computed up to the selection layer, from which on the fresh tokens and
those that were chosen are. Computed K and V replace the cached ones or are fused with them. With a gate, chosen tokens
leave in some layers and others enter. Rows of all layers go in chunks, so that long prompts need no more memory than
elsewhere. Which rule holds is the policies' business; this module decides by it and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.interface import Layout
from ..position.rope import Rotary
from ..reuse.rules import ByDeviation, TokenGate
from ..reuse.select import share_of
from ..reuse.spans import Plan
from ..slide.assembly import Assembly
from ..slide.slots import Slots
from .forward import Forward


@dataclass
class _Rows:
    """Some tokens on their way through the layers.

    Attributes:
        tokens: (rows,) int64, increasing: token indices.
        hidden: (rows, hidden): what enters the next layer.
        rotary: The rows' rotation.
        slots: Where their K and V lie.
        slid: (n,) int64: which rows are slid tokens.
        parts: The rows in chunks, each with its layout.
    """

    tokens: np.ndarray
    hidden: Tensor
    rotary: Rotary
    slots: Slots
    slid: np.ndarray
    parts: list[tuple[slice, Layout]]


class Layerwise:
    """One prompt's way through the layers under a rule that chooses by deviation.

    Attributes:
        corrected: (n,) int64, increasing: slid tokens that were computed behind the selection, in some layers at least.
    """

    def __init__(
        self,
        forward: Forward,
        rule: ByDeviation,
        token_ids: np.ndarray,
        plan: Plan,
        assembly: Assembly,
        *,
        chunk_tokens: int,
        check: Callable[[], None],
    ) -> None:
        """Takes what it needs to know.

        Args:
            forward: The model, the pool and the attention.
            rule: How tokens are chosen.
            token_ids: (tokens,) int64: the prompt.
            plan: Its spans; its rule is `rule`.
            assembly: The plan's pages, not slid yet; no page of a slid token is shared.
            chunk_tokens: Rows that are worked on at once.
            check: Called between layers; raises to stop.
        """
        self._forward = forward
        self._rule = rule
        self._token_ids = token_ids
        self._plan = plan
        self._assembly = assembly
        self._chunk_tokens = chunk_tokens
        self._check = check
        self._is_slid = np.zeros(plan.num_tokens, dtype=np.bool_)
        self._is_slid[plan.slid_tokens()] = True
        self._selection_layer = min(rule.layer_idx, forward.num_layers - 1)
        self._rotary = forward.decoder.rotary(forward.to_device(plan.positions))
        self._waiting = _Waiting(np.empty(0, dtype=np.int64), torch.empty(0))
        self.corrected = np.empty(0, dtype=np.int64)

    def run(self, wanted: int) -> Tensor:
        """Computes the prompt.

        Args:
            wanted: Fresh tokens at the prompt's end whose logits are returned, at least one.

        Returns:
            (wanted, vocab) float32 on the model's device.
        """
        tokens = np.union1d(self._plan.fresh_tokens(), self._plan.slid_tokens())
        assert not self._is_slid[-wanted:].any() and tokens[-wanted] == len(self._token_ids) - wanted
        rows = self._rows(tokens, self._forward.decoder.embed(self._forward.to_device(self._token_ids[tokens])))
        for layer_idx in range(self._forward.num_layers):
            self._check()
            self._assembly.slide(layer_idx)
            query, kv = self._project(layer_idx, rows)
            if layer_idx == self._selection_layer:
                rows, query, kv = self._select(layer_idx, rows, query, kv)
            leaving = self._leaving(layer_idx, rows, kv)
            self._write(layer_idx, rows, kv)
            if len(leaving):
                rows, query = self._exchange(layer_idx, rows, query, leaving)
            if layer_idx == self._forward.num_layers - 1:
                last = np.arange(len(rows.tokens) - wanted, len(rows.tokens))
                rows, query = self._some(rows, last), query[-wanted:]
            rows.hidden = self._attend(layer_idx, rows, query)
        if self._rule.is_complete:
            self._assembly.correct(self.corrected)
        return self._forward.decoder.logits(rows.hidden)

    def _select(self, layer_idx: int, rows: _Rows, query: Tensor, kv: Tensor) -> tuple[_Rows, Tensor, Tensor]:
        """Keeps the fresh rows and those slid ones that deviate most; the others wait, the most deviating first."""
        deviation, _ = _deviation(kv[self._index(rows.slid)], self._cached(layer_idx, rows))
        order = np.argsort(-deviation.cpu().numpy(), kind="stable")
        count = share_of(self._rule.share, len(order))
        chosen, others = rows.slid[order[:count]], rows.slid[order[count:]]
        self.corrected = np.sort(rows.tokens[chosen])
        if self._rule.gate is not None:
            self._waiting = _Waiting(rows.tokens[others], rows.hidden[self._index(others)])
        kept = np.setdiff1d(np.arange(len(rows.tokens)), others)
        return self._some(rows, kept), query[self._index(kept)], kv[self._index(kept)]

    def _leaving(self, layer_idx: int, rows: _Rows, kv: Tensor) -> np.ndarray:
        """(n,) int64: slid rows that the gate lets go in this layer, whose cached keys are still in place."""
        gate = self._rule.gate
        if gate is None or layer_idx <= self._selection_layer or layer_idx % gate.every_layers or not len(rows.slid):
            return np.empty(0, dtype=np.int64)
        passes: np.ndarray = _passes(gate, kv[self._index(rows.slid)], self._cached(layer_idx, rows)).cpu().numpy()
        leaving: np.ndarray = rows.slid[passes]
        return leaving

    def _exchange(self, layer_idx: int, rows: _Rows, query: Tensor, leaving: np.ndarray) -> tuple[_Rows, Tensor]:
        """Lets rows go and as many waiting tokens in, which first go through the layers that they missed."""
        kept = np.setdiff1d(np.arange(len(rows.tokens)), leaving)
        tokens, hidden, query = rows.tokens[kept], rows.hidden[self._index(kept)], query[self._index(kept)]
        entering = self._waiting.take(len(leaving))
        if entering is not None:
            order = np.argsort(entering.tokens)
            late = self._rows(entering.tokens[order], entering.hidden[self._index(order)])
            self.corrected = np.union1d(self.corrected, late.tokens)
            for missed in range(self._selection_layer, layer_idx):
                self._check()
                late_query, late_kv = self._project(missed, late)
                self._write(missed, late, late_kv)
                late.hidden = self._attend(missed, late, late_query)
            late_query, late_kv = self._project(layer_idx, late)
            self._write(layer_idx, late, late_kv)
            tokens = np.concatenate([tokens, late.tokens])
            order = np.argsort(tokens)
            index = self._index(order)
            tokens = tokens[order]
            hidden, query = torch.cat((hidden, late.hidden))[index], torch.cat((query, late_query))[index]
        return self._rows(tokens, hidden), query

    def _project(self, layer_idx: int, rows: _Rows) -> tuple[Tensor, Tensor]:
        """All rows' queries (rows, heads, head_dim) and their keys and values (rows, 2 * kv_heads, head_dim)."""
        decoder = self._forward.decoder
        self._forward.token_layers += len(rows.tokens)
        made = [decoder.project(layer_idx, rows.hidden[part], rows.rotary.rows(part)) for part, _ in rows.parts]
        return _joined(query for query, _ in made), _joined(kv for _, kv in made)

    def _write(self, layer_idx: int, rows: _Rows, kv: Tensor) -> None:
        """Puts computed K and V in place; those of slid rows as the rule has them fused with what is cached there."""
        if self._rule.fusion != "replace" and len(rows.slid):
            index, cached = self._index(rows.slid), self._cached(layer_idx, rows)
            deviation, norm = _deviation(kv[index], cached)
            alpha = deviation / norm.clamp_min(torch.finfo(torch.float32).tiny)
            if self._rule.fusion == "clamped":
                alpha = alpha.clamp_max(1.0)
            fused = cached.float().lerp(kv[index].float(), alpha.view(-1, 1, 1))
            kv = kv.clone()
            kv[index] = fused.to(kv.dtype)
        rows.slots.write(self._forward.pool.layer(layer_idx), kv)

    def _attend(self, layer_idx: int, rows: _Rows, query: Tensor) -> Tensor:
        """The layer's output of all rows, (rows, hidden); K and V of the layer are in place."""
        forward = self._forward
        layer = forward.pool.layer(layer_idx)
        lse = forward.lse(layer_idx, query)
        outputs = []
        for part, layout in rows.parts:
            attended = forward.attention.attend(
                query[part],
                layer,
                layout,
                scale=forward.decoder.spec.attention_scale,
                window=forward.decoder.spec.windows[layer_idx],
                lse=None if lse is None else lse[part],
            )
            if self._rule.sees is not None and layer_idx >= self._selection_layer:
                self._attend_to_some(layer_idx, rows, query, part, attended)
            outputs.append(forward.decoder.finish(layer_idx, rows.hidden[part], attended))
        if lse is not None:
            # A slid token's query is that of its keys: the donor's, unless the token is computed in every layer.
            is_own = self._rule.is_complete and layer_idx >= self._selection_layer
            own = np.flatnonzero(~self._is_slid[rows.tokens] | is_own)
            if len(own):
                index = self._index(own)
                forward.queries.write(layer_idx, self._slots(rows.tokens[own]), query[index], lse[index])
        return _joined(outputs)

    def _attend_to_some(self, layer_idx: int, rows: _Rows, query: Tensor, part: slice, attended: Tensor) -> None:
        """Attends anew from a part's slid rows, to the ranges that the rule names and to themselves alone."""
        places = rows.slid[(rows.slid >= part.start) & (rows.slid < part.stop)]
        if not len(places):
            return
        spec, layer = self._forward.decoder.spec, self._forward.pool.layer(layer_idx)
        tokens, window = rows.tokens[places], spec.windows[layer_idx]
        seen = np.concatenate([np.arange(start, stop) for start, stop in self._rule.sees or ((0, 0),)]).astype(np.int64)
        behind = tokens[:, None] - seen
        hidden = (behind <= 0) | (behind >= (window or len(self._token_ids)))
        group = spec.num_heads // spec.num_kv_heads
        numbers = self._forward.to_device(self._assembly.table.slots(np.concatenate([seen, tokens])))
        keys, values = layer[numbers].float().repeat_interleave(group, 1).chunk(2, 1)
        asked = query[self._index(places)].float() * spec.attention_scale
        scores = torch.einsum("rhd,khd->rhk", asked, keys[: len(seen)])
        scores = scores.masked_fill(self._forward.to_device(hidden).unsqueeze(1), -torch.inf)
        own = (asked * keys[len(seen) :]).sum(-1, keepdim=True)
        weights = torch.cat((scores, own), -1).softmax(-1)
        result = torch.einsum("rhk,khd->rhd", weights[..., :-1], values[: len(seen)])
        result += weights[..., -1:] * values[len(seen) :]
        attended[self._index(places - part.start)] = result.to(attended.dtype)

    def _cached(self, layer_idx: int, rows: _Rows) -> Tensor:
        """K and V that lie in the slid rows' slots, (n, 2 * kv_heads, head_dim): until they are written, the cached."""
        return self._forward.pool.layer(layer_idx)[
            self._forward.to_device(self._assembly.table.slots(rows.tokens[rows.slid]))
        ]

    def _rows(self, tokens: np.ndarray, hidden: Tensor) -> _Rows:
        edges = [*range(0, len(tokens), self._chunk_tokens), len(tokens)]
        attention, table = self._forward.attention, self._assembly.table
        return _Rows(
            tokens=tokens,
            hidden=hidden,
            rotary=self._rotary.rows(self._index(tokens)),
            slots=self._slots(tokens),
            slid=np.flatnonzero(self._is_slid[tokens]),
            parts=[
                (slice(start, stop), attention.layout(table, tokens[start:stop])) for start, stop in pairwise(edges)
            ],
        )

    def _some(self, rows: _Rows, kept: np.ndarray) -> _Rows:
        return self._rows(rows.tokens[kept], rows.hidden[self._index(kept)])

    def _slots(self, tokens: np.ndarray) -> Slots:
        return Slots(self._assembly.table.slots(tokens), self._forward.decoder.device)

    def _index(self, places: np.ndarray) -> Tensor:
        return self._forward.to_device(places)


@dataclass
class _Waiting:
    """Slid tokens that were not chosen, the most deviating first, and what enters the selection layer of each."""

    tokens: np.ndarray
    hidden: Tensor

    def take(self, count: int) -> _Waiting | None:
        """Takes the next `count`, or as many as there are; None if nobody waits."""
        taken = _Waiting(self.tokens[:count], self.hidden[:count])
        self.tokens, self.hidden = self.tokens[count:], self.hidden[count:]
        return taken if len(taken.tokens) else None


def _deviation(computed: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
    """‖ΔK‖² and ‖K_cached‖² of some tokens' keys over all heads, (n,) float32 each; values are left out."""
    kv_heads = cached.shape[1] // 2
    keys = cached[:, :kv_heads].float()
    return (computed[:, :kv_heads].float() - keys).square().sum((1, 2)), keys.square().sum((1, 2))


def _passes(gate: TokenGate, computed: Tensor, cached: Tensor) -> Tensor:
    """(n,) bool: whether the gate lets tokens go, by the CKSim of their keys."""
    kv_heads = cached.shape[1] // 2
    cosines = F.cosine_similarity(computed[:, :kv_heads].float(), cached[:, :kv_heads].float(), dim=-1)
    similarity = cosines.mean(-1)
    return 1.0 - similarity < gate.tau if gate.reading == "converged" else similarity < gate.tau


def _joined(parts: Iterable[Tensor]) -> Tensor:
    made = list(parts)
    return made[0] if len(made) == 1 else torch.cat(made)
