"""What a reuse policy is: a pure function from a prompt and what is cached to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...config import PaperSettings
from ...segments import EncodedPrompt
from ..index import CachedSequence
from ..spans import Plan


@dataclass(frozen=True)
class PlanRequest:
    """What a policy plans with.

    Attributes:
        prompt: At least one token.
        session: The session that asks, or None.
        sequences: What is cached in the prompt's space (namespace and template); nothing else is looked at.
        correction_share: See `EngineConfig`.
        staleness_bound: See `EngineConfig`.
        min_slide_tokens: See `EngineConfig`.
        max_hops: See `EngineConfig`.
        share_slid: See `EngineConfig`.
        reserved: (tokens,) int64, strictly increasing: the prompt's positions where ranges are reserved for its
            updates; None for contiguous ones.
        epic_head_tokens: See `EngineConfig`.
        epic_tail_tokens: See `EngineConfig`.
        cacheblend_share: See `EngineConfig`.
        deviation_share: See `EngineConfig`.
        paper: See `EngineConfig`.
    """

    prompt: EncodedPrompt
    session: str | None
    sequences: Sequence[CachedSequence]
    correction_share: float = 0.15
    staleness_bound: float = 0.0003
    min_slide_tokens: int = 16
    max_hops: int = 20
    share_slid: bool = False
    reserved: np.ndarray | None = None
    epic_head_tokens: int = 32
    epic_tail_tokens: int = 32
    cacheblend_share: float = 0.18
    deviation_share: float = 0.26
    paper: PaperSettings = field(default_factory=PaperSettings)

    @property
    def positions(self) -> np.ndarray:
        """(tokens,) int64, strictly increasing: the position ids of the prompt's tokens, the same for all policies."""
        return np.arange(len(self.prompt), dtype=np.int64) if self.reserved is None else self.reserved


@dataclass(frozen=True)
class Isolation:
    """How a policy keeps isolated segments.

    Attributes:
        moves: Whether a copy serves at any position, computed at 0 and rotated into place; otherwise it serves only
            where it was computed, at the segment's own positions.
    """

    moves: bool

    def positions(self, positions: np.ndarray) -> np.ndarray:
        """Where a segment at some positions is to be computed; both (tokens,) int64."""
        return positions - positions[0] if self.moves else positions


class Policy(Protocol):
    """How reuse is decided.

    To add one: write a file in `reuse/policies/`, register it in `POLICIES` and add its name to `config.PolicyName`.

    Attributes:
        name: The name that users give.
        isolation: How segments are kept that were computed alone, or None for a policy that reuses KV in context.
    """

    name: str
    isolation: Isolation | None

    def plan(self, request: PlanRequest) -> Plan:
        """Decides the treatment of each token. The last token is always fresh: its logits start the answer."""
        ...
