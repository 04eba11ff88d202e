"""Rotary embedding as complex numbers in float64: pairs of dimensions are points that turn by an angle."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate_directly(x: Tensor, positions: Tensor, inv_freq: Tensor, attention_scaling: float) -> Tensor:
    """Unrotated heads (tokens, heads, head_dim) at their positions, float64; what lies past the pairs stays."""
    pairs = len(inv_freq)
    x = x.double()
    points = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs])
    angles = positions.double()[:, None] * inv_freq.double()
    turned = points * torch.polar(torch.full_like(angles, attention_scaling), angles)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * pairs :]), dim=-1)
