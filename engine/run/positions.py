"""Which positions a prompt gets: contiguous ones, or those of the ranges that its session reserves.

A session's ranges are settled when it is first answered and then stay, and so does an update without one. This changes
only when an update outgrows its range, or has another length where it has none: the suffix has to move then anyway, and
the profile is looked at again. So positions move as seldom as updates outgrow what was learned, while the profile
itself grows with every answered prompt.

Positions belong to a session, whatever the policy, so `recompute` under the same session is the reference of the
others. Calls without a session have contiguous ones: nothing of theirs ever slides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..config import SamplingParams
from ..position.ccpe import Update, reserved_positions, updates_of, whole_pages
from ..position.profile_file import ProfileBook, ProfileKey
from ..receipt import PositionKind
from ..reuse.index import SpaceKey
from ..segments import EncodedPrompt

MAX_SESSIONS = 1024

ANSWER_TOKENS = SamplingParams().max_tokens or 256
"""Room that must be left behind reserved ranges for an answer of no stated length."""


@dataclass(frozen=True)
class Placement:
    """Where a prompt's tokens are.

    Attributes:
        positions: (tokens,) int64, strictly increasing.
        kind: `learned` if a range is reserved for some update.
        reason: Why learned positions are on but not used, or None.
        ranges: The session's ranges by slot, in tokens; 0 where an update has none.
        dropped: Whether the session has no ranges from now on.
        lengths: The updates by slot, in tokens: the prompt's; of a session also those that its last prompt left out.
    """

    positions: np.ndarray
    kind: PositionKind = "contiguous"
    reason: str | None = None
    ranges: tuple[int, ...] = ()
    dropped: bool = False
    lengths: tuple[int, ...] = ()


class SessionPositions:
    """The ranges of each session, the least recently used forgotten first. On the engine's one thread."""

    def __init__(self, book: ProfileBook | None, quantile: float, context_tokens: int) -> None:
        """Takes what it needs to know.

        Args:
            book: The learned profiles; None gives every prompt contiguous positions.
            quantile: Share of the observed updates that fit into a range.
            context_tokens: The highest position is below it.
        """
        self._book = book
        self._quantile = quantile
        self._context_tokens = context_tokens
        self._sessions: OrderedDict[tuple[SpaceKey, str], Placement] = OrderedDict()

    def place(self, prompt: EncodedPrompt, space: SpaceKey, session: str | None, room_tokens: int) -> Placement:
        """The positions of a prompt; nothing is settled by asking.

        Args:
            prompt: What is asked.
            space: Its namespace and template.
            session: Whose ranges they are.
            room_tokens: Positions that are needed behind the prompt.
        """
        contiguous = Placement(np.arange(len(prompt), dtype=np.int64))
        if self._book is None:
            return contiguous
        updates = updates_of(prompt)
        contiguous = replace(contiguous, lengths=tuple(update.num_tokens for update in updates))
        if session is None:
            return replace(contiguous, reason="a call without a session has contiguous positions")
        settled = self._sessions.get((space, session))
        if settled is not None and settled.dropped:
            return replace(contiguous, reason=settled.reason, dropped=True)
        ranges = self._ranges(updates, ProfileKey(space.namespace, space.template), settled)
        if not any(ranges[: len(updates)]):
            reason = "no update of this template had been observed when this session laid out its own"
            if not updates:
                reason = "the prompt has no update that anything follows"
            return replace(contiguous, reason=reason, ranges=ranges)
        positions = reserved_positions(len(prompt), updates, ranges[: len(updates)])
        needed = int(positions[-1]) + 1 + room_tokens
        if needed > self._context_tokens:
            reason = (
                f"the reserved ranges need {needed} positions, answer included, but the maximum context length is "
                f"{self._context_tokens}: they are dropped for this session; raise max_context_tokens, lower "
                "positions_quantile or shorten the prompt to keep them"
            )
            return replace(contiguous, reason=reason, dropped=True)
        return replace(contiguous, positions=positions, kind="learned", ranges=ranges)

    def settle(self, placement: Placement, space: SpaceKey, session: str | None) -> None:
        """Notes an answered prompt: its session's ranges from now on, and the lengths of its updates."""
        if self._book is None:
            return
        self._book.observe(ProfileKey(space.namespace, space.template), placement.lengths)
        if session is None or not (placement.ranges or placement.dropped):
            return
        before = self._sessions.get((space, session))
        left_out = before.lengths[len(placement.lengths) :] if before else ()
        self._sessions[space, session] = replace(placement, positions=_NOWHERE, lengths=placement.lengths + left_out)
        self._sessions.move_to_end((space, session))
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def forget(self, namespace: str, session: str) -> None:
        """Drops a session's ranges, whatever the template."""
        for space, owner in list(self._sessions):
            if (space.namespace, owner) == (namespace, session):
                del self._sessions[space, owner]

    def save_if_due(self) -> None:
        """Saves the profiles if enough has been observed; after an answer, never in front of one."""
        if self._book is not None:
            self._book.save_if_due()

    def _ranges(self, updates: Sequence[Update], key: ProfileKey, settled: Placement | None) -> tuple[int, ...]:
        """By slot: what the session has if the update fits, else what the profile says, and at least the update."""
        assert self._book is not None
        profile = self._book.get(key)
        ranges = list(settled.ranges) if settled else []
        for slot, update in enumerate(updates):
            if _stays(settled, slot, update.num_tokens):
                continue
            learned = profile.range_tokens(slot, self._quantile)
            reserved = 0 if learned is None else max(learned, whole_pages(update.num_tokens))
            if slot == len(ranges):
                ranges.append(reserved)
            else:
                ranges[slot] = reserved
        return tuple(ranges)


def _stays(settled: Placement | None, slot: int, num_tokens: int) -> bool:
    """Whether what stands behind an update need not move: it fits its range, or without one is as long as it was."""
    if settled is None or slot >= len(settled.ranges):
        return False
    if settled.ranges[slot]:
        return num_tokens <= settled.ranges[slot]
    return settled.lengths[slot : slot + 1] == (num_tokens,)


_NOWHERE = np.empty(0, dtype=np.int64)
