"""`paper`: Algorithm 2 of the CacheSlide paper (FAST '26, §4.3) to the letter, its open points as `PaperSettings`.

Layers are counted from 0, as §4.3 does in its text. Algorithm 2, step by step:

1. *Selection*: in layer 1 the keys of all tokens are computed; the share k with the largest ‖ΔK‖² is chosen.
2. *Weighted correction*: from there on only these are computed, and K and V become α · computed + (1 − α) · cached with
   α = ‖ΔK‖² / ‖K_reuse‖². Where keys hardly deviate α is near 0, so the cached K and V stay nearly what they were.
3. *Gate*: every four layers chosen tokens leave by their CKSim and the threshold τ, and as many of the largest
   deviations that are left enter. The printed test is CKSim < τ; the text speaks of sufficient convergence, which is
   1 − CKSim < τ and the default here.

Left open by the paper, and settled here: a token that enters late is run through the layers that it missed, from the
selection layer on, over K and V as they stand by then; α weighs K and V alike.
"""

from __future__ import annotations

from ..rules import ByDeviation, TokenGate
from ..spans import Plan
from .deviation import is_worth_computing
from .interface import Isolation, PlanRequest
from .slide import slid_spans


class Paper:
    """Exact prefix, then slid runs corrected as the paper does, the rest fresh."""

    name = "paper"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """Exact, slid and fresh spans, and Algorithm 2 as the rule."""
        spans, runs = slid_spans(request)
        settings = request.config.paper
        return Plan(
            spans=tuple(spans),
            positions=request.positions,
            correction=_rule(request) if is_worth_computing(runs, settings.share) else None,
            policy=self.name,
        )


def _rule(request: PlanRequest) -> ByDeviation:
    settings = request.config.paper
    gate = None
    if settings.gate != "off":
        gate = TokenGate(settings.gate_every_layers, settings.tau, settings.gate)
    updates = tuple(
        segment
        for segment, role in zip(request.prompt.segment_ranges(), request.prompt.roles, strict=True)
        if role == "update"
    )
    return ByDeviation(
        settings.share,
        layer_idx=settings.selection_layer,
        fusion="clamped" if settings.clamp_alpha else "alpha",
        gate=gate,
        sees=updates if settings.attends_to == "update" else None,
    )
