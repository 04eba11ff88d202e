"""Prefill: carries out a plan and returns the logits that the first answer token is drawn from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ..reuse.spans import Plan
from ..slide.assembly import Assembly
from .forward import Forward


def prefill(
    forward: Forward,
    token_ids: np.ndarray,
    plan: Plan,
    assembly: Assembly,
    *,
    wanted: int = 1,
    chunk_tokens: int,
    check: Callable[[], None] = lambda: None,
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

    Returns:
        (wanted, vocab) float32 on the model's device.
    """
    active = plan.active_tokens()
    assert len(active) >= wanted > 0
    assert active[-wanted] == len(token_ids) - wanted, "the tokens whose logits are wanted are not fresh"

    def before_first(layer_idx: int) -> None:
        check()
        assembly.slide(layer_idx)

    def before_later(_: int) -> None:
        check()

    outputs: list[torch.Tensor] = []
    for start in range(0, len(active), chunk_tokens):
        tokens = active[start : start + chunk_tokens]
        wanted_here = max(0, start + len(tokens) - max(start, len(active) - wanted))
        logits = forward.rows(
            token_ids[tokens],
            plan.positions[tokens],
            tokens,
            assembly.table,
            wanted_here,
            before_layer=before_later if start else before_first,
        )
        if logits is not None:
            outputs.append(logits)
    assembly.finish()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
