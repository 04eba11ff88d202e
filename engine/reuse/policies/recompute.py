"""`recompute`: every token is computed. It reads nothing that is cached and is the oracle of the others."""

from __future__ import annotations

from ..spans import Plan, Span
from .interface import Isolation, PlanRequest


class Recompute:
    """Full prefill."""

    name = "recompute"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """One fresh span."""
        return Plan(spans=(Span(0, len(request.prompt), "fresh"),), positions=request.positions, policy=self.name)
