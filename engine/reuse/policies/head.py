"""`head`: as `slide`, but of each run after a change simply the first tokens are corrected. The trivial rival."""

from __future__ import annotations

import numpy as np

from ..select import share_of
from ..spans import Plan
from .interface import Isolation, PlanRequest
from .slide import slid_spans


class Head:
    """Exact prefix, then slid runs with their heads corrected, the rest fresh."""

    name = "head"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """Exact, slid and fresh spans; corrected tokens as `correction_share` asks."""
        spans, runs = slid_spans(request)
        share = request.config.correction_share
        heads = [run.tokens[: share_of(share, len(run.tokens))] for run in runs if run.after_change or share >= 1.0]
        corrected = np.concatenate([np.empty(0, dtype=np.int64), *heads])
        return Plan(spans=tuple(spans), positions=request.positions, corrected=corrected, policy=self.name)
