"""How a plan says that slid tokens are chosen for correction while the prompt is computed. Plain numbers, no tensors.

What can be said before anything is computed stands in the plan itself (`Plan.corrected`); `run.preparation` turns a
rule into what carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ByStaleness:
    """Stale tokens that the new text looks at are corrected, once the text around them is computed (`run.correction`).

    Attributes:
        bound: Share of the new text's attention that may be left on stale tokens, 0 to 1.
        cap_share: Most of the slid tokens that are chosen, as a share.
    """

    bound: float
    cap_share: float


@dataclass(frozen=True)
class TokenGate:
    """When a token that is being corrected leaves, and another takes its place.

    Attributes:
        every_layers: Tokens are looked at in every so manyth layer, counted from layer 0, after the selection layer.
        tau: The threshold τ on CKSim, the mean over heads of the cosine of computed and cached keys.
        reading: `converged`: a token leaves where 1 − CKSim < τ. `printed`: where CKSim < τ.
    """

    every_layers: int
    tau: float
    reading: Literal["converged", "printed"]


@dataclass(frozen=True)
class ByDeviation:
    """All slid tokens are computed up to a layer, and on from there those that deviate most (`run.layerwise`).

    A token's deviation is ‖ΔK‖², the squared distance of its computed from its cached keys over all heads of the layer.

    Attributes:
        share: Share of the slid tokens that is chosen.
        layer_idx: The selection layer; a model with fewer layers selects in its last one.
        fusion: What becomes of a computed token's K and V: they replace the cached ones, or are mixed with them as
            α · computed + (1 − α) · cached with α = ‖ΔK‖² / ‖K_cached‖², as it is or clamped to at most 1.
        gate: When chosen tokens leave again; None keeps them to the last layer.
        sees: Token ranges that chosen tokens attend to besides themselves; None is everything before them.
    """

    share: float
    layer_idx: int = 1
    fusion: Literal["replace", "alpha", "clamped"] = "replace"
    gate: TokenGate | None = None
    sees: tuple[tuple[int, int], ...] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether what is chosen is computed in every layer, over everything, so that nothing cached is left of it."""
        return self.fusion == "replace" and self.gate is None and self.sees is None


Rule = ByStaleness | ByDeviation
