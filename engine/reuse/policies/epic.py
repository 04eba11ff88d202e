"""`epic`: segments computed alone, rotated into place, their ends computed again in context (EPIC, ICML '25).

EPIC's LegoLink computes the first tokens of every chunk but the prompt's first again, at most 32 of them, since those
drew attention as if the prompt began there. Here the last tokens are computed again as well, as in the comparisons of
this project's design; `epic_tail_tokens=0` is LegoLink itself. What is computed again sees everything before it.
"""

from __future__ import annotations

import numpy as np

from ..spans import Plan
from .interface import Isolation, PlanRequest
from .isolation import isolated_spans


class Epic:
    """Whole segments anywhere, corrected at both ends."""

    name = "epic"
    isolation: Isolation | None = Isolation(moves=True)

    def plan(self, request: PlanRequest) -> Plan:
        """The first segment exact, the others slid with their ends corrected, what is not cached fresh."""
        assert self.isolation is not None
        spans = isolated_spans(request, self.isolation)
        head, tail = request.config.epic_head_tokens, request.config.epic_tail_tokens
        corrected = [np.empty(0, dtype=np.int64)]
        for span in spans:
            if span.after_change:
                place = np.arange(len(span))
                ends = (place < head) | (place >= len(span) - tail)
                corrected.append(span.start + np.flatnonzero(ends))
        return Plan(
            spans=tuple(spans), positions=request.positions, corrected=np.concatenate(corrected), policy=self.name
        )
