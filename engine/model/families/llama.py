"""Llama 1-3 and what shares its code (SmolLM2, TinyLlama, Yi): the layout that `Family` describes."""

from __future__ import annotations

from .base import Family


class Llama(Family):
    """Biases on attention (`attention_bias`) and MLP (`mlp_bias`) by configuration; no windows."""

    model_type = "llama"
