"""Stored queries: what each cached token asked for at a few probe layers, beside its pages.

A cached token's query and the log-sum-exp of its scores tell, without computing the token again, how much attention it
paid to any cached key, and how much it would pay to a new one (`reuse.staleness`). They lie in the same slots as the
token's K and V, so pages are shared, moved and dropped together with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.spec import ModelSpec
from .slots import Slots

PROBE_DEPTHS = (0.3, 0.52, 0.73, 0.62, 0.23)
"""Where probe layers lie, as shares of the usable layers, the most telling first. Attention tells most in the middle:
staleness measured there (SmolLM2: layer 9 first) goes best with how far a token really is from a full prefill. Text
that says again what an update says hangs on it by heads that copy, which lie in few layers: these depths meet those of
SmolLM2 (layers 7, 15, 18, 21), and lie apart, as other models may have them elsewhere."""

MAX_SHARE = 0.15
"""Most bytes that stored queries may take, as a share of the K and V beside them."""

_BYTES_BESIDE = 2 + 4  # scale and log-sum-exp of one head
_SCALES = (2.0**-24, 65504.0)  # what float16 holds, without zero


def probe_layers(spec: ModelSpec, kv_dtype: torch.dtype) -> tuple[int, ...]:
    """The layers whose queries are stored: those at `PROBE_DEPTHS`, as many as `MAX_SHARE` allows.

    Layer 0 is never one of them: its keys depend on the token alone. Nor is the last, which not every row enters.
    Layers that see everything are preferred to those with a sliding window.
    """
    inner = range(1, spec.num_layers - 1)
    usable = [layer for layer in inner if spec.windows[layer] is None] or list(inner)
    affordable = int(MAX_SHARE * spec.kv_bytes_per_token(kv_dtype) / _probe_bytes(spec))
    depths = PROBE_DEPTHS[:affordable] if usable else ()
    return tuple(sorted({usable[int(depth * len(usable))] for depth in depths}))


def query_bytes_per_token(spec: ModelSpec, kv_dtype: torch.dtype) -> int:
    """Bytes of the stored queries of one token, over all probe layers."""
    return len(probe_layers(spec, kv_dtype)) * _probe_bytes(spec)


def _probe_bytes(spec: ModelSpec) -> int:
    return spec.num_heads * (spec.head_dim + _BYTES_BESIDE)


class StoredQueries:
    """Queries and log-sum-exps of the probe layers, one for each slot of the pool.

    Attributes:
        layers: The probe layers, increasing; empty if the model leaves no room for any.
    """

    def __init__(self, spec: ModelSpec, num_slots: int, kv_dtype: torch.dtype, device: torch.device) -> None:
        self.layers = probe_layers(spec, kv_dtype)
        probes, heads = len(self.layers), spec.num_heads
        self._probe_of = {layer_idx: probe for probe, layer_idx in enumerate(self.layers)}
        # As with the pool, a CPU's system hands out the memory when a slot is first written.
        self._values = torch.empty((probes, num_slots, heads, spec.head_dim), dtype=torch.int8, device=device)
        self._scales = torch.empty((probes, num_slots, heads), dtype=torch.float16, device=device)
        self._lse = torch.empty((probes, num_slots, heads), dtype=torch.float32, device=device)

    def wants(self, layer_idx: int) -> bool:
        """Whether a layer's queries are stored."""
        return layer_idx in self._probe_of

    def write(self, layer_idx: int, slots: Slots, query: Tensor, lse: Tensor) -> None:
        """Stores the queries of some rows.

        Args:
            layer_idx: A probe layer.
            slots: Where the rows' K and V lie.
            query: (rows, heads, head_dim), rotated at the rows' positions.
            lse: (rows, heads) float32: log of the sum of the exponentials of each row's scaled scores.
        """
        probe = self._probe_of[layer_idx]
        scale = query.abs().amax(-1).float().div_(127).clamp_(*_SCALES).to(torch.float16)
        slots.write(self._values[probe], (query.float() / scale.float().unsqueeze(-1)).round_().to(torch.int8))
        slots.write(self._scales[probe], scale)
        slots.write(self._lse[probe], lse)

    def read(self, layer_idx: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The queries (rows, heads, head_dim) float32, rotated where they were written, and lse (rows, heads)."""
        probe = self._probe_of[layer_idx]
        values = self._values[probe].index_select(0, slots).float()
        return values * self._scales[probe].index_select(0, slots).float().unsqueeze(-1), self._lse[probe][slots]

    def move(self, layer_idx: int, source: Slots, target: Slots) -> None:
        """Copies what some slots hold of a probe layer to others that do not overlap them."""
        probe = self._probe_of[layer_idx]
        for stored in (self._values, self._scales, self._lse):
            target.write(stored[probe], source.read(stored[probe]))
