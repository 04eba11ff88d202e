"""`promptcache`: segments computed alone, reused where they were computed, never corrected (Prompt Cache, MLSys '24).

Each segment's KV is computed at its own position range with nothing before it, so reused segments do not see each
other; fresh tokens see everything. A segment that shifts is another one: it is computed again at its new place.
"""

from __future__ import annotations

from ..spans import Plan
from .interface import Isolation, PlanRequest
from .isolation import isolated_spans


class PromptCache:
    """Whole segments in place."""

    name = "promptcache"
    isolation: Isolation | None = Isolation(moves=False)

    def plan(self, request: PlanRequest) -> Plan:
        """The first segment exact, the others slid without a move, what is not cached fresh."""
        assert self.isolation is not None
        spans = isolated_spans(request, self.isolation)
        return Plan(spans=tuple(spans), positions=request.positions, policy=self.name)
