"""Fused projections: several linear layers that read the same input become one, without holding a weight twice.

The fused tensor takes the place of the originals: each module's weight becomes a view into it, so a wrapped model
still runs. Layers are fused one at a time, so that the extra memory is one layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_ROWS = 256
"""Up to so many rows, but for a single one, a float32 product on a CPU is faster the other way round: `W @ rows.T`
takes 0.5 of the time of `rows @ W.T` at 4 rows, 0.75 at 96, 0.9 at 256 and as long from 384 on (all projections of the
bundled model, 2 cores with AVX2)."""

ALIGNED_ROWS = 8
"""Such a product is faster where the rows are a multiple of this: 94 take 1.2 times as long as 96 with two added."""


class Projection(NamedTuple):
    """A linear layer: its tensors, detached from autograd and sharing their module's memory, and its product.

    Attributes:
        weight: (out_features, in_features), model dtype.
        bias: (out_features,) or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        """(rows, in_features) → (rows, out_features), model dtype; a transposed view where that is faster to make."""
        if rows.device.type != "cpu" or rows.dtype != torch.float32 or not 1 < len(rows) <= FEW_ROWS:
            return F.linear(rows, self.weight, self.bias)
        missing = -len(rows) % ALIGNED_ROWS
        aligned = F.pad(rows, (0, 0, 0, missing)).T if missing else rows.T
        if self.bias is None:
            product = torch.mm(self.weight, aligned)
        else:
            product = torch.addmm(self.bias.unsqueeze(1), self.weight, aligned)
        return product[:, : len(rows)].T


def projection(linear: nn.Linear) -> Projection:
    """The tensors of one linear layer."""
    return Projection(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def fuse(*linears: nn.Linear) -> Projection:
    """Joins linear layers along their outputs; their weights and biases become views into the result.

    Fusing the same modules again finds the views and returns the same memory.

    Args:
        linears: Layers with the same input width, dtype and device, with or without a bias.
    """
    weight = _joined([linear.get_parameter("weight") for linear in linears])
    biases = [linear.get_parameter("bias") for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "either all fused layers have a bias or none has"
    return Projection(weight, _joined(biases) if biases else None)


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor with the parameters' rows in order; afterwards the parameters are views into it."""
    rows = [len(parameter) for parameter in parameters]
    first = parameters[0].detach()
    if _adjacent(parameters):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    with torch.inference_mode(False), torch.no_grad():
        joined = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, view in zip(parameters, torch.split(joined, rows), strict=True):
            parameter.data = view
    return joined


def _adjacent(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the parameters already lie one after the other in one storage."""
    storage = parameters[0].untyped_storage().data_ptr()
    offset = parameters[0].storage_offset()
    for parameter in parameters:
        if not parameter.is_contiguous() or parameter.untyped_storage().data_ptr() != storage:
            return False
        if parameter.storage_offset() != offset:
            return False
        offset += parameter.numel()
    return True
