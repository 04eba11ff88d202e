"""Prefill: carries out a plan and returns the logits that the first answer token is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from ..reuse.spans import Plan
from ..slide.assembly import Assembly
from .forward import Forward


class Chooser(Protocol):
    """Chooses slid tokens to correct while a prompt is computed.

    Attributes:
        first_tokens: (n,) int64, increasing: fresh tokens that are computed before it chooses.
    """

    first_tokens: np.ndarray

    def choose(self) -> np.ndarray:
        """The slid tokens to correct, (n,) int64, increasing; all layers are slid and `first_tokens` computed."""
        ...


def prefill(
    forward: Forward,
    token_ids: np.ndarray,
    plan: Plan,
    assembly: Assembly,
    *,
    wanted: int = 1,
    chunk_tokens: int,
    check: Callable[[], None] = lambda: None,
    chooser: Chooser | None = None,
) -> torch.Tensor:
    """Computes the active tokens of a prompt over reused K and V.

    Args:
        forward: The model's loop.
        token_ids: (tokens,) int64: the whole prompt.
        plan: Which tokens are reused; its last `wanted` tokens are fresh.
        assembly: The plan's pages; each of its layers is slid before that layer is computed.
        wanted: Number of tokens at the prompt's end whose logits are returned.
        chunk_tokens: Active tokens that go through the layers at once.
        check: Called between layers; raises to stop (a cancelled request).
        chooser: Chooses what to correct; None corrects what the plan says.

    Returns:
        (wanted, vocab) float32 on the model's device.
    """
    steps = _Steps(forward, token_ids, plan, assembly, chunk_tokens, check)
    active = plan.active_tokens()
    assert len(active) >= wanted > 0
    assert active[-wanted] == len(token_ids) - wanted, "the tokens whose logits are wanted are not fresh"
    if chooser is not None:
        first = chooser.first_tokens
        logits = steps.run(first, wanted if len(first) == len(active) else 0)
        steps.slide_rest()
        chosen = chooser.choose()
        if logits is not None and not len(chosen):
            return logits
        # What was computed over a token that is corrected now is computed again.
        kept_stop = min(chosen[0] if len(chosen) else len(token_ids), len(token_ids) - wanted)
        active = np.setdiff1d(np.concatenate([active, chosen]), first[first < kept_stop])
    logits = steps.run(active, wanted)
    steps.slide_rest()
    assert logits is not None
    return logits


class _Steps:
    """Passes over the active tokens, in chunks; each layer is slid once, by whichever pass comes first."""

    def __init__(
        self,
        forward: Forward,
        token_ids: np.ndarray,
        plan: Plan,
        assembly: Assembly,
        chunk_tokens: int,
        check: Callable[[], None],
    ) -> None:
        self._forward = forward
        self._token_ids = token_ids
        self._positions = plan.positions
        self._assembly = assembly
        self._chunk_tokens = chunk_tokens
        self._check = check
        self._slid_layers = 0

    def run(self, active: np.ndarray, wanted: int = 0) -> torch.Tensor | None:
        """Computes tokens (rows,) int64, increasing; the logits of the last `wanted`, (wanted, vocab) float32."""
        outputs: list[torch.Tensor] = []
        for start in range(0, len(active), self._chunk_tokens):
            tokens = active[start : start + self._chunk_tokens]
            wanted_here = max(0, start + len(tokens) - max(start, len(active) - wanted))
            logits = self._forward.rows(
                self._token_ids[tokens],
                self._positions[tokens],
                tokens,
                self._assembly.table,
                wanted_here,
                before_layer=self._before_layer,
            )
            if logits is not None:
                outputs.append(logits)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0] if outputs else None

    def slide_rest(self) -> None:
        """Slides what no pass has slid."""
        for layer_idx in range(self._slid_layers, self._forward.num_layers):
            self._before_layer(layer_idx)

    def _before_layer(self, layer_idx: int) -> None:
        self._check()
        if layer_idx == self._slid_layers:
            self._assembly.slide(layer_idx)
            self._slid_layers += 1
