"""How a plan says that slid tokens are chosen for correction while the prompt is computed. Plain numbers, no tensors.

What can be said before anything is computed stands in the plan itself (`Plan.corrected`); `run.preparation` turns a
rule into what carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ByStaleness:
    """Stale tokens that the new text looks at are corrected, once the text around them is computed (`run.correction`).

    Attributes:
        bound: Share of the new text's attention that may be left on stale tokens, 0 to 1.
        cap_share: Most of the slid tokens that are chosen, as a share.
    """

    bound: float
    cap_share: float


Rule = ByStaleness
