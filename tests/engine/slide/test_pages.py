from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheslide_agents.engine.config import PAGE_TOKENS, EngineConfig
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.model.spec import ModelSpec, RopeSpec
from cacheslide_agents.engine.slide import pages as pages_module
from cacheslide_agents.engine.slide.block_table import BlockTable
from cacheslide_agents.engine.slide.pages import MAX_POOL_CONTEXTS, PagePool, PoolFullError, pool_pages
from tests.reference.naive_pages import NaivePages


def tiny_spec(context_tokens: int = 512) -> ModelSpec:
    return ModelSpec(
        model_type="llama",
        num_layers=2,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=32,
        context_tokens=context_tokens,
        windows=(None, None),
        rope=RopeSpec(torch.ones(2), rotary_dim=4),
        attention_scale=0.5,
    )


def tiny_pool(num_pages: int) -> PagePool:
    return PagePool(tiny_spec(), num_pages, torch.float32, "cpu")


class PoolMachine(RuleBasedStateMachine):
    """Tables allocate, grow, share, write and go away; the pool must agree with the naive model after each step."""

    num_pages = 24

    def __init__(self) -> None:
        super().__init__()
        self.pool = tiny_pool(self.num_pages)
        self.model = NaivePages(self.num_pages)
        self.tables: list[BlockTable] = []

    @rule(num_pages=st.integers(0, 10))
    def allocate(self, num_pages: int) -> None:
        longest = self.model.longest_free_run()
        table = BlockTable(self.taken(num_pages, None))
        if num_pages <= longest and table.pages:
            assert len(table.runs(0, table.capacity_tokens)) == 1
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0), num_pages=st.integers(1, 3))
    def grow(self, choice: int, num_pages: int) -> None:
        table = self.tables[choice % len(self.tables)]
        last = table.pages[-1] if table.pages else None
        behind = set(range(last + 1, last + 1 + num_pages)) if last is not None else set()
        fits = bool(behind) and behind <= self.model.free()
        pages = self.taken(num_pages, last)
        assert not fits or set(pages) == behind
        table.pages += pages

    def taken(self, num_pages: int, after: int | None) -> list[int]:
        num_free = len(self.model.free())
        if num_pages > num_free:
            with pytest.raises(PoolFullError) as error:
                self.pool.allocate(num_pages, after)
            assert (error.value.wanted_pages, error.value.free_pages) == (num_pages, num_free)
            return []
        pages = self.pool.allocate(num_pages, after)
        assert len(pages) == num_pages
        self.model.take(pages)
        return pages

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0), num_pages=st.integers(0, 10))
    def share(self, choice: int, num_pages: int) -> None:
        pages = self.tables[choice % len(self.tables)].pages[:num_pages]
        self.pool.retain(pages)
        self.model.add(pages, 1)
        self.tables.append(BlockTable(pages))

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0))
    def release(self, choice: int) -> None:
        pages = self.tables.pop(choice % len(self.tables)).pages
        num_free = len(self.model.free())
        self.model.add(pages, -1)
        assert self.pool.release(pages) == len(self.model.free()) - num_free

    @invariant()
    def agrees_with_the_naive_model(self) -> None:
        assert self.pool.num_free == len(self.model.free())
        assert self.pool.references(range(self.num_pages)).tolist() == list(self.model.references.values())
        free_runs = self.pool._free.runs()
        assert {page for start, stop in free_runs for page in range(start, stop)} == self.model.free()
        assert all(before[1] < run[0] for before, run in pairwise(free_runs))


TestPoolAgainstNaiveModel = PoolMachine.TestCase
TestPoolAgainstNaiveModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_kv_has_keys_then_values_of_every_slot_when_made() -> None:
    pool = tiny_pool(3)
    assert pool.kv.shape == (2, 3 * PAGE_TOKENS, 2, 4)
    assert pool.layer(1).data_ptr() == pool.kv[1].data_ptr()
    assert pool.num_pages == pool.num_free == 3


def test_releasing_is_refused_when_a_page_is_free() -> None:
    pool = tiny_pool(2)
    with pytest.raises(AssertionError, match="released"):
        pool.release([0])
    with pytest.raises(AssertionError, match="retained"):
        pool.retain([1])


class TestPoolPages:
    def size(self, config: EngineConfig, context_tokens: int = 512) -> int:
        return pool_pages(config, tiny_spec(context_tokens), torch.float32, "cpu")

    def test_tokens_are_rounded_up_when_set(self) -> None:
        assert self.size(EngineConfig(pool_tokens=100)) == 7

    def test_share_of_free_memory_is_taken_when_tokens_are_not_set(self, monkeypatch: pytest.MonkeyPatch) -> None:
        page_bytes = PAGE_TOKENS * tiny_spec().kv_bytes_per_token(torch.float32)
        monkeypatch.setattr(pages_module, "free_host_bytes", lambda: 40 * page_bytes + 3)
        assert self.size(EngineConfig(pool_share=0.5)) == 20

    def test_the_most_is_some_full_contexts_when_memory_is_plenty(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pages_module, "free_host_bytes", lambda: 2**50)
        assert self.size(EngineConfig()) == MAX_POOL_CONTEXTS * 32
        assert self.size(EngineConfig(max_context_tokens=100)) == MAX_POOL_CONTEXTS * 7

    def test_the_error_names_the_numbers_when_no_page_fits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pages_module, "free_host_bytes", lambda: 100)
        with pytest.raises(ConfigError, match=r"pool_share = 0\.25 of 0 MiB.*set pool_tokens"):
            self.size(EngineConfig())
