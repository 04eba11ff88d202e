"""What the rest of the engine knows of a model: plain numbers, no transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeSpec:
    """A rotary embedding whose frequencies do not depend on the prompt.

    Attributes:
        inv_freq: (rotary_dim / 2,) float32, CPU: the model's own inverse frequencies, scaling included.
        rotary_dim: Leading dimensions of a head that are rotated; the rest is left as it is.
        attention_scaling: Factor on cos and sin (yarn, longrope); already in cached keys, never applied twice.
    """

    inv_freq: torch.Tensor
    rotary_dim: int
    attention_scaling: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """Geometry of a decoder-only model.

    Attributes:
        model_type: The family's name as transformers writes it, such as `llama`.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides `num_heads`.
        head_dim: Width of a head.
        vocab_size: Rows of the output projection.
        context_tokens: Longest sequence that is served exactly.
        windows: Per layer the sliding window in tokens (a token sees itself and the window − 1 before it), or None.
        rope: Rotary embedding, the same in all layers.
        attention_scale: Factor on query-key products.
        stop_token_ids: Token ids that end an answer.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    windows: tuple[int | None, ...]
    rope: RopeSpec
    attention_scale: float
    stop_token_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
