"""Where reused K and V come to lie: every reused token against its source, and no page lost or overwritten."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine.config import PAGE_TOKENS
from cacheslide_agents.engine.model.spec import ModelSpec, RopeSpec
from cacheslide_agents.engine.position.rope import rotate_keys
from cacheslide_agents.engine.reuse.index import CachedSequence, CacheIndex, SpaceKey
from cacheslide_agents.engine.reuse.rules import ByStaleness
from cacheslide_agents.engine.reuse.spans import Plan, Span
from cacheslide_agents.engine.slide import assembly as assembly_module
from cacheslide_agents.engine.slide.assembly import Assembly
from cacheslide_agents.engine.slide.block_table import BlockTable, slot_gaps
from cacheslide_agents.engine.slide.pages import PagePool
from cacheslide_agents.engine.slide.queries import StoredQueries
from cacheslide_agents.engine.slide.slots import Slots

ROPE = RopeSpec(torch.tensor([1.0, 0.1]), rotary_dim=4)
SPEC = ModelSpec("llama", 6, 8, 2, 1, 4, 32, 2048, (None,) * 6, ROPE, 0.5)
CPU = torch.device("cpu")
SPACE = SpaceKey("default", None)


class Cache:
    """A pool of random K, V and queries with cached sequences in scattered pages."""

    def __init__(self, num_pages: int = 64, seed: int = 0) -> None:
        self.pool = PagePool(SPEC, num_pages, torch.float32, "cpu")
        random, num_slots = torch.Generator().manual_seed(seed), num_pages * PAGE_TOKENS
        self.pool.kv.copy_(torch.randn(self.pool.kv.shape, generator=random))
        self.queries = StoredQueries(SPEC, num_slots, torch.float32, CPU)
        (self.probe,) = self.queries.layers
        asked, lse = (torch.randn(num_slots, 2, *rest, generator=random) for rest in ((4,), ()))
        self.queries.write(self.probe, Slots(np.arange(num_slots), CPU), asked, lse)
        self.index = CacheIndex(self.pool)
        self.rng = np.random.default_rng(seed)

    def sequence(
        self, num_tokens: int, *, apart: bool = False, session: str = "s", positions: np.ndarray | None = None
    ) -> CachedSequence:
        positions = np.arange(num_tokens) if positions is None else positions
        pages: list[int] = []
        holes: list[int] = []
        for _ in range(-(-(num_tokens + 15 * (np.diff(positions) > 1).sum()) // PAGE_TOKENS)):
            pages += self.pool.allocate(1, pages[-1] if pages else None)
            if apart:
                holes += self.pool.allocate(1, pages[-1])
        self.pool.release(holes)
        return self.index.add(
            SPACE,
            session,
            token_ids=self.rng.integers(0, 1_000, num_tokens),
            positions=positions,
            exact_tokens=num_tokens,
            hops=np.zeros(num_tokens, dtype=np.uint8),
            query_positions=np.arange(num_tokens) + self.rng.integers(0, 100, num_tokens),
            staleness=self.rng.random(num_tokens, dtype=np.float32),
            table=BlockTable(pages, slot_gaps(positions)),
        )

    def assembled(self, plan: Plan, sequences: dict[int, CachedSequence]) -> Assembly:
        return Assembly(plan, sequences, self.pool, self.queries, ROPE, plan.num_tokens, self.pool.allocate)

    def kv_of(self, table: BlockTable, start: int, stop: int) -> torch.Tensor:
        """(layers, tokens, 2 * kv_heads, head_dim), a copy."""
        return self.pool.kv[:, torch.from_numpy(table.slots(np.arange(start, stop)))].clone()

    def queries_of(self, table: BlockTable, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tokens, heads, head_dim) and (tokens, heads), copies."""
        return self.queries.read(self.probe, torch.from_numpy(table.slots(np.arange(start, stop))))


def check_reused(cache: Cache, plan: Plan, sequences: dict[int, CachedSequence]) -> Assembly:
    """Carries the plan out and compares every reused token with its source, turned by one more rotation."""
    expected = []
    sources = {key: cache.kv_of(sequence.table, 0, len(sequence)) for key, sequence in sequences.items()}
    asked = {key: cache.queries_of(sequence.table, 0, len(sequence)) for key, sequence in sequences.items()}
    for span in plan.spans:
        if span.source is not None and span.source_start is not None:
            source = slice(span.source_start, span.source_start + len(span))
            kv = sources[span.source][:, source].clone()
            deltas = torch.from_numpy(plan.positions[span.start : span.stop] - sequences[span.source].positions[source])
            kv[:, :, :1] = rotate_keys(kv[:, :, :1], deltas, ROPE)
            expected.append((span, kv))
    assembly = cache.assembled(plan, sequences)
    for layer_idx in range(SPEC.num_layers):
        assembly.slide(layer_idx)
    for span, kv in expected:
        torch.testing.assert_close(cache.kv_of(assembly.table, span.start, span.stop), kv, msg=f"{span} of {plan}")
        assert span.source is not None and span.source_start is not None
        donor, source = sequences[span.source], slice(span.source_start, span.source_start + len(span))
        for moved, stored in zip(cache.queries_of(assembly.table, span.start, span.stop), asked[donor.id], strict=True):
            assert torch.equal(moved, stored[source]), f"{span} asks what its source asked, unturned"
        carried = slice(span.start, span.stop)
        np.testing.assert_array_equal(assembly.query_positions[carried], donor.query_positions[source])
        owed = np.ones(len(span)) if span.after_change and plan.correction is None else donor.staleness[source]
        np.testing.assert_array_equal(assembly.staleness[carried], owed)
    for key, sequence in sequences.items():
        torch.testing.assert_close(cache.kv_of(sequence.table, 0, len(sequence)), sources[key], rtol=0, atol=0)
        assert all(map(torch.equal, cache.queries_of(sequence.table, 0, len(sequence)), asked[key]))
    fresh = plan.fresh_tokens()
    np.testing.assert_array_equal(assembly.query_positions[fresh], plan.positions[fresh])
    assert not assembly.staleness[fresh].any()
    return assembly


@pytest.mark.parametrize("source_start", [0, 4, 7, 20])
def test_a_slid_span_is_moved_when_it_begins_in_a_page_shared_for_appending(source_start: int) -> None:
    cache = Cache()
    exact, donor = cache.sequence(20), cache.sequence(100, apart=True)
    plan = Plan(
        spans=(
            Span(0, 20, "exact", exact.id, 0),
            Span(20, 70, "slid", donor.id, source_start, source_start != 20),
            Span(70, 71, "fresh"),
        ),
        positions=np.arange(71),
    )
    assembly = check_reused(cache, plan, {exact.id: exact, donor.id: donor})
    assert assembly.table.pages[1] == exact.table.pages[1], "the partly filled page is written on"


def reserved(system: int, update: int, suffix: int, range_tokens: int) -> np.ndarray:
    """Positions of system, update and suffix where a range is reserved for the update."""
    start = system + max(update, range_tokens)
    return np.concatenate([np.arange(system + update), np.arange(start, start + suffix)])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(0, 60), st.integers(0, 60), st.integers(1, 90), st.integers(0, 15))
def test_suffix_pages_are_shared_when_an_update_varies_in_its_reserved_range(
    system: int, old: int, new: int, suffix: int, corrected: int
) -> None:
    cache = Cache(128)
    donor = cache.sequence(system + old + suffix, positions=reserved(system, old, suffix, 60))
    first = system + new
    spans = [Span(0, system, "exact", donor.id, 0)] if system else []
    spans += [Span(system, first, "fresh")] if new else []
    spans += [Span(first, first + suffix, "slid", donor.id, system + old, True)]
    spans += [Span(first + suffix, first + suffix + 1, "fresh")]
    positions = reserved(system, new, suffix + 1, 60)
    before = cache.pool.num_free
    assembly = check_reused(cache, Plan(tuple(spans), positions), {donor.id: donor})
    assert not assembly.hops.any(), "nothing was rotated"
    # By another way: position p lies at p modulo a page, so each whole page of the suffix serves as it is.
    start, stop = system + 60, system + 60 + suffix
    whole = stop // 16 - -(-start // 16)
    assert len(set(assembly.table.pages) & set(donor.table.pages)) >= max(0, whole)
    writable = assembly.correct(np.arange(first, first + min(corrected, suffix)))
    assert len(writable) == min(corrected, suffix)
    cache.pool.release(assembly.table.pages)
    assert cache.pool.num_free == before


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, bool, list[int], list[tuple[str, int, int, int]]]:
    """Seed, whether pages lie apart, lengths of the sequences, spans as (treatment, source, source start, length)."""
    lengths = [draw(st.integers(1, 80)) for _ in range(2)]
    spans: list[tuple[str, int, int, int]] = []
    if draw(st.booleans()):
        spans.append(("exact", 0, 0, draw(st.integers(1, lengths[0]) | st.just(lengths[0]))))
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            spans.append(("fresh", 0, 0, draw(st.integers(1, 40))))
        else:
            start = draw(st.integers(0, lengths[1] - 1))
            spans.append(("slid", 1, start, draw(st.integers(1, lengths[1] - start))))
    spans.append(("fresh", 0, 0, 1))
    return draw(st.integers(0, 99)), draw(st.booleans()), lengths, spans


@settings(deadline=None, max_examples=60)
@given(plans())
def test_every_reused_token_is_its_source_turned_when_spans_are_mixed(
    drawn: tuple[int, bool, list[int], list[tuple[str, int, int, int]]],
) -> None:
    seed, apart, (first, second), pieces = drawn
    cache = Cache(seed=seed)
    sequences = [cache.sequence(first), cache.sequence(second, apart=apart)]
    by_id = {sequence.id: sequence for sequence in sequences}
    spans, stop = [], 0
    leaps = np.random.default_rng(seed)
    steps: list[int] = []
    for treatment, source, source_start, length in pieces:
        # A leap in the positions before some spans, as reserved ranges leave; an exact span has its source's.
        steps += [1 + int(leaps.integers(0, 40) * leaps.integers(0, 2) * (treatment != "exact")), *[1] * (length - 1)]
        if treatment == "fresh":
            spans.append(Span(stop, stop + length, "fresh"))
        elif treatment == "exact":
            spans.append(Span(stop, stop + length, "exact", sequences[source].id, 0))
        else:
            spans.append(Span(stop, stop + length, "slid", sequences[source].id, source_start, True))
        stop += length
    before = cache.pool.num_free
    assembly = check_reused(cache, Plan(tuple(spans), np.cumsum(steps) - 1), by_id)
    cache.pool.release(assembly.table.pages)
    assert cache.pool.num_free == before, "every page comes back"


def test_no_page_is_kept_when_the_turn_of_the_keys_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    donor = cache.sequence(64)
    before, owners = cache.pool.num_free, cache.pool.references(donor.table.pages).tolist()

    def fail(*_: object) -> None:
        raise MemoryError("no room on the device")

    monkeypatch.setattr(assembly_module, "turn_by", fail)
    plan = Plan(
        (Span(0, 32, "exact", donor.id, 0), Span(32, 40, "slid", donor.id, 50, True), Span(40, 41, "fresh")),
        np.arange(41),
    )
    with pytest.raises(MemoryError):
        cache.assembled(plan, {donor.id: donor})
    assert cache.pool.num_free == before
    assert cache.pool.references(donor.table.pages).tolist() == owners


def in_place(donor: CachedSequence) -> Plan:
    """The donor's 64 tokens, the second page edited; the last two pages slide in place and are shared."""
    return Plan(
        (
            Span(0, 16, "exact", donor.id, 0),
            Span(16, 32, "fresh"),
            Span(32, 64, "slid", donor.id, 32, True),
            Span(64, 65, "fresh"),
        ),
        np.arange(65),
        correction=ByStaleness(0.0, 1.0),
    )


def test_a_shared_page_is_copied_when_a_token_in_it_is_corrected() -> None:
    cache = Cache()
    donor = cache.sequence(64)
    before, free = cache.kv_of(donor.table, 0, 64), cache.pool.num_free
    asked = cache.queries_of(donor.table, 0, 64)
    assembly = check_reused(cache, in_place(donor), {donor.id: donor})
    assert assembly.table.pages[2:4] == donor.table.pages[2:4]
    corrected = assembly.correct(np.array([40, 41]))
    assert corrected.tolist() == [40, 41]
    assert assembly.table.pages[2] != donor.table.pages[2] and assembly.table.pages[3] == donor.table.pages[3]
    torch.testing.assert_close(cache.kv_of(assembly.table, 32, 64), before[:, 32:], rtol=0, atol=0)
    assert all(map(torch.equal, cache.queries_of(assembly.table, 32, 64), (part[32:] for part in asked)))
    own = torch.from_numpy(assembly.table.slots(np.arange(32, 48)))
    cache.pool.kv[:, own] = 7.0
    cache.queries.write(cache.probe, Slots(own.numpy(), CPU), torch.ones(16, 2, 4), torch.ones(16, 2))
    torch.testing.assert_close(cache.kv_of(donor.table, 0, 64), before, rtol=0, atol=0)
    assert all(map(torch.equal, cache.queries_of(donor.table, 0, 64), asked))
    for values, owed in ((assembly.hops, 0), (assembly.staleness, 0), (assembly.query_positions, corrected)):
        assert (values[corrected] == owed).all()
    assert (assembly.staleness[42:64] == donor.staleness[42:64]).all()
    cache.pool.release(assembly.table.pages)
    assert cache.pool.num_free == free and (cache.pool.references(donor.table.pages) == 1).all()


def test_a_page_is_written_where_it_lies_when_nobody_else_reads_it() -> None:
    cache = Cache()
    donor = cache.sequence(64)
    plan = Plan((Span(0, 40, "slid", donor.id, 9, True), Span(40, 41, "fresh")), np.arange(41))
    assembly = check_reused(cache, plan, {donor.id: donor})
    pages = list(assembly.table.pages)
    assert assembly.correct(np.array([0, 39])).tolist() == [0, 39]
    assert assembly.table.pages == pages


def test_tokens_stay_as_they_are_when_the_pool_is_too_full_to_copy_their_page() -> None:
    cache = Cache()
    donor = cache.sequence(64)
    assembly = check_reused(cache, in_place(donor), {donor.id: donor})
    held = cache.pool.allocate(cache.pool.num_free - 1)
    assert assembly.correct(np.array([33, 34, 50])).tolist() == [33, 34]
    assert assembly.table.pages[3] == donor.table.pages[3]
    assert assembly.staleness[50] == donor.staleness[50] > 0
    cache.pool.release(held)
