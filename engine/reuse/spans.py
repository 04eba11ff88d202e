"""Spans and plans: which tokens of a prompt are exact, slid or fresh. Plain numbers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from .rules import Rule


@dataclass(frozen=True)
class Span:
    """A token range of a prompt with one treatment.

    Attributes:
        start: First prompt token.
        stop: One past the last prompt token.
        treatment: `exact`, `slid` or `fresh`.
        source: Id of the cached sequence whose KV is used; None for a fresh span.
        source_start: Token of that sequence at which the span begins; None for a fresh span.
        after_change: Whether a slid span follows a change (something fresh, gone or moved before it), so that its
            first tokens are worth correcting. A tainted page of an unchanged prefix follows none.
    """

    start: int
    stop: int
    treatment: Literal["exact", "slid", "fresh"]
    source: int | None = None
    source_start: int | None = None
    after_change: bool = False

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """What a policy decided for one prompt.

    Attributes:
        spans: In order, non-empty, partitioning `[0, tokens)`; exact spans come first.
        positions: (tokens,) int64, strictly increasing: the position id of each prompt token.
        corrected: (n,) int64, strictly increasing: slid tokens to compute again.
        correction: How slid tokens to correct are chosen while the prompt is computed; None if `corrected` says it
            all.
        policy: The policy that was asked for.
        fallback: Why less is reused than the policy allows, or None.
    """

    spans: tuple[Span, ...]
    positions: np.ndarray
    corrected: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    correction: Rule | None = None
    policy: str = "recompute"
    fallback: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.spans[-1].stop

    @property
    def exact_tokens(self) -> int:
        """Length of the untainted prefix once the plan is carried out: everything before the first slid token."""
        slid = next((span for span in self.spans if span.treatment == "slid"), None)
        return self.num_tokens if slid is None else slid.start

    def fresh_tokens(self) -> np.ndarray:
        """(n,) int64, increasing: tokens without any cached copy."""
        return _joined([np.arange(span.start, span.stop) for span in self.spans if span.treatment == "fresh"])

    def slid_tokens(self) -> np.ndarray:
        """(n,) int64, increasing: tokens whose KV comes from an earlier turn, corrected ones included."""
        return _joined([np.arange(span.start, span.stop) for span in self.spans if span.treatment == "slid"])

    def active_tokens(self) -> np.ndarray:
        """(n,) int64, increasing: fresh tokens plus corrected ones, the rows that go through the model."""
        return np.sort(np.concatenate([self.fresh_tokens(), self.corrected]))

    def extended(self, num_tokens: int) -> Plan:
        """The plan with more fresh tokens behind it, at the positions that follow."""
        if not num_tokens:
            return self
        stop, position = self.num_tokens, int(self.positions[-1]) + 1
        return replace(
            self,
            spans=(*self.spans, Span(stop, stop + num_tokens, "fresh")),
            positions=np.concatenate([self.positions, np.arange(position, position + num_tokens)]),
        )


def add_fresh(spans: list[Span], stop: int) -> None:
    """Fills the gap behind the last span up to `stop` with a fresh one, if there is a gap."""
    start = spans[-1].stop if spans else 0
    if start < stop:
        spans.append(Span(start, stop, "fresh"))


def _joined(ranges: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(ranges).astype(np.int64) if ranges else np.empty(0, dtype=np.int64)
