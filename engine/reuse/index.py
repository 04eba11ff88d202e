"""What is cached: sequences of tokens whose KV lies in pages of the pool, and which of them to forget first.

The index owns its sequences' pages. It decides nothing about reuse (`reuse.plan` does) and belongs to the engine's one
worker: only `stats` may be called from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from ..slide.block_table import BlockTable

if TYPE_CHECKING:
    from ..slide.pages import PagePool


KEPT_BRANCHES = 8
"""Of each session so many sequences outlive older ones of other sessions: an agent that edits its memory every turn
leaves a branch behind each time, and would push everybody else's cache out."""


class SpaceKey(NamedTuple):
    """Within which cached sequences may serve each other. Model, adapter, dtype and tokenizer are the engine's own.

    Attributes:
        namespace: The tenant.
        template: Identity of the chat template, or None for plain text.
        context: What its sequences saw when they were computed: all of their prompt, or nothing but themselves.
    """

    namespace: str
    template: str | None
    context: Literal["prompt", "isolated"] = "prompt"


@dataclass(eq=False)
class CachedSequence:
    """One sequence whose KV is cached: a prompt, usually with its answer.

    Attributes:
        id: Unique in the index.
        space: Where it may serve.
        session: The session that computed it, or None.
        token_ids: (tokens,) int64: those with KV; the last sampled token has none.
        positions: (tokens,) int64: where the cached keys are rotated to.
        exact_tokens: Length of the untainted prefix.
        hops: (tokens,) uint8: rotations that each cached key went through.
        query_positions: (tokens,) int64: where the stored queries are rotated to.
        staleness: (tokens,) float32: what each token was left with, its debt.
        table: Its pages, each counted once in the pool for this sequence.
        last_used: Tick of the last use; greater is later.
        pins: Running requests that read it; a pinned sequence stays.
    """

    id: int
    space: SpaceKey
    session: str | None
    token_ids: np.ndarray
    positions: np.ndarray
    exact_tokens: int
    hops: np.ndarray
    query_positions: np.ndarray
    staleness: np.ndarray
    table: BlockTable
    last_used: int = 0
    pins: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class IndexStats:
    """What the index holds.

    Attributes:
        sequences: Cached sequences.
        tokens: Tokens over all sequences; shared ones count for each.
        tainted_tokens: Those of them that are not exact.
        evicted_sequences: Sequences forgotten for want of pages since the engine was loaded.
    """

    sequences: int
    tokens: int
    tainted_tokens: int
    evicted_sequences: int


class CacheIndex:
    """The cached sequences of one engine."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._sequences: dict[int, CachedSequence] = {}  # in order of last use
        self._next_id = 0
        self._tick = 0
        self._evicted = 0

    def add(
        self,
        space: SpaceKey,
        session: str | None,
        *,
        token_ids: np.ndarray,
        positions: np.ndarray,
        exact_tokens: int,
        hops: np.ndarray,
        query_positions: np.ndarray,
        staleness: np.ndarray,
        table: BlockTable,
    ) -> CachedSequence:
        """Caches a sequence and takes over its page references; surplus pages of the table are released.

        Idle older sequences of the session that the new one continues (same tokens first, exact no further and no less
        stale) are forgotten, so an append-only conversation is one sequence; branches stay. In turn a sequence that
        adds nothing to one already cached is not kept. A sequence without tokens is an error of the caller.

        Returns:
            The sequence that now holds these tokens: the new one or the one that made it superfluous. It is the most
            recently used.
        """
        num_tokens = len(token_ids)
        assert num_tokens > 0 and len(positions) == len(hops) == num_tokens and 0 <= exact_tokens <= num_tokens
        assert table.capacity_tokens >= num_tokens
        held = table.first_pages(num_tokens)
        self._pool.release(table.pages[len(held.pages) :])
        new = CachedSequence(
            id=self._next_id,
            space=space,
            session=session,
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=np.array(positions, dtype=np.int64),
            exact_tokens=exact_tokens,
            hops=np.array(hops, dtype=np.uint8),
            query_positions=np.array(query_positions, dtype=np.int64),
            staleness=np.array(staleness, dtype=np.float32),
            table=held,
        )
        self._next_id += 1
        for old in self.session(space, session):
            if _continues(old, new):
                self._pool.release(new.table.pages)
                self.touch(old.id)
                return old
        for old in self.session(space, session):
            if old.pins == 0 and _continues(new, old):
                self.remove(old.id)
        self._sequences[new.id] = new
        self.touch(new.id)
        return new

    def get(self, sequence_id: int) -> CachedSequence:
        """The sequence with this id, which is cached."""
        return self._sequences[sequence_id]

    def holds(self, sequence: CachedSequence) -> bool:
        """Whether it is still cached."""
        return sequence.id in self._sequences

    def candidates(self, space: SpaceKey) -> list[CachedSequence]:
        """All sequences of a space, most recently used first."""
        return [sequence for sequence in reversed(self._sequences.values()) if sequence.space == space]

    def by_recency(self) -> list[CachedSequence]:
        """All sequences, most recently used first."""
        return list(reversed(self._sequences.values()))

    def settle(self, sequence_id: int) -> None:
        """Forgets what is superfluous in a session after one of its sequences became more exact.

        Idle sequences that this one continues now go; or it goes itself, if an idle one that holds all of it is there.
        """
        sequence = self._sequences[sequence_id]
        others = [other for other in self.session(sequence.space, sequence.session) if other is not sequence]
        for other in others:
            if sequence.pins == 0 and _continues(other, sequence):
                if sequence.last_used > other.last_used:
                    self.touch(other.id)
                self.remove(sequence.id)
                return
        for other in others:
            if other.pins == 0 and _continues(sequence, other):
                self.remove(other.id)

    def spaces(self, namespace: str) -> list[SpaceKey]:
        """The spaces of a namespace in which something is cached."""
        return [space for space in {sequence.space for sequence in self._sequences.values()} if space[0] == namespace]

    def session(self, space: SpaceKey, session: str | None) -> list[CachedSequence]:
        """All sequences of a session, its branches, most recently used first."""
        return [sequence for sequence in self.candidates(space) if sequence.session == session]

    def touch(self, sequence_id: int) -> None:
        """Makes a sequence the most recently used."""
        sequence = self._sequences.pop(sequence_id)
        self._tick += 1
        sequence.last_used = self._tick
        self._sequences[sequence_id] = sequence

    def pin(self, sequence_id: int) -> None:
        """Keeps a sequence while a request reads it, which is a use of it; pins are counted."""
        self._sequences[sequence_id].pins += 1
        self.touch(sequence_id)

    def unpin(self, sequence_id: int) -> None:
        """Takes one pin away."""
        sequence = self._sequences[sequence_id]
        assert sequence.pins > 0
        sequence.pins -= 1

    def remove(self, sequence_id: int) -> int:
        """Forgets an idle sequence; returns how many pages became free (shared ones stay with their other owners)."""
        assert self._sequences[sequence_id].pins == 0
        return self._pool.release(self._sequences.pop(sequence_id).table.pages)

    def forget_session(self, space: SpaceKey, session: str | None) -> int:
        """Forgets the idle sequences of a session; returns how many pages became free."""
        return sum(self.remove(sequence.id) for sequence in self.session(space, session) if sequence.pins == 0)

    def evict(self, num_pages_wanted: int) -> int:
        """Forgets idle sequences until the pool has `num_pages_wanted` free pages.

        Least recently used ones go first, and before all others those beyond the `KEPT_BRANCHES` latest of their
        session. If forgetting all were not enough, nothing is forgotten: a request that cannot fit costs no cache.

        Returns:
            How many pages became free; the caller looks at the pool to see whether they are enough.
        """
        idle = self._by_worth()
        missing = num_pages_wanted - self._pool.num_free
        if missing <= 0 or self._reclaimable_pages(idle) < missing:
            return 0
        freed = 0
        for sequence in idle:
            freed += self.remove(sequence.id)
            self._evicted += 1
            if freed >= missing:
                break
        return freed

    def stats(self) -> IndexStats:
        """What the index holds; safe from any thread."""
        sequences = list(self._sequences.values())
        return IndexStats(
            sequences=len(sequences),
            tokens=sum(len(sequence) for sequence in sequences),
            tainted_tokens=sum(len(sequence) - sequence.exact_tokens for sequence in sequences),
            evicted_sequences=self._evicted,
        )

    def _by_worth(self) -> list[CachedSequence]:
        """The idle sequences, those to forget first at the front."""
        later = Counter[tuple[SpaceKey, str | None]]()
        surplus: list[CachedSequence] = []
        kept: list[CachedSequence] = []
        for sequence in reversed(self._sequences.values()):
            branch_of = (sequence.space, sequence.session)
            if sequence.pins == 0:
                (kept if later[branch_of] < KEPT_BRANCHES else surplus).append(sequence)
            later[branch_of] += 1
        return surplus[::-1] + kept[::-1]

    def _reclaimable_pages(self, idle: list[CachedSequence]) -> int:
        """Pages that become free if these are forgotten."""
        if not idle:
            return 0
        pages = np.concatenate([np.asarray(sequence.table.pages, dtype=np.int64) for sequence in idle])
        owned, counts = np.unique(pages, return_counts=True)
        return int((self._pool.references(owned) == counts).sum())


def _continues(longer: CachedSequence, shorter: CachedSequence) -> bool:
    """Whether `longer` holds all that `shorter` does: its tokens at its positions, as exact and no staler."""
    num_tokens = len(shorter)
    return (
        num_tokens <= len(longer)
        and shorter.exact_tokens <= longer.exact_tokens
        and shorter.token_ids[-1] == longer.token_ids[num_tokens - 1]
        and np.array_equal(shorter.token_ids, longer.token_ids[:num_tokens])
        and np.array_equal(shorter.positions, longer.positions[:num_tokens])
        and longer.staleness[:num_tokens].sum() <= shorter.staleness.sum()
    )
