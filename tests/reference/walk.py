"""A whole forward pass through the decoder, layer by layer, as plainly as can be: no run folder, no pool class."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cacheslide_agents.engine.attention import Attention, select_attention
from cacheslide_agents.engine.model.decoder import Decoder
from cacheslide_agents.engine.slide.block_table import BlockTable


class Walk:
    """A decoder with keys in the given pages of a pool of its own; `step` runs some tokens."""

    def __init__(self, decoder: Decoder, pages: Sequence[int], attention: Attention | None = None) -> None:
        spec = decoder.spec
        self.decoder = decoder
        self.table = BlockTable(pages)
        self.attention = attention or select_attention("sdpa", decoder.device, decoder.dtype)
        slots = (max(pages) + 1) * 16
        shape = (spec.num_layers, slots, 2 * spec.num_kv_heads, spec.head_dim)
        self.pool = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(decoder.dtype)

    @torch.inference_mode()
    def step(self, token_ids: Tensor, tokens: np.ndarray, wanted_rows: int | None = None) -> Tensor:
        """Logits of the last `wanted_rows` of the given tokens, whose positions are their indices."""
        decoder, spec = self.decoder, self.decoder.spec
        hidden = decoder.embed(token_ids)
        rotary = decoder.rotary(torch.from_numpy(tokens))
        slots = torch.from_numpy(self.table.slots(tokens))
        layout = self.attention.layout(self.table, tokens)
        wanted = len(tokens) if wanted_rows is None else wanted_rows
        for idx in range(spec.num_layers):
            query, kv = decoder.project(idx, hidden, rotary)
            self.pool[idx].index_copy_(0, slots, kv)
            if idx + 1 == spec.num_layers and wanted < len(tokens):
                layout = self.attention.layout(self.table, tokens[-wanted:])
                hidden, query = hidden[-wanted:], query[-wanted:]
            attended = self.attention.attend(
                query, self.pool[idx], layout, scale=spec.attention_scale, window=spec.windows[idx]
            )
            hidden = decoder.finish(idx, hidden, attended)
        return decoder.logits(hidden)
