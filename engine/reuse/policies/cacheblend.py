"""`cacheblend`: segments computed alone, rotated into place, those tokens computed again that deviate most at layer 1.

CacheBlend (EuroSys '25) computes the first layer for all tokens, finds the high-KV-deviation tokens in the second, and
goes on with these. Its paper lets the set shrink a little from layer to layer (gradual filtering) so that the wanted
share is met on average; its published code chooses once and keeps the set. This is the latter, by squared key deviation
as in LMCache (the paper's first code took the values'). As there, the cached K and V of tokens that were not chosen
stay as they are from the second layer on.
"""

from __future__ import annotations

from ..rules import ByDeviation
from ..spans import Plan
from .interface import Isolation, PlanRequest
from .isolation import isolated_spans


class CacheBlend:
    """Whole segments anywhere, corrected where their keys deviate most."""

    name = "cacheblend"
    isolation: Isolation | None = Isolation(moves=True)

    def plan(self, request: PlanRequest) -> Plan:
        """The first segment exact, the others slid; `cacheblend_share` of the slid tokens is chosen at layer 1."""
        assert self.isolation is not None
        spans = isolated_spans(request, self.isolation)
        chooses = request.config.cacheblend_share > 0.0 and any(span.treatment == "slid" for span in spans)
        return Plan(
            spans=tuple(spans),
            positions=request.positions,
            correction=ByDeviation(request.config.cacheblend_share) if chooses else None,
            policy=self.name,
        )
