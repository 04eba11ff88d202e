"""Comparison: a prompt computed as a policy would, for its logits, its K and V or its drift; nothing is stored.

Nothing is counted either, so that comparing policies changes no later turn. Which policies are compared is the caller's
business; only drift knows that `recompute` is the full prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..reuse.spans import Plan
from .drift import Drift, measure
from .preparation import Preparation
from .request import Call


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
        prepared = self._preparation.prepare(call, continuation[:-1])
        try:
            return self._preparation.prefill(prepared, wanted=len(continuation))
        finally:
            self._pool.release(prepared.assembly.table.pages)

    @torch.inference_mode()
    def keys_values(self, call: Call) -> Tensor:
        """K and V of a prompt's tokens as the policy would leave them.

        Returns:
            (layers, tokens, 2 * kv_heads, head_dim), the pool's dtype: keys, rotated at the prompt's positions, before
            values. A copy, on the model's device.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: The prompt does not fit.
        """
        _, _, kv = self._copied(call, lambda plan: np.arange(plan.num_tokens))
        return kv

    @torch.inference_mode()
    def drift(self, call: Call) -> Drift:
        """How far a prompt under its policy is from its full prefill.

        Raises:
            PromptError: A token id is not the model's.
            ContextLengthError: The prompt does not fit.
        """
        slid, reused_logits, reused_kv = self._copied(call, Plan.slid_tokens)
        _, full_logits, full_kv = self._copied(replace(call, policy="recompute"), lambda _: slid)
        return measure(len(slid), reused_kv, full_kv, reused_logits, full_logits)

    def _copied(self, call: Call, wanted: Callable[[Plan], np.ndarray]) -> tuple[np.ndarray, Tensor, Tensor]:
        """Computes a prompt and copies K and V of the wanted tokens out of its pages.

        Returns:
            The tokens (n,) int64, the logits (vocab,) behind the prompt, and K and V
            (layers, n, 2 * kv_heads, head_dim).
        """
        prepared = self._preparation.prepare(call)
        table = prepared.assembly.table
        try:
            logits = self._preparation.prefill(prepared, wanted=1)[-1]
            tokens = wanted(prepared.plan)
            slots = torch.from_numpy(table.slots(tokens)).to(self._pool.kv.device)
            return tokens, logits, self._pool.kv.index_select(1, slots)
        finally:
            self._pool.release(table.pages)
