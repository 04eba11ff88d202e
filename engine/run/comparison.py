"""Comparison: a prompt computed as a policy would, for its logits, a trace of it or its drift; nothing is stored.

Nothing is counted either, so that comparing policies changes no later turn. Which policies are compared is the caller's
business; only drift knows that `recompute` is the full prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .drift import Drift, measure
from .preparation import Preparation
from .prepared import Prepared
from .request import Call

_ANY_TOKEN = np.zeros(1, dtype=np.int64)
"""Stands for the continuation where none is given: nothing of it is computed, its logits are left."""


@dataclass(frozen=True)
class Trace:
    """What a policy leaves behind a prompt, on the model's device.

    Attributes:
        keys_values: (layers, tokens, 2 * kv_heads, head_dim), the cache's dtype, of the prompt's tokens: keys, rotated
            at the prompt's positions, before values. A copy.
        logits: For each continuation (its tokens, vocab) float32: the logits before each of its tokens.
    """

    keys_values: Tensor
    logits: tuple[Tensor, ...]


class Comparison:
    """Computes prompts on the engine's one thread and gives their pages back at once."""

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._pool = preparation.pool

    @torch.inference_mode()
    def logits(self, call: Call, continuation: np.ndarray) -> Tensor:
        """The logits before each token of a continuation.

        Args:
            call: What stands before the continuation.
            continuation: (tokens,) int64, at least one.

        Returns:
            (tokens of the continuation, vocab) float32, on the model's device.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: Prompt and continuation do not fit.
        """
        self._preparation.check_ids(continuation)
        with self._computed(call, continuation) as (_, logits):
            return logits

    @torch.inference_mode()
    def trace(self, call: Call, continuations: Sequence[np.ndarray]) -> Trace:
        """What the policy leaves behind a prompt; the prompt is computed once for all continuations.

        Args:
            call: What is asked.
            continuations: (tokens,) int64 each, at least one token.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: Prompt and longest continuation do not fit.
        """
        for continuation in continuations:
            self._preparation.check_ids(continuation)
        longest = max(continuations, key=len, default=_ANY_TOKEN)
        with self._computed(call, longest) as (prepared, logits):
            kv = self._copy(prepared, np.arange(len(prepared.asked.encoded)))
            behind = [logits if each is longest else self._behind(prepared, logits, each) for each in continuations]
            return Trace(kv, tuple(behind))

    @torch.inference_mode()
    def drift(self, call: Call) -> Drift:
        """How far a prompt under its policy is from its full prefill.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: The prompt does not fit.
        """
        with self._computed(call) as (prepared, reused_logits):
            slid = prepared.plan.slid_tokens()
            reused = self._copy(prepared, slid)
        with self._computed(replace(call, policy="recompute")) as (prepared, full_logits):
            full = self._copy(prepared, slid)
        return measure(len(slid), reused, full, reused_logits[-1], full_logits[-1])

    @contextmanager
    def _computed(self, call: Call, continuation: np.ndarray = _ANY_TOKEN) -> Iterator[tuple[Prepared, Tensor]]:
        """A prompt with its pages, given back at the end, and the logits before each token of a continuation."""
        prepared = self._preparation.prepare(call, continuation[:-1])
        try:
            yield prepared, self._preparation.prefill(prepared, wanted=len(continuation))
        finally:
            self._pool.release(prepared.assembly.table.pages)

    def _copy(self, prepared: Prepared, tokens: np.ndarray) -> Tensor:
        """K and V of some tokens (n,) int64: (layers, n, 2 * kv_heads, head_dim)."""
        slots = self._preparation.forward.to_device(prepared.assembly.table.slots(tokens))
        return self._pool.kv.index_select(1, slots)

    def _behind(self, prepared: Prepared, logits: Tensor, continuation: np.ndarray) -> Tensor:
        """The logits before each token of a continuation, computed in the place of the one that `logits` are of."""
        if len(continuation) == 1:
            return logits[:1].clone()
        start = len(prepared.asked.encoded)
        tokens = np.arange(start, start + len(continuation) - 1)
        positions, table = prepared.plan.positions[tokens], prepared.assembly.table
        forward = self._preparation.forward
        rows = forward.rows(continuation[:-1], positions, tokens, table, wanted=len(tokens))
        assert rows is not None
        return torch.cat([logits[:1], rows])
