"""What every token asks and offers in every layer: a whole dense pass, and the attention it pays, in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.slide.block_table import BlockTable
from tests.reference.complex_rope import rotate_directly
from tests.reference.dense_attention import dense_attention


class DensePass:
    """Queries and keys of all tokens, in all layers.

    Attributes:
        queries: By layer (tokens, heads, head_dim) float64, rotated.
        keys: By layer (tokens, heads, head_dim) float64, rotated; every key head once for each of its query heads.
        kv: (layers, tokens, 2 * kv_heads, head_dim), the model's dtype: keys, rotated, before values.
    """

    @torch.inference_mode()
    def __init__(self, decoder: Decoder, token_ids: np.ndarray, positions: np.ndarray | None = None) -> None:
        spec, count = decoder.spec, len(token_ids)
        self.decoder = decoder
        self.queries: list[Tensor] = []
        self.keys: list[Tensor] = []
        layers: list[Tensor] = []
        tokens = np.arange(count)
        in_order = BlockTable(range(-(-count // 16)))
        hidden = decoder.embed(torch.from_numpy(token_ids))
        rotary = decoder.rotary(torch.from_numpy(tokens if positions is None else positions))
        for layer_idx in range(spec.num_layers):
            query, kv = decoder.project(layer_idx, hidden, rotary)
            self.queries.append(query.double())
            layers.append(kv.clone())
            keys = kv[:, : spec.num_kv_heads].double()
            self.keys.append(keys.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1))
            attended = dense_attention(query, kv, in_order, tokens, spec.attention_scale, spec.windows[layer_idx])
            hidden = decoder.finish(layer_idx, hidden, attended.to(hidden.dtype))
        self.kv = torch.stack(layers)

    def scores(self, layer_idx: int) -> Tensor:
        """(heads, tokens, tokens): scaled products, −inf where a token does not see another."""
        keys = self.keys[layer_idx]
        return _scores(self.decoder, layer_idx, self.queries[layer_idx], keys, np.arange(len(keys)))

    def values(self, layer_idx: int) -> Tensor:
        """(heads, tokens, head_dim) float64: every value head once for each of its query heads."""
        spec = self.decoder.spec
        values = self.kv[layer_idx][:, spec.num_kv_heads :].double().transpose(0, 1)
        return values.repeat_interleave(spec.num_heads // spec.num_kv_heads, 0)

    def change(
        self,
        layers: tuple[int, ...],
        rows: np.ndarray,
        gone: np.ndarray,
        turn: int,
        tokens: np.ndarray,
        other: DensePass,
        new: np.ndarray,
    ) -> Tensor:
        """(rows,): how far the values that tokens gather from new keys are from those they gathered from gone ones.

        New keys are weighed in one softmax over these and all that the tokens saw before. The distance is measured by
        the mean norm of the head's gone and new values; mean over layers and heads.

        Args:
            layers: To take the mean over.
            rows: The tokens.
            gone: The gone keys' places in this text.
            turn: Positions by which the tokens move.
            tokens: Their places in the text that has the new keys.
            other: That text.
            new: The new keys' places in it.
        """
        distances = []
        rope = self.decoder.spec.rope
        for layer_idx in layers:
            before = self.scores(layer_idx)[:, torch.from_numpy(rows)]
            query = self.queries[layer_idx][torch.from_numpy(rows)]
            query = rotate_directly(query, torch.full((len(rows),), turn), rope.inv_freq, 1.0)
            coming = _scores(self.decoder, layer_idx, query, other.keys[layer_idx][torch.from_numpy(new)], new, tokens)
            came = torch.cat((before, coming), -1).softmax(-1)[..., before.shape[-1] :]
            left = before.softmax(-1)[..., torch.from_numpy(gone)]
            gone_values = self.values(layer_idx)[:, torch.from_numpy(gone)]
            new_values = other.values(layer_idx)[:, torch.from_numpy(new)]
            norm = torch.cat((gone_values, new_values), 1).norm(dim=-1).mean(1)
            distances.append((came @ new_values - left @ gone_values).norm(dim=-1) / norm[:, None])
        return torch.stack(distances).mean((0, 1))


def _scores(
    decoder: Decoder,
    layer_idx: int,
    query: Tensor,
    keys: Tensor,
    key_tokens: np.ndarray,
    tokens: np.ndarray | None = None,
) -> Tensor:
    """(heads, rows, keys); rows are `tokens`, those of the keys if not given."""
    scores = torch.einsum("rhd,khd->hrk", query, keys) * decoder.spec.attention_scale
    behind = torch.from_numpy(key_tokens if tokens is None else tokens)[:, None] - torch.from_numpy(key_tokens)
    seen = (behind >= 0) & (behind < (decoder.spec.windows[layer_idx] or len(behind) + 10**6))
    return scores.masked_fill(~seen, -torch.inf)
