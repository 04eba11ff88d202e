"""Phi-3 and Phi-4-mini: projections fused in the checkpoint, partial rotary, longrope, one sliding window."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..fuse import Projection, projection
from .base import Family, uniform_windows


class Phi3(Family):
    """Already fused, so nothing is copied; no biases."""

    model_type = "phi3"
    partial_rotary = True

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """`sliding_window` in every layer."""
        return uniform_windows(config)

    def linears(self, layer: Any) -> dict[str, nn.Module]:
        """The layer's linear modules by dotted name."""
        return {
            "self_attn.qkv_proj": layer.self_attn.qkv_proj,
            "self_attn.o_proj": layer.self_attn.o_proj,
            "mlp.gate_up_proj": layer.mlp.gate_up_proj,
            "mlp.down_proj": layer.mlp.down_proj,
        }

    def qkv(self, layer: Any) -> Projection:
        """The checkpoint's own fused projection."""
        return projection(layer.self_attn.qkv_proj)

    def gate_up(self, layer: Any) -> Projection:
        """The checkpoint's own fused projection, gate first."""
        return projection(layer.mlp.gate_up_proj)
