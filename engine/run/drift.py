"""Drift: how far reused K and V, and the logits over them, are from those of a full prefill.

Pure functions of tensors. Who computes both ways is `run.comparison`, on demand, and `run.shadow`, by sampling.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Drift:
    """What a prompt's reuse cost in accuracy, against its full prefill.

    Attributes:
        slid_tokens: Tokens over which CKSim is taken: every slid one, corrected ones included. Without any, CKSim is 1.
        key_cksim: For each layer the CKSim of the keys, 1 where they are alike (paper, section 3).
        value_cksim: The same of the values.
        kl: KL(full ‖ reuse) of the next token, nats.
        agrees: Whether both ways' most likely next token is the same.
        margin: How much more likely the full prefill's first token is than its second, nats: where it is small,
            disagreeing means little.
    """

    slid_tokens: int
    key_cksim: tuple[float, ...]
    value_cksim: tuple[float, ...]
    kl: float
    agrees: bool
    margin: float


def measure(
    slid_tokens: int,
    reused_kv: Iterable[Tensor],
    full_kv: Iterable[Tensor],
    reused_logits: Tensor,
    full_logits: Tensor,
) -> Drift:
    """Compares the two ways of computing a prompt.

    Args:
        slid_tokens: How many tokens slid.
        reused_kv: By layer (slid tokens, 2 * kv_heads, head_dim): keys, rotated at the prompt's positions, before
            values.
        full_kv: The same tokens of the full prefill, at the same positions.
        reused_logits: (vocab,) of the prompt's last token over reused K and V.
        full_logits: (vocab,) of the full prefill.
    """
    keys, values = cksim_by_layer(reused_kv, full_kv)
    return Drift(
        slid_tokens=slid_tokens,
        key_cksim=keys,
        value_cksim=values,
        kl=float(kl_divergence(full_logits, reused_logits)),
        agrees=bool(full_logits.argmax() == reused_logits.argmax()),
        margin=float(top_margin(full_logits)),
    )


def cksim_by_layer(
    reused_kv: Iterable[Tensor], full_kv: Iterable[Tensor]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """CKSim of each layer's keys, and of its values.

    Args:
        reused_kv: By layer (tokens, 2 * kv_heads, head_dim): keys, rotated, before values.
        full_kv: The same, recomputed.
    """
    keys: list[float] = []
    values: list[float] = []
    for reused, full in zip(reused_kv, full_kv, strict=True):
        kv_heads = full.shape[1] // 2
        keys.append(cksim(reused[:, :kv_heads], full[:, :kv_heads]))
        values.append(cksim(reused[:, kv_heads:], full[:, kv_heads:]))
    return tuple(keys), tuple(values)


def cksim(reused: Tensor, full: Tensor) -> float:
    """CKSim of one layer's keys, or of its values: the mean over heads and tokens of the cosine (paper, section 3).

    Args:
        reused: (tokens, kv_heads, head_dim); keys rotated.
        full: The same, recomputed.

    Returns:
        -1 to 1; 1 if there are no tokens.
    """
    if not len(full):
        return 1.0
    return float(F.cosine_similarity(reused.float(), full.float(), dim=-1).mean())


def kl_divergence(full: Tensor, reused: Tensor) -> Tensor:
    """KL(full ‖ reuse) of next-token distributions: logits (..., vocab) twice → (...) float32, nats."""
    expected, got = full.float().log_softmax(-1), reused.float().log_softmax(-1)
    # Rounding may leave a few negative billionths where both are the same.
    return (expected.exp() * (expected - got)).sum(-1).clamp_min(0.0)


def top_margin(logits: Tensor) -> Tensor:
    """How much more likely the first token is than the second: logits (..., vocab) → (...) float32, nats."""
    first, second = torch.topk(logits.float(), 2, dim=-1).values.unbind(-1)
    return first - second
