"""Repair: a repaired sequence is a full prefill's, and a stopped step leaves nothing behind."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.reuse.index import CachedSequence
from cacheslide_agents.engine.run import repair as repair_module
from cacheslide_agents.engine.run.scheduler import InterruptedStepError
from tests.engine.turns import (
    FEW,
    HISTORY,
    NEW,
    OLD,
    SYSTEM,
    first_turn,
    latest,
    second_turn,
    sequences,
    staleness_of,
    tiny_engine,
    two_turns,
)
from tests.reference.dense_pass import DensePass
from tests.reference.session_check import WatchedEngine
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

LONG_SECONDS = 60.0


def kv_of(engine: Engine, sequence: CachedSequence) -> torch.Tensor:
    pool: Any = engine._runner.preparation.pool
    kv: torch.Tensor = pool.kv[:, torch.from_numpy(sequence.table.slots(np.arange(len(sequence))))]
    return kv


def step(engine: Engine, layers: int | None = None) -> bool:
    """One step on the engine's thread, stopped after some layers if given."""
    left = iter(range(10**6 if layers is None else layers))

    def check() -> None:
        if next(left, None) is None:
            raise InterruptedStepError

    return engine._scheduler.call(lambda: engine._runner.idle_work.repair.step(check))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_module, "STEP_TOKENS", 32)


@pytest.mark.parametrize("family", [*FAMILIES, "mistral+24"])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_sequence_is_a_full_prefills_when_its_repair_has_finished(family: str, share: float) -> None:
    name, _, window = family.partition("+")
    model = tiny_model(name, **({"sliding_window": int(window)} if window else {}))
    config = EngineConfig(pool_tokens=8192, dtype="float32", correction_share=share, repair=True)
    with Engine.from_model(model, tiny_tokenizer(None), config) as engine:
        engine.generate(first_turn(), FEW, session="s")
        before = engine.generate(second_turn(), FEW, session="s").receipt
        assert before.slid_tokens > 200 and not before.is_exact
        assert engine.wait_until_repaired(LONG_SECONDS)
        sequence, stats = latest(engine), engine.stats()
        assert len(sequence) == before.prompt_tokens + 7, "generated tokens are repaired too"
        assert sequence.exact_tokens == len(sequence)
        dense = DensePass(engine._runner._decoder, sequence.token_ids, sequence.positions)
        torch.testing.assert_close(kv_of(engine, sequence), dense.kv, rtol=1e-5, atol=1e-5)
        assert stats.exact_cached_tokens == stats.cached_tokens
        first_slid = next(start for start, _, kind in before.treatments if kind in ("slid", "corrected"))
        assert stats.repaired_tokens == len(sequence) - first_slid
        assert stats.repair_seconds > 0.0
        after = engine.generate(second_turn(), FEW, session="other").receipt
        assert after.exact_tokens == before.prompt_tokens - 1 and after.is_exact, "`prefix` may read all of it"


def test_the_next_turn_owes_nothing_of_earlier_ones_when_they_were_repaired() -> None:
    owed = []
    for repaired in (False, True):
        with tiny_engine(correction_share=0.022, repair=repaired) as engine:
            for update in (OLD, NEW, "memory: 7 cats at 9.\n"):
                if repaired:
                    assert engine.wait_until_repaired(LONG_SECONDS)
                prompt = Prompt([Segment.system(SYSTEM), Segment.update(update), Segment.suffix(HISTORY)])
                receipt = engine.generate(prompt, FEW, session="s").receipt
            owed.append(staleness_of(receipt))
    assert 0.0 < owed[1] < owed[0]


def test_the_stalest_tokens_come_first_when_a_sequence_takes_many_steps() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        sequence = two_turns(engine)
        staleness, exact = sequence.staleness.copy(), sequence.exact_tokens
        owing = int((staleness >= repair_module.WORTH_STALENESS).sum())
        assert owing > 64
        watched, done = WatchedEngine(engine), 0
        while (sequence.staleness >= repair_module.WORTH_STALENESS).any():
            kv = kv_of(engine, sequence).clone()
            assert watched.repair(1) == 1
            changed = (kv_of(engine, sequence) != kv).flatten(2).any(-1).any(0).numpy()
            done += 32
            assert changed.sum() == min(32, owing + 32 - done)
            assert staleness[changed].min() >= sequence.staleness.max()
        repaired_first = int((staleness[exact:] >= repair_module.WORTH_STALENESS).cumprod().sum())
        assert sequence.exact_tokens == exact + repaired_first, "there is a token before the others that is not exact"
        assert watched.repair(1) == 1
        assert sequence.exact_tokens == exact // 16 * 16 + 32, "steps end at page borders"
        watched.repair(1000)
        assert sequence.exact_tokens == len(sequence)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_nothing_is_left_behind_when_a_step_is_stopped(layers: int) -> None:
    with tiny_engine(correction_share=0.02) as engine:
        sequence = two_turns(engine)
        pool: Any = engine._runner.preparation.pool
        for _ in range(4):
            held = {each.id: (kv_of(engine, each).clone(), list(each.table.pages)) for each in sequences(engine)}
            references, free = pool._references.copy(), pool._free.runs()
            numbers = [getattr(sequence, name).copy() for name in ("hops", "staleness", "query_positions")]
            exact = sequence.exact_tokens
            assert step(engine, layers)
            for each in sequences(engine):
                assert torch.equal(kv_of(engine, each), held[each.id][0]) and each.table.pages == held[each.id][1]
            assert (pool._references == references).all() and pool._free.runs() == free
            for number, name in zip(numbers, ("hops", "staleness", "query_positions"), strict=True):
                assert np.array_equal(number, getattr(sequence, name))
            assert sequence.exact_tokens == exact
            assert step(engine)
        assert engine.stats().interrupted_repairs == 4


def test_a_branch_stays_as_it_is_when_a_sequence_that_shares_its_pages_is_repaired() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        two_turns(engine)
        for word in ("fox", "dog"):
            branch = Prompt([*second_turn().segments, Segment.suffix(f" and what of the {word}?")])
            engine.generate(branch, FEW, session="s")
        newer, older = sequences(engine)[:2]
        shared = set(newer.table.pages) & set(older.table.pages)
        assert len(shared) > 10
        watched = WatchedEngine(engine)
        while newer.exact_tokens < len(newer):
            watched.repair(1)  # checks that nothing else changes
        assert older.exact_tokens < len(older)
        assert not set(newer.table.pages[10:]) & set(older.table.pages)
        watched.repair(1000)
        assert older.exact_tokens == len(older)


def test_a_sequence_is_forgotten_when_a_repaired_one_holds_all_of_it() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        two_turns(engine)
        slid = latest(engine)
        # The same text again, exact but shorter: neither makes the other superfluous yet.
        engine.generate(second_turn(), SamplingParams(max_tokens=1), session="s", policy="recompute")
        exact = latest(engine)
        assert len(exact) < len(slid) and exact.exact_tokens == len(exact) > slid.exact_tokens
        engine.generate(Prompt([Segment.suffix("something else")]), FEW, session="s")
        watched = WatchedEngine(engine)
        watched.repair(1000)
        assert slid in sequences(engine) and exact not in sequences(engine)
        assert len(sequences(engine)) == 3


def test_nothing_is_forgotten_when_the_pool_has_no_free_page() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        sequence = two_turns(engine)
        pool: Any = engine._runner.preparation.pool
        taken = pool.allocate(pool.num_free)
        before, cached = sequence.exact_tokens, len(sequences(engine))
        assert not step(engine)
        assert (sequence.exact_tokens, len(sequences(engine))) == (before, cached)
        pool.release(taken[:1])
        assert step(engine), "one page is enough for a small step"
        pool.release(taken[1:])
        WatchedEngine(engine).repair(1000)
        assert sequence.exact_tokens == len(sequence)


def test_pinned_sequences_are_left_alone() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        sequence = two_turns(engine)
        engine._runner.preparation.index.pin(sequence.id)
        assert not step(engine)
        engine._runner.preparation.index.unpin(sequence.id)
        assert step(engine)


def test_repair_stops_until_the_next_request_when_its_time_is_spent() -> None:
    with tiny_engine(correction_share=0.02, repair=True, repair_seconds=0.0) as engine:
        sequence = two_turns(engine)
        assert not engine.wait_until_repaired(LONG_SECONDS)
        assert sequence.exact_tokens < len(sequence) and engine.stats().repaired_tokens == 0
    with tiny_engine(correction_share=0.02, repair=True, repair_seconds=1e-9) as engine:
        two_turns(engine)
        for _ in range(3):
            before = engine.stats().repair_seconds
            assert not engine.wait_until_repaired(LONG_SECONDS)
            spent = engine.stats().repair_seconds
            engine.generate(Prompt([Segment.suffix("yes")]), FEW)
            assert spent > before, "one step a period"


def test_repair_is_off_when_the_device_is_a_cpu() -> None:
    with tiny_engine() as engine:
        sequence = two_turns(engine)
        with pytest.raises(ConfigError, match=r"'auto' is off on cpu: load with repair=True"):
            engine.wait_until_repaired()
        time.sleep(0.1)
        assert sequence.exact_tokens < len(sequence)


@pytest.mark.parametrize("setting", [{"repair": "yes"}, {"repair": 1}, {"repair_seconds": -1}])
def test_error_when_a_setting_is_wrong(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
