"""Learned positions: a range of positions is reserved for each update, so that the text behind it keeps its own.

CCPE (the paper's Algorithm 1) on rotary models: the length e* of a reserved range is a quantile of the lengths that
updates of the same slot had. An update lies at the start of its range, what the range has left over is a gap behind
it, and the suffix begins at the range's end: as long as the update fits, the suffix does not move and its cached keys
serve as they are. Only an update longer than its range moves the suffix.

A *slot* is known by its number: the k-th run of neighbouring `update` segments in a prompt, counted from the front. An
agent that now and then leaves an update out keeps its slots by giving an empty segment instead; if it does not, later
updates get their neighbours' ranges, which costs positions or a rotation and changes no answer's correctness. Updates
past the first `MAX_SLOTS` and one that ends the prompt have no range.

Pure numbers: no tensors, no files, no sessions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..config import PAGE_TOKENS
from ..segments import EncodedPrompt

MAX_SLOTS = 8
"""Updates of a prompt that get ranges: every range counts against the context."""

MAX_OBSERVATIONS = 4096
"""Past so many observed lengths of a slot all counts are halved: what was long ago fades, and a file stays small."""


class Update(NamedTuple):
    """One slot's text in a prompt: tokens `[start, stop)`, none if the update is empty."""

    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """The update's length."""
        return self.stop - self.start


class LengthHistogram:
    """How often an update had which length.

    Attributes:
        counts: Observations by length in tokens.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts = Counter(dict(counts or {}))

    @property
    def num_observations(self) -> int:
        """Observed updates."""
        return self.counts.total()

    def add(self, other: Mapping[int, int]) -> None:
        """Adds observations, and lets old ones fade past `MAX_OBSERVATIONS`."""
        self.counts.update(other)
        while self.num_observations > MAX_OBSERVATIONS:
            self.counts = Counter({length: count // 2 for length, count in self.counts.items() if count > 1})

    def quantile(self, share: float) -> int:
        """The smallest length that at least this share of the updates did not exceed; 0 without observations."""
        wanted, seen = share * self.num_observations - 1e-9, 0
        for length in sorted(self.counts):
            seen += self.counts[length]
            if seen >= wanted:
                return length
        return 0


@dataclass
class PositionProfile:
    """What is known of the updates of one template.

    Attributes:
        slots: A histogram for each slot, at most `MAX_SLOTS`.
    """

    slots: list[LengthHistogram] = field(default_factory=list)

    def observe(self, lengths: Iterable[int]) -> None:
        """Notes the updates of one prompt, by slot, in tokens."""
        self.merge(PositionProfile([LengthHistogram({length: 1}) for length in lengths]))

    def merge(self, other: PositionProfile) -> None:
        """Adds what another profile of the same template has observed."""
        for number, slot in enumerate(other.slots[:MAX_SLOTS]):
            if number == len(self.slots):
                self.slots.append(LengthHistogram())
            self.slots[number].add(slot.counts)

    def range_tokens(self, slot: int, quantile: float) -> int | None:
        """The length e* of a slot's reserved range (Algorithm 1), in whole pages; None without observations.

        Whole pages, so that the ranges of two sessions agree although the histogram grew a little in between: their
        common text then lies at the same positions and is shared exactly.
        """
        if slot >= len(self.slots) or not self.slots[slot].num_observations:
            return None
        return whole_pages(self.slots[slot].quantile(quantile))


def whole_pages(num_tokens: int) -> int:
    """The next multiple of a page, in tokens."""
    return math.ceil(num_tokens / PAGE_TOKENS) * PAGE_TOKENS


def updates_of(prompt: EncodedPrompt) -> tuple[Update, ...]:
    """The prompt's updates by slot: its runs of neighbouring `update` segments that something follows."""
    borders = (*prompt.segment_starts, len(prompt))
    found: list[Update] = []
    continues = False
    for number, role in enumerate(prompt.roles):
        if role == "update":
            start = found.pop().start if continues else borders[number]
            found.append(Update(start, borders[number + 1]))
        continues = role == "update"
    return tuple(update for update in found if update.stop < len(prompt))[:MAX_SLOTS]


def reserved_positions(num_tokens: int, updates: Sequence[Update], ranges: Sequence[int]) -> np.ndarray:
    """The positions of a prompt's tokens when ranges are reserved for its updates.

    Args:
        num_tokens: Of the prompt.
        updates: In order, without overlap.
        ranges: Positions reserved for each update; a shorter one than the update has no effect.

    Returns:
        (tokens,) int64, strictly increasing, contiguous from 0 but for a gap behind each update that leaves some of
        its range unused.
    """
    steps = np.ones(num_tokens, dtype=np.int64)
    steps[:1] = 0
    for update, reserved in zip(updates, ranges, strict=True):
        steps[update.stop] += max(0, reserved - update.num_tokens)
    return steps.cumsum()
