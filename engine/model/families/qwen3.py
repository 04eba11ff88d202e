"""Qwen3 (dense): RMS norms on query and key heads before rotation, an explicit head width."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .base import Family, windows_by_layer_type


class Qwen3(Family):
    """Biases by configuration (`attention_bias`); `head_dim` need not be hidden_size / heads."""

    model_type = "qwen3"

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """`sliding_window` where `layer_types` says so; transformers sets it to None unless `use_sliding_window`."""
        return windows_by_layer_type(config)

    def head_norms(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """`q_norm` and `k_norm`, each over one head."""
        return layer.self_attn.q_norm.weight.detach(), layer.self_attn.k_norm.weight.detach()
