"""`deviation`: as `slide`, but corrected are the tokens whose keys deviate most at layer 1, and they are replaced.

The choice of CacheBlend and of CacheSlide's Algorithm 2 on KV that was computed in context, without Algorithm 2's
fusion and gate: what choosing by staleness is compared with. Layers 0 and 1 are computed for every slid token.
"""

from __future__ import annotations

from ..rules import ByDeviation
from ..spans import Plan
from .interface import Isolation, PlanRequest
from .slide import SlidRun, slid_spans


class Deviation:
    """Exact prefix, then slid runs corrected by deviation, the rest fresh."""

    name = "deviation"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """Exact, slid and fresh spans; `deviation_share` of the slid tokens is chosen at layer 1."""
        spans, runs = slid_spans(request)
        share = request.config.deviation_share
        return Plan(
            spans=tuple(spans),
            positions=request.positions,
            correction=ByDeviation(share) if is_worth_computing(runs, share) else None,
            policy=self.name,
        )


def is_worth_computing(runs: list[SlidRun], share: float) -> bool:
    """Whether slid tokens may deviate from what a prefill gives by what changed, or all of them are wanted anyway."""
    return share > 0.0 and any(run.after_change or share >= 1.0 for run in runs)
