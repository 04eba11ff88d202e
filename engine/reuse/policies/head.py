"""`head`: as `slide`, but of each run after a change simply the first tokens are corrected. The trivial rival."""

from __future__ import annotations

import math

import numpy as np

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
        heads = [run.tokens[: _head_tokens(len(run.tokens), share)] for run in runs if run.after_change or share >= 1.0]
        corrected = np.concatenate([np.empty(0, dtype=np.int64), *heads])
        return Plan(spans=tuple(spans), positions=request.positions, corrected=corrected, policy=self.name)


def _head_tokens(num_tokens: int, share: float) -> int:
    """How many tokens of a run of `num_tokens` slid ones are corrected; a rounding error never adds one."""
    return min(num_tokens, math.ceil(share * num_tokens - 1e-9))
