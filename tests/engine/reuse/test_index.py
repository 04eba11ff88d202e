from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheslide_agents.engine.config import PAGE_TOKENS
from cacheslide_agents.engine.model.spec import ModelSpec, RopeSpec
from cacheslide_agents.engine.reuse.index import KEPT_BRANCHES, CachedSequence, CacheIndex, SpaceKey
from cacheslide_agents.engine.slide.block_table import BlockTable
from cacheslide_agents.engine.slide.pages import PagePool
from tests.reference.naive_pages import evicted_ids

SPACE = SpaceKey("default", None)


def tiny_pool(num_pages: int) -> PagePool:
    rope = RopeSpec(torch.ones(1), rotary_dim=2)
    return PagePool(ModelSpec("llama", 1, 2, 1, 1, 2, 8, 64, (None,), rope, 1.0), num_pages, torch.float32, "cpu")


class Shelf:
    """An index over a pool of its own, and short ways to fill it."""

    def __init__(self, num_pages: int = 64) -> None:
        self.pool = tiny_pool(num_pages)
        self.index = CacheIndex(self.pool)

    def add(
        self,
        tokens: Sequence[int] | np.ndarray,
        session: str | None = "a",
        exact: int | None = None,
        space: SpaceKey = SPACE,
        pages: list[int] | None = None,
        staleness: float = 0.0,
    ) -> CachedSequence:
        count = len(tokens)
        return self.index.add(
            space,
            session,
            token_ids=np.asarray(tokens),
            positions=np.arange(count),
            exact_tokens=count if exact is None else exact,
            hops=np.zeros(count, dtype=np.uint8),
            query_positions=np.arange(count),
            staleness=np.where(np.arange(count) < (count if exact is None else exact), 0.0, staleness),
            table=BlockTable(self.pool.allocate(-(-count // PAGE_TOKENS)) if pages is None else pages),
        )

    def ids(self) -> list[int]:
        return [sequence.id for sequence in self.index.candidates(SPACE)]


def test_a_conversation_is_one_sequence_when_it_only_grows() -> None:
    shelf = Shelf()
    shelf.add(range(20))
    shelf.add(range(50))
    last = shelf.add(range(90))
    assert shelf.ids() == [last.id]
    assert shelf.pool.num_free == 64 - 6


def test_branches_stay_when_a_reply_is_generated_again() -> None:
    shelf = Shelf()
    first = shelf.add([*range(20), 7, 7])
    second = shelf.add([*range(20), 8, 8, 8])
    assert shelf.ids() == [second.id, first.id]
    assert shelf.index.session(SPACE, "a") == [second, first]


def test_the_exact_prefix_stays_when_the_longer_sequence_is_tainted() -> None:
    shelf = Shelf()
    exact = shelf.add(range(20))
    tainted = shelf.add(range(50), exact=10)
    assert shelf.ids() == [tainted.id, exact.id]
    repaired = shelf.add(range(50))
    assert shelf.ids() == [repaired.id]


def test_nothing_new_is_kept_when_a_cached_sequence_holds_it_all() -> None:
    shelf = Shelf()
    long = shelf.add(range(50))
    other = shelf.add(range(9), session="b")
    assert shelf.add(range(30)) is long
    assert shelf.ids() == [long.id, other.id]
    assert shelf.pool.num_free == 64 - 5


def test_the_less_stale_sequence_stays_when_the_same_prompt_is_asked_again() -> None:
    shelf = Shelf()
    shelf.add(range(50), exact=10, staleness=0.2)
    fresher = shelf.add(range(50), exact=10, staleness=0.1)
    assert shelf.ids() == [fresher.id]
    assert fresher.staleness.max() == np.float32(0.1)
    assert shelf.add(range(50), exact=10, staleness=0.3) is fresher
    assert shelf.add(range(50), exact=10, staleness=0.1) is fresher
    assert shelf.ids() == [fresher.id]
    assert shelf.pool.num_free == 64 - 4


def test_both_stay_when_the_longer_sequence_is_staler() -> None:
    shelf = Shelf()
    longer = shelf.add(range(90), exact=10, staleness=0.2)
    fresher = shelf.add(range(50), exact=10, staleness=0.1)
    assert shelf.ids() == [fresher.id, longer.id]


def test_sessions_and_spaces_are_apart_when_tokens_are_the_same() -> None:
    shelf = Shelf()
    chat = SpaceKey("default", "chatml")
    tenant = SpaceKey("tenant", None)
    sequences = [shelf.add(range(30), session=session) for session in ("a", "b", None)]
    shelf.add(range(30), space=chat)
    shelf.add(range(30), space=tenant)
    assert shelf.index.candidates(SPACE) == sequences[::-1]
    assert shelf.index.session(SPACE, None) == [sequences[2]]
    assert set(shelf.index.spaces("default")) == {SPACE, chat}
    assert shelf.index.stats().sequences == 5


def test_surplus_pages_are_released_when_the_answer_was_shorter_than_its_room() -> None:
    shelf = Shelf()
    sequence = shelf.add(range(17), pages=shelf.pool.allocate(10))
    assert len(sequence.table.pages) == 2
    assert shelf.pool.num_free == 62


def test_a_pinned_sequence_stays_when_it_is_continued_evicted_or_forgotten() -> None:
    shelf = Shelf()
    read = shelf.add(range(20))
    shelf.index.pin(read.id)
    longer = shelf.add(range(40))
    assert shelf.ids() == [longer.id, read.id]
    assert shelf.index.evict(64) == 0
    assert shelf.index.forget_session(SPACE, "a") == 3
    assert shelf.ids() == [read.id]
    with pytest.raises(AssertionError):
        shelf.index.remove(read.id)
    shelf.index.unpin(read.id)
    assert shelf.index.evict(64) == 2
    assert shelf.pool.num_free == 64


def test_nothing_is_evicted_when_it_would_not_be_enough() -> None:
    shelf = Shelf(num_pages=8)
    cached = shelf.add(range(60))
    held = shelf.pool.allocate(1)
    assert shelf.index.evict(8) == 0
    assert shelf.ids() == [cached.id]
    shelf.pool.release(held)
    assert shelf.index.evict(8) == 4


def test_a_shared_page_is_freed_when_its_last_owner_goes() -> None:
    shelf = Shelf(num_pages=4)
    first = shelf.add(range(32))
    shelf.pool.retain(first.table.pages[:1])
    shelf.add([*range(16), *range(100, 120)], pages=[first.table.pages[0], *shelf.pool.allocate(2)])
    assert shelf.index.evict(1) == 1
    assert shelf.index.evict(4) == 3


def test_arrays_are_the_indexs_own_when_the_caller_goes_on_writing() -> None:
    shelf = Shelf()
    tokens = np.arange(20)
    sequence = shelf.add(tokens)
    tokens[:] = 0
    assert sequence.token_ids.tolist() == list(range(20))
    assert sequence.token_ids.dtype == sequence.positions.dtype == np.dtype(np.int64)
    assert sequence.hops.dtype == np.dtype(np.uint8)
    assert sequence.query_positions.dtype == np.dtype(np.int64)
    assert sequence.staleness.dtype == np.dtype(np.float32)
    assert shelf.index.get(sequence.id) is sequence


def test_other_sessions_stay_when_one_leaves_many_branches() -> None:
    shelf = Shelf(num_pages=KEPT_BRANCHES + 4)
    quiet = shelf.add(range(16), session="quiet")
    branches = [shelf.add(range(100 * number, 100 * number + 16), session="busy") for number in range(1, 12)]
    assert shelf.pool.num_free == 0
    assert shelf.index.evict(3) == 3
    assert shelf.ids() == [each.id for each in reversed([quiet, *branches[3:]])]
    assert shelf.index.evict(4) == 1, "then the least recently used of all"
    assert shelf.ids() == [each.id for each in reversed(branches[3:])]


class IndexMachine(RuleBasedStateMachine):
    """Requests share, cache, touch, pin and want pages; a plain list in order of use says who must go."""

    num_pages = 20

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(self.num_pages)
        self.order: list[CachedSequence] = []  # least recently used first
        self.next_token = 0

    @rule(pages=st.integers(1, 6), donor=st.integers(0), shared=st.integers(0, 4), session=st.sampled_from("ab"))
    def serve(self, pages: int, donor: int, shared: int, session: str) -> None:
        pool = self.shelf.pool
        head: list[int] = []
        if self.order:
            head = self.order[donor % len(self.order)].table.pages[:shared]
            pool.retain(head)
        if pool.num_free < pages:
            self.evict(pages)
        if pool.num_free < pages:
            pool.release(head)
            return
        table = [*head, *pool.allocate(pages)]
        tokens = np.arange(self.next_token, self.next_token + len(table) * PAGE_TOKENS)
        self.next_token += len(tokens)
        self.order.append(self.shelf.add(tokens, session=session, pages=table))

    def evict(self, wanted: int) -> None:
        pool = self.shelf.pool
        branches = {session: [each for each in self.order if each.session == session] for session in "ab"}
        latest = [each for each in self.order if each in branches[each.session or ""][-KEPT_BRANCHES:]]
        surplus = [each for each in self.order if each not in latest]
        idle = [sequence for sequence in surplus + latest if sequence.pins == 0]
        references = dict(enumerate(pool.references(range(self.num_pages)).tolist()))
        expected = evicted_ids([(each.id, each.table.pages) for each in idle], references, pool.num_free, wanted)
        num_free = pool.num_free
        assert self.shelf.index.evict(wanted) == pool.num_free - num_free
        gone = {sequence.id for sequence in self.order} - set(self.shelf.ids())
        assert gone == set(expected)
        self.order = [sequence for sequence in self.order if sequence.id not in gone]

    @rule(wanted=st.integers(0, 22))
    def want(self, wanted: int) -> None:
        self.evict(wanted)

    @precondition(lambda self: self.order)
    @rule(choice=st.integers(0))
    def touch(self, choice: int) -> None:
        sequence = self.order.pop(choice % len(self.order))
        self.order.append(sequence)
        self.shelf.index.touch(sequence.id)

    @precondition(lambda self: self.order)
    @rule(choice=st.integers(0))
    def pin(self, choice: int) -> None:
        sequence = self.order.pop(choice % len(self.order))
        self.order.append(sequence)
        self.shelf.index.pin(sequence.id)

    @precondition(lambda self: any(sequence.pins for sequence in self.order))
    @rule(choice=st.integers(0))
    def unpin(self, choice: int) -> None:
        pinned = [sequence for sequence in self.order if sequence.pins]
        self.shelf.index.unpin(pinned[choice % len(pinned)].id)

    @rule(session=st.sampled_from("ab"))
    def forget(self, session: str) -> None:
        self.shelf.index.forget_session(SPACE, session)
        self.order = [sequence for sequence in self.order if sequence.session != session or sequence.pins]

    @invariant()
    def agrees_with_the_naive_model(self) -> None:
        assert self.shelf.ids() == [sequence.id for sequence in reversed(self.order)]
        used = [sequence.last_used for sequence in self.order]
        assert used == sorted(used)
        owned = np.zeros(self.num_pages, dtype=np.int64)
        for sequence in self.order:
            owned[sequence.table.pages] += 1
        assert self.shelf.pool.references(range(self.num_pages)).tolist() == owned.tolist()
        stats = self.shelf.index.stats()
        assert stats.sequences == len(self.order)
        assert stats.tokens == sum(len(sequence) for sequence in self.order)


TestIndexAgainstNaiveModel = IndexMachine.TestCase
TestIndexAgainstNaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
