"""Reading and writing some slots of a layer: as slices where they lie in a few runs, by number elsewhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

_SLICED_RUNS = 4
"""Up to so many runs, copies of slices are quicker than one indexed copy."""


class Slots:
    """Some slots in an order, the same ones in every layer.

    Slot numbers go to the device once, here, so that using them in each layer never waits for the host.
    """

    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        """Works out how to reach them.

        Args:
            slots: (n,) int64, at least one.
            device: Where the pool lies.
        """
        borders = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        self._runs = [(start, stop, int(slots[start])) for start, stop in pairwise(borders)]
        self._numbers = None if len(self._runs) <= _SLICED_RUNS else torch.from_numpy(slots).to(device)

    def read(self, layer: torch.Tensor) -> torch.Tensor:
        """What the slots hold.

        Args:
            layer: (slots, heads, head_dim): one layer's pool, or some of its heads.

        Returns:
            (n, heads, head_dim): a view of the pool if the slots are one run, else a copy.
        """
        if self._numbers is not None:
            return layer.index_select(0, self._numbers)
        pieces = [layer[slot : slot + stop - start] for start, stop, slot in self._runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def write(self, layer: torch.Tensor, kv: torch.Tensor) -> None:
        """Fills the slots.

        Args:
            layer: (slots, heads, head_dim): one layer's pool, or some of its heads; changed in place.
            kv: (n, heads, head_dim), the pool's dtype; may be what other slots of the pool were read as.
        """
        if self._numbers is not None:
            if kv.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr():
                kv = kv.clone()  # torch refuses to copy by number within one tensor
            layer.index_copy_(0, self._numbers, kv)
            return
        for start, stop, slot in self._runs:
            layer[slot : slot + stop - start] = kv[start:stop]
