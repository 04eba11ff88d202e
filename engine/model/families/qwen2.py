"""Qwen2 and Qwen2.5: biases on queries, keys and values; upper layers may have a sliding window."""

from __future__ import annotations

from typing import Any

from .base import Family, windows_by_layer_type


class Qwen2(Family):
    """Biases on q, k and v only."""

    model_type = "qwen2"

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """`sliding_window` where `layer_types` says so; transformers sets it to None unless `use_sliding_window`."""
        return windows_by_layer_type(config)
