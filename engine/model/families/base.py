"""What a model family is: where its weights lie and what sets it apart. One short file per family derives from it.

`Family` describes the Llama layout, which most families share; a family's file overrides only its differences.
The modules are transformers' own; nothing outside `engine/model/` sees them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..fuse import Projection, fuse, projection


@dataclass(frozen=True)
class LayerWeights:
    """The tensors of one decoder layer, model dtype, sharing the wrapped modules' memory.

    Attributes:
        input_norm: (hidden,) RMS norm before attention.
        qkv: Queries, keys and values in one projection, heads in this order.
        q_norm: (head_dim,) RMS norm of each query head, or None.
        k_norm: (head_dim,) RMS norm of each key head, or None.
        out: Heads back to the residual stream.
        mlp_norm: (hidden,) RMS norm before the MLP.
        gate_up: Gate and up in one projection, gate first.
        down: The MLP's way back to the residual stream.
    """

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Projection
    mlp_norm: Tensor
    gate_up: Projection
    down: Projection


class Family:
    """The Llama layout: separate projections, no q/k norms, no sliding window, the whole head rotated.

    Attributes:
        model_type: The family's name as transformers writes it.
        partial_rotary: Whether transformers' own code rotates only a leading part of a head if the configuration
            says so.
    """

    model_type: str
    partial_rotary = False

    def windows(self, config: Any) -> tuple[int | None, ...]:
        """Per layer the sliding window in tokens, or None."""
        return (None,) * int(config.num_hidden_layers)

    def linears(self, layer: Any) -> dict[str, nn.Module]:
        """The layer's linear modules by dotted name, to be checked before they are used."""
        attention, mlp = layer.self_attn, layer.mlp
        return {
            "self_attn.q_proj": attention.q_proj,
            "self_attn.k_proj": attention.k_proj,
            "self_attn.v_proj": attention.v_proj,
            "self_attn.o_proj": attention.o_proj,
            "mlp.gate_proj": mlp.gate_proj,
            "mlp.up_proj": mlp.up_proj,
            "mlp.down_proj": mlp.down_proj,
        }

    def qkv(self, layer: Any) -> Projection:
        """The fused query, key and value projection."""
        return fuse(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)

    def gate_up(self, layer: Any) -> Projection:
        """The fused gate and up projection."""
        return fuse(layer.mlp.gate_proj, layer.mlp.up_proj)

    def head_norms(self, layer: Any) -> tuple[Tensor | None, Tensor | None]:
        """The norms of query and key heads."""
        return None, None

    def weights(self, layer: Any) -> LayerWeights:
        """One layer's tensors; its modules' weights become views into the fused ones."""
        q_norm, k_norm = self.head_norms(layer)
        return LayerWeights(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=self.qkv(layer),
            q_norm=q_norm,
            k_norm=k_norm,
            out=projection(layer.self_attn.o_proj),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=self.gate_up(layer),
            down=projection(layer.mlp.down_proj),
        )


def uniform_windows(config: Any) -> tuple[int | None, ...]:
    """One window for all layers (`sliding_window`), as Mistral and Phi-3 have it."""
    return (config.sliding_window,) * int(config.num_hidden_layers)


def windows_by_layer_type(config: Any) -> tuple[int | None, ...]:
    """The window where `layer_types` says `sliding_attention`, as Qwen has it."""
    sliding = "sliding_attention"
    return tuple(config.sliding_window if kind == sliding else None for kind in config.layer_types)
