"""What a reuse policy is: a pure function from a prompt and what is cached to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...config import EngineConfig
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
        config: The settings; of these, policies read those of `config.PER_REQUEST`.
        reserved: (tokens,) int64, strictly increasing: the prompt's positions where ranges are reserved for its
            updates; None for contiguous ones.
    """

    prompt: EncodedPrompt
    session: str | None
    sequences: Sequence[CachedSequence]
    config: EngineConfig = field(default_factory=EngineConfig)
    reserved: np.ndarray | None = None

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
