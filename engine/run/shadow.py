"""Shadow runs: an answered prompt computed the other way, after its answer, to measure its drift.

Nothing of them is indexed, no total counts them, and they take free pages only. A request stops the one that runs,
which is lost then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..reuse.index import CachedSequence
from ..slide.block_table import BlockTable
from ..slide.draft import Draft
from ..slide.pages import PoolFullError
from .drift import Drift, measure
from .gate import GateKey
from .preparation import Preparation
from .prepared import Prepared

CHUNK_TOKENS = 256
"""Tokens that go through the layers at once: a request waits for one layer of them."""


@dataclass(frozen=True)
class Answered:
    """What was answered and is to be measured, while it lies in its pages as it was served.

    Attributes:
        key: Which gate hears of it.
        prepared: The prompt and its plan.
        logits: (vocab,) float32: what the answer began with.
        sequence: Where it is cached.
    """

    key: GateKey
    prepared: Prepared
    logits: Tensor
    sequence: CachedSequence


class Shadow:
    """Measures drift of answered prompts, on the engine's one thread.

    A prompt that slid is compared with its full prefill, of which the untainted part is there already: exact tokens
    are what a full prefill gives. A prompt that was refused to slide is one itself, so what is computed is what its
    policy would have made of it.

    Attributes:
        measured: Shadow runs that were finished.
        dropped: Those that were not: a request came, or the pages that they need were taken or gone.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._pool = preparation.pool
        self.measured = 0
        self.dropped = 0

    @torch.inference_mode()
    def run(self, answered: Answered, check: Callable[[], None]) -> Drift | None:
        """Computes it the other way and compares.

        Args:
            answered: Nothing else was answered since.
            check: Called between layers; raises to stop.

        Returns:
            None if it cannot be measured.
        """
        drift = None
        slid = len(answered.prepared.plan.slid_tokens()) > 0
        try:
            drift = self._run_full(answered, check) if slid else self._run_refused(answered, check)
        except PoolFullError:
            pass
        finally:
            self.measured += drift is not None
            self.dropped += drift is None
        return drift

    def _run_full(self, answered: Answered, check: Callable[[], None]) -> Drift:
        plan, sequence, forward = answered.prepared.plan, answered.sequence, self._preparation.forward
        tokens = np.arange(plan.exact_tokens, plan.num_tokens)
        draft = Draft(sequence.table, plan.num_tokens, tokens, self._pool, self._preparation.queries)
        before_layer = draft.copies(check)
        try:
            for start in range(0, len(tokens), CHUNK_TOKENS):
                chunk = tokens[start : start + CHUNK_TOKENS]
                wanted = int(chunk[-1] == tokens[-1])
                logits = forward.rows(
                    sequence.token_ids[chunk], sequence.positions[chunk], chunk, draft.table, wanted, before_layer
                )
            assert logits is not None
            slid = plan.slid_tokens()
            reused, full = self._layers(sequence.table, slid, check), self._layers(draft.table, slid, check)
            return measure(len(slid), reused, full, answered.logits, logits[-1])
        finally:
            draft.discard()

    def _run_refused(self, answered: Answered, check: Callable[[], None]) -> Drift | None:
        prepared = self._preparation.rehearse(answered.prepared, without=answered.sequence.id)
        table = prepared.assembly.table
        try:
            logits = self._preparation.prefill(prepared, 1, check)
            slid = prepared.plan.slid_tokens()
            if not len(slid):
                return None
            reused, full = self._layers(table, slid, check), self._layers(answered.sequence.table, slid, check)
            return measure(len(slid), reused, full, logits[-1], answered.logits)
        finally:
            self._pool.release(table.pages)

    def _layers(self, table: BlockTable, tokens: np.ndarray, check: Callable[[], None]) -> Iterator[Tensor]:
        """By layer (tokens, 2 * kv_heads, head_dim)."""
        slots = self._preparation.forward.to_device(table.slots(tokens))
        for layer in self._pool.kv:
            check()
            yield layer.index_select(0, slots)
