"""Correction by deviation by its description, row by row sets in Python: whole matrices in float64, no pages.

Written from the algorithm: compute layers up to the selection layer, rank, go on with the largest deviations, fuse, let
converged ones go and others in. It knows neither rules nor chunks nor slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.position.rope import Rotary
from tests.reference.complex_rope import rotate_directly
from tests.reference.dense_reuse import attend, causal


@dataclass
class DenseCorrection:
    """One prompt over cached K and V, corrected by deviation.

    Attributes:
        decoder: Projects and finishes rows.
        token_ids: (tokens,) int64, at positions from 0 on.
        cached: By layer (tokens, 2 * kv_heads, head_dim): K and V at the prompt's positions, of exact and slid tokens.
        exact: The tokens that are never computed.
        slid: The tokens that may be corrected.
        share: Of the slid tokens that is chosen.
        selection: The layer that chooses.
        alpha: None replaces; otherwise the largest α, infinity for none.
        tau: Of the gate, None for no gate.
        converged: Which reading of the gate.
        every: Layers between two gates.
        updates: What chosen tokens see besides themselves; None is everything.
    """

    decoder: Decoder
    token_ids: np.ndarray
    cached: list[Tensor]
    exact: set[int]
    slid: set[int]
    share: float
    selection: int = 1
    alpha: float | None = None
    tau: float | None = None
    converged: bool = True
    every: int = 4
    updates: set[int] | None = None
    corrected: set[int] = field(default_factory=set)
    work: int = 0

    @torch.inference_mode()
    def run(self) -> tuple[list[Tensor], Tensor]:
        """K and V by layer, and the logits of all rows (those of computed ones mean something)."""
        count, layers = len(self.token_ids), self.decoder.spec.num_layers
        self.kv = [layer.clone() for layer in self.cached]
        fresh = set(range(count)) - self.exact - self.slid
        going = fresh | self.slid
        hidden = self.decoder.embed(torch.from_numpy(self.token_ids))
        waiting: list[int] = []
        late_start = hidden
        for layer in range(layers):
            own = self._own(layer, hidden)
            self.work += len(going)
            if layer == self.selection:
                late_start = hidden.clone()
                ranked = sorted(self.slid, key=lambda token: (-self._deviation(layer, own, token), token))
                chosen = math.ceil(self.share * len(ranked) - 1e-9)
                waiting, going = ranked[chosen:], fresh | set(ranked[:chosen])
                self.corrected |= set(ranked[:chosen])
            out: set[int] = set()
            if self.tau is not None and layer > self.selection and layer % self.every == 0:
                out = {token for token in going & self.slid if self._leaves(layer, own, token)}
            self._store(layer, own, going)
            late, waiting = (waiting[: len(out)], waiting[len(out) :]) if out else ([], waiting)
            going = going - out
            if late:
                self.corrected |= set(late)
                entering = late_start.clone()
                for missed in range(self.selection, layer):
                    own = self._own(missed, entering)
                    self._store(missed, own, set(late))
                    entering = self._finish(missed, entering, set(late))
                    self.work += len(late)
                self._store(layer, self._own(layer, entering), set(late))
                self.work += len(late)
                for token in late:
                    hidden[token] = entering[token]
                going = going | set(late)
            hidden = self._finish(layer, hidden, going)
        return self.kv, self.decoder.logits(hidden)

    def _own(self, layer: int, hidden: Tensor) -> Tensor:
        return self.decoder.project(layer, hidden, self._rotary())[1]

    def _rotary(self) -> Rotary:
        return self.decoder.rotary(torch.arange(len(self.token_ids)))

    def _keys(self, kv: Tensor, token: int) -> Tensor:
        return kv[token, : kv.shape[1] // 2].double()

    def _deviation(self, layer: int, own: Tensor, token: int) -> float:
        return float((self._keys(own, token) - self._keys(self.cached[layer], token)).pow(2).sum())

    def _leaves(self, layer: int, own: Tensor, token: int) -> bool:
        new, old = self._keys(own, token), self._keys(self.cached[layer], token)
        similarity = float(((new * old).sum(-1) / (new.norm(dim=-1) * old.norm(dim=-1))).mean())
        assert self.tau is not None
        return 1 - similarity < self.tau if self.converged else similarity < self.tau

    def _store(self, layer: int, own: Tensor, tokens: set[int]) -> None:
        for token in tokens:
            if token not in self.slid or self.alpha is None:
                self.kv[layer][token] = own[token]
                continue
            size = float(self._keys(self.cached[layer], token).pow(2).sum())
            weight = min(self._deviation(layer, own, token) / size, self.alpha)
            self.kv[layer][token] = weight * own[token] + (1 - weight) * self.cached[layer][token]

    def _finish(self, layer: int, hidden: Tensor, tokens: set[int]) -> Tensor:
        """What `tokens` are behind the layer; other rows hold anything finite."""
        spec = self.decoder.spec
        sees = causal(len(self.token_ids), spec.windows[layer])
        if self.updates is not None and layer >= self.selection:
            allowed = torch.tensor([token in self.updates for token in range(len(self.token_ids))])
            for token in tokens & self.slid:
                sees[token] &= allowed
                sees[token, token] = True
        query = self.decoder.project(layer, hidden, self._rotary())[0]
        attended = attend(query, self.kv[layer].nan_to_num(0.0), sees, spec.attention_scale)
        return self.decoder.finish(layer, hidden, attended)


def moved(decoder: Decoder, kv: list[Tensor], source: np.ndarray, target: np.ndarray, count: int) -> list[Tensor]:
    """K and V of tokens `source` of one text as those of `target` in another of `count` tokens; NaN elsewhere."""
    kv_heads, rope = decoder.spec.num_kv_heads, decoder.spec.rope
    result = []
    for layer in kv:
        placed = torch.full((count, *layer.shape[1:]), torch.nan)
        keys = rotate_directly(layer[source, :kv_heads], torch.from_numpy(target - source), rope.inv_freq, 1.0)
        placed[target, :kv_heads], placed[target, kv_heads:] = keys.float(), layer[source, kv_heads:]
        result.append(placed)
    return result
