"""The decoder, layer by layer over chosen rows: what the engine runs instead of a model's own forward.

A caller embeds rows, then for every layer projects them, writes their keys and values to the pool, attends, and
finishes the layer; it may drop rows between the steps, and rows need not be neighbours in the prompt. The decoder
holds no cache and knows no pages. Its tensors are the wrapped model's own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional as F

from ..position.rope import Rotary, apply_rotary, rope_spec, rotary_at, served_context
from .families import LayerWeights
from .fuse import Projection, projection
from .spec import ModelSpec
from .support import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Decoder:
    """A decoder-only model as steps over rows of tokens.

    Attributes:
        spec: The model's geometry.
        device: Where the weights lie.
        dtype: The weights' and activations' dtype.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        embedding: Tensor,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: Projection,
        norm_eps: float,
        activation: Callable[[Tensor], Tensor] = F.silu,
    ) -> None:
        """Takes the tensors as they are, copying nothing.

        Args:
            spec: The model's geometry.
            embedding: (vocab, hidden).
            layers: The decoder layers, in order.
            norm: (hidden,) final RMS norm.
            head: Output projection; may share the embedding's memory.
            norm_eps: Of every RMS norm.
            activation: The gate's activation.
        """
        self.spec = spec
        self.device = embedding.device
        self.dtype = embedding.dtype
        self._embedding = embedding
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._eps = norm_eps
        self._activation = activation
        self._inv_freq = spec.rope.inv_freq.to(self.device)
        self._hidden = (spec.hidden_size,)
        self._rotated_heads = spec.num_heads + spec.num_kv_heads
        self._all_heads = spec.num_heads + 2 * spec.num_kv_heads

    @classmethod
    def from_transformers(cls, model: PreTrainedModel, *, context_tokens: int | None = None) -> Decoder:
        """Wraps a loaded transformers model; its projection weights become views into fused ones and it still runs.

        Args:
            model: A causal language model of a supported family, in one dtype on one device.
            context_tokens: Longest sequence to be served; None is the model's own (for longrope its original
                context, see `served_context`).

        Raises:
            UnsupportedModelError: The model cannot be served exactly.
            ConfigError: `context_tokens` is more than the model's positions reach.
        """
        family = check_model(model)
        config: Any = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        wrapped: Any = model
        spec = ModelSpec(
            model_type=family.model_type,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            vocab_size=wrapped.get_output_embeddings().weight.shape[0],
            context_tokens=served_context(config, context_tokens),
            windows=family.windows(config),
            rope=rope_spec(config, context_tokens),
            attention_scale=head_dim**-0.5,
            stop_token_ids=_stop_token_ids(model),
        )
        return cls(
            spec,
            embedding=wrapped.get_input_embeddings().weight.detach(),
            layers=[family.weights(layer) for layer in wrapped.model.layers[: spec.num_layers]],
            norm=wrapped.model.norm.weight.detach(),
            head=projection(wrapped.get_output_embeddings()),
            norm_eps=config.rms_norm_eps,
            activation=_activation(config.hidden_act),
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids (rows,) int64 → residual stream (rows, hidden), model dtype."""
        return self._embedding.index_select(0, token_ids)

    def rotary(self, positions: Tensor) -> Rotary:
        """The rotation of rows at `positions` (rows,) int64, for all layers; computed in float32, model dtype."""
        return rotary_at(positions, self._inv_freq, self.spec.rope.attention_scaling, self.dtype)

    def project(self, layer_idx: int, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """The first half of a layer: norm, projections, head norms, rotation.

        Args:
            layer_idx: From 0.
            hidden: (rows, hidden); not changed.
            rotary: The rows' rotation.

        Returns:
            Queries (rows, heads, head_dim), rotated, and (rows, 2 * kv_heads, head_dim): keys, rotated, then values,
            as they lie in the pool. Both are views of one tensor.
        """
        layer = self._layers[layer_idx]
        spec = self.spec
        fused = layer.qkv(F.rms_norm(hidden, self._hidden, layer.input_norm, self._eps))
        heads = fused.contiguous().view(-1, self._all_heads, spec.head_dim)  # heads must lie dense
        if layer.q_norm is not None and layer.k_norm is not None:
            self._norm_heads(heads, layer.q_norm, layer.k_norm)
        apply_rotary(heads[:, : self._rotated_heads], rotary)
        return heads[:, : spec.num_heads], heads[:, spec.num_heads :]

    def finish(self, layer_idx: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """The second half of a layer: output projection, residual, norm, MLP, residual.

        Args:
            layer_idx: From 0.
            hidden: (rows, hidden), the layer's input; not changed. May be fewer rows than were projected.
            attended: (rows, heads, head_dim), the same rows.

        Returns:
            (rows, hidden), the layer's output.
        """
        layer = self._layers[layer_idx]
        hidden = layer.out(attended.flatten(1)).add_(hidden)
        gate, up = layer.gate_up(F.rms_norm(hidden, self._hidden, layer.mlp_norm, self._eps)).chunk(2, -1)
        return layer.down(self._activation(gate).mul_(up)).add_(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and output projection: (rows, hidden) → (rows, vocab) float32."""
        return self._head(F.rms_norm(hidden, self._hidden, self._norm, self._eps)).float()

    def _norm_heads(self, heads: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        """RMS norm of each query and key head, in place."""
        spec = self.spec
        queries, keys = heads[:, : spec.num_heads], heads[:, spec.num_heads : self._rotated_heads]
        queries.copy_(F.rms_norm(queries, (spec.head_dim,), q_norm, self._eps))
        keys.copy_(F.rms_norm(keys, (spec.head_dim,), k_norm, self._eps))


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    """The gate's activation by transformers' name."""
    if name in ("silu", "swish"):
        return F.silu
    from transformers.activations import ACT2FN

    activation: Callable[[Tensor], Tensor] = ACT2FN[name]
    return activation


def _stop_token_ids(model: Any) -> tuple[int, ...]:
    """The ids that end an answer: the generation config's, else the configuration's."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)
    return ()
