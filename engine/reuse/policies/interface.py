"""What a reuse policy is: a pure function from a prompt and what is cached to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

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

    @property
    def positions(self) -> np.ndarray:
        """(tokens,) int64, strictly increasing: the position ids of the prompt's tokens, the same for all policies."""
        return np.arange(len(self.prompt), dtype=np.int64) if self.reserved is None else self.reserved


class Policy(Protocol):
    """How reuse is decided.

    To add one: write a file in `reuse/policies/`, register it in `POLICIES` and add its name to `config.PolicyName`.

    Attributes:
        name: The name that users give.
    """

    name: str

    def plan(self, request: PlanRequest) -> Plan:
        """Decides the treatment of each token. The last token is always fresh: its logits start the answer."""
        ...
