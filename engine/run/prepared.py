"""A prompt on its way to its logits: asked in token ids, then prepared with a plan and pages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..reuse.spans import Plan
from ..segments import EncodedPrompt
from ..slide.assembly import Assembly
from ..tokenization import TextPiece
from .positions import Placement
from .request import Call


@dataclass(frozen=True)
class Asked:
    """A call's prompt in token ids, and all that planning it hangs on besides what is cached.

    Attributes:
        call: Who asks, and how.
        encoded: The prompt.
        placement: Its tokens' positions, to be settled once it is answered.
        refused: Why nothing may be slid, or None if it may.
    """

    call: Call
    encoded: EncodedPrompt
    placement: Placement
    refused: str | None = None


@dataclass
class Prepared:
    """A prompt that is planned and has its pages; whoever prepared it releases them, or has them indexed.

    Attributes:
        token_ids: (tokens,) int64: the prompt and the continuation behind it.
        header: The prompt's text after its last control token, which the answer continues.
        plan: How its tokens are treated; after the prefill with what was corrected.
        assembly: Its pages.
        plan_seconds: What planning and taking pages took.
        asked: The prompt as it was planned.
        computed_share: Token-layers computed by the prefill, as a share of those of the prompt.
    """

    token_ids: np.ndarray
    header: TextPiece
    plan: Plan
    assembly: Assembly
    plan_seconds: float
    asked: Asked
    computed_share: float = 0.0
