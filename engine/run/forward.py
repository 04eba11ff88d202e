"""Chosen token rows through all layers: the one loop that prefill, decode and comparisons share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..attention.interface import Attention
from ..model.decoder import Decoder
from ..slide.block_table import BlockTable
from ..slide.pages import PagePool
from ..slide.queries import StoredQueries
from ..slide.slots import Slots


class Forward:
    """Walks a decoder over token rows, layer by layer, with K and V in the page pool.

    The way of a layer: project the active rows, write their K and V to their slots, attend over every page before
    them, finish. Rows that nobody wants logits of stop at the last layer's K and V.

    Attributes:
        decoder: The model.
        pool: Where K and V lie.
        queries: The stored queries beside them.
        attention: How rows attend.
        token_layers: Rows that went through a layer so far, over all layers.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, queries: StoredQueries, attention: Attention) -> None:
        self.decoder = decoder
        self.pool = pool
        self.queries = queries
        self.attention = attention
        self.token_layers = 0

    @property
    def num_layers(self) -> int:
        """Layers that a pass goes through."""
        return self.decoder.spec.num_layers

    def rows(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        tokens: np.ndarray,
        table: BlockTable,
        wanted: int,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor | None:
        """Computes K and V of the active rows and the logits of the last `wanted` of them.

        Args:
            token_ids: (rows,) int64.
            positions: (rows,) int64: position ids, for the rotary embedding.
            tokens: (rows,) int64, increasing: each row's token index in the sequence, for slots and attention.
            table: The sequence's pages; all other tokens up to the last row's are there already or get there through
                `before_layer`.
            wanted: Rows, counted from the end, whose logits are returned; 0 for none.
            before_layer: Called with each layer's index before anything of it is computed.

        Returns:
            (wanted, vocab) float32 on the model's device, or None if `wanted` is 0.
        """
        decoder, attention, spec = self.decoder, self.attention, self.decoder.spec
        hidden = decoder.embed(self.to_device(token_ids))
        rotary = decoder.rotary(self.to_device(positions))
        slots = Slots(table.slots(tokens), decoder.device)
        layout = attention.layout(table, tokens)
        last = spec.num_layers - 1
        for layer_idx in range(spec.num_layers):
            if before_layer is not None:
                before_layer(layer_idx)
            query, kv = decoder.project(layer_idx, hidden, rotary)
            self.token_layers += len(tokens)
            layer = self.pool.layer(layer_idx)
            slots.write(layer, kv)
            if layer_idx == last:
                if not wanted:
                    return None
                if wanted < len(tokens):
                    hidden, query = hidden[-wanted:], query[-wanted:]
                    layout = attention.layout(table, tokens[-wanted:])
            lse = self.lse(layer_idx, query)
            attended = attention.attend(
                query, layer, layout, scale=spec.attention_scale, window=spec.windows[layer_idx], lse=lse
            )
            if lse is not None:
                self.queries.write(layer_idx, slots, query, lse)
            hidden = decoder.finish(layer_idx, hidden, attended)
        return decoder.logits(hidden)

    def wait(self) -> None:
        """Returns when the device has computed what it was given; at once on a CPU."""
        if self.decoder.device.type == "cuda":
            torch.cuda.synchronize(self.decoder.device)

    def lse(self, layer_idx: int, query: torch.Tensor) -> torch.Tensor | None:
        """Room for the log-sum-exps of a probe layer's rows."""
        if not self.queries.wants(layer_idx):
            return None
        return torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        """Host numbers on the model's device."""
        return torch.from_numpy(values).to(self.decoder.device, non_blocking=True)
