"""Mistral: Llama with one sliding window for all layers."""

from __future__ import annotations

from typing import Any

from .base import Family, uniform_windows


class Mistral(Family):
    """No biases; `sliding_window` may be None (from v0.2 on)."""

    model_type = "mistral"

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """`sliding_window` in every layer."""
        return uniform_windows(config)
