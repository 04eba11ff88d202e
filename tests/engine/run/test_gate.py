"""The gate: its statistic against a naive model, and in an engine what it measures, refuses and lets pass again."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine import Drift, Engine, EngineConfig, Prompt, Segment
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.reuse.index import SpaceKey
from cacheslide_agents.engine.run import scheduler as scheduler_module
from cacheslide_agents.engine.run.gate import MAX_KEYS, Gate, GateKey, GateState
from cacheslide_agents.engine.slide.draft import Draft
from tests.engine.turns import FEW, HISTORY, NEW, OLD, QUERY, SYSTEM, first_turn, second_turn, tiny_engine
from tests.reference.naive_gate import NaiveGate
from tests.reference.session_check import WatchedEngine

LONG_SECONDS = 60.0
KEY = GateKey(SpaceKey("a", None), "slide")


def drift(kl: float) -> Drift:
    return Drift(slid_tokens=1, key_cksim=(1.0,), value_cksim=(1.0,), kl=kl, agrees=True, margin=1.0)


def turn(update: str) -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(update), Segment.suffix(HISTORY), Segment.suffix(QUERY)])


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle work is done when a test says so."""
    monkeypatch.setattr(scheduler_module, "PAUSE_SECONDS", 10.0**6)


def work(engine: Engine) -> None:
    """All the idle work that there is."""
    while engine._scheduler.call(lambda: engine._runner.idle_work.step(lambda: None)):
        pass


def quiet(engine: Engine) -> None:
    assert engine._scheduler.wait_until_quiet(LONG_SECONDS)


def state(engine: Engine) -> GateState:
    (found,) = engine.stats().gates
    return found


@settings(deadline=None)
@given(
    st.floats(0.01, 1.0),
    st.sampled_from([0.01, 0.05, 1.0]),
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1e-4, 0.02, 0.06, 0.3, 7.0])), max_size=60),
)
def test_gate_is_the_naive_ones_when_anything_happens(share: float, bound: float, events: list[float | None]) -> None:
    gate, naive = Gate(share, bound), NaiveGate(share, bound)
    for event in events:
        naive.events.append(event)
        is_open, mean, due = naive.replay()
        if event is None:
            assert gate.is_due(KEY) == (due >= 1.0 - 1e-9)
        else:
            gate.note(KEY, drift(event))
        (found,) = gate.states()
        assert found.mean_kl == pytest.approx(mean, abs=1e-12)
        if abs(mean - bound) > 1e-9 and abs(mean - bound / 2) > 1e-9:
            assert found.is_open == is_open == (gate.refusal(KEY) is None)


def test_nothing_is_learned_when_a_measurement_is_not_finite() -> None:
    gate = Gate(1.0, 0.05)
    for kl in (math.nan, math.inf):
        gate.note(KEY, drift(kl))
    assert gate.refusal(KEY) is None and not gate.states()


def test_kinds_of_prompt_are_kept_apart_and_the_oldest_forgotten() -> None:
    gate = Gate(1.0, 0.05)
    keys = [GateKey(SpaceKey(f"tenant {number}", None), "slide") for number in range(MAX_KEYS + 1)]
    for _ in range(3):
        gate.note(keys[0], drift(9.0))
    assert gate.refusal(keys[0]) and not gate.refusal(keys[1])
    assert "0.23 nats" in str(gate.refusal(keys[0])) and "gate_kl_bound = 0.05" in str(gate.refusal(keys[0]))
    for key in keys[1:]:
        assert gate.is_due(key)
    assert len(gate.states()) == MAX_KEYS and not gate.refusal(keys[0])


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.usefixtures("by_hand")
def test_what_is_measured_is_what_the_prompts_drift_is(share: float) -> None:
    with tiny_engine(gate_share=1.0, correction_share=share) as engine:
        watched = WatchedEngine(engine)
        watched.turn(first_turn(), FEW, session="s")
        work(engine)
        assert engine.stats().shadow_runs == 0, "nothing slid"
        expected = engine.drift(second_turn(), session="s")
        receipt = watched.turn(second_turn(), FEW, session="s").receipt
        before = engine.stats()
        work(engine)
        after, found = engine.stats(), state(engine)
        assert (found.namespace, found.template, found.policy, found.measured) == ("default", None, "slide", 1)
        measured = found.latest
        assert measured is not None and measured.slid_tokens == expected.slid_tokens == receipt.slid_tokens
        assert measured.kl == pytest.approx(expected.kl, rel=1e-3, abs=1e-6)
        assert measured.key_cksim == pytest.approx(expected.key_cksim, abs=1e-5)
        assert measured.value_cksim == pytest.approx(expected.value_cksim, abs=1e-5)
        assert measured.agrees == expected.agrees and measured.margin == pytest.approx(expected.margin, abs=1e-4)
        assert found.mean_kl == pytest.approx(0.25 * measured.kl)
        assert after.shadow_runs == 1
        for name in ("requests", "fallbacks", "prompt_tokens", "exact_tokens", "slid_tokens", "fresh_tokens"):
            assert getattr(after, name) == getattr(before, name), "a shadow run was counted"
        assert (after.cached_sequences, after.free_pages) == (before.cached_sequences, before.free_pages)
        watched.check_pages()


@pytest.mark.usefixtures("by_hand")
def test_shadow_runs_write_no_page_that_is_cached() -> None:
    with tiny_engine(gate_share=1.0, correction_share=0.0) as engine:
        engine.generate(first_turn(), FEW, session="s")
        engine.generate(second_turn(), FEW, session="s")
        watched = WatchedEngine(engine)
        before = {each.id: watched._held(each) for each in watched._sequences()}
        watched.poison()
        work(engine)
        assert state(engine).measured == 1
        watched.check_kept(before)
        watched.check_pages()


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.usefixtures("by_hand")
def test_only_exact_text_is_reused_when_the_gate_is_closed(share: float) -> None:
    with tiny_engine(gate_share=1.0, gate_kl_bound=1e-9, correction_share=share) as engine:
        watched = WatchedEngine(engine)
        watched.turn(turn(OLD), FEW, session="s")
        watched.turn(turn(NEW), FEW, session="s")
        work(engine)
        assert not state(engine).is_open
        before = engine.stats()
        other = turn("memory: 7 cats at 9.\n")
        expected = engine.drift(other, session="s")
        full = engine.generate(other, FEW, policy="recompute", store=False).token_ids
        output = watched.turn(other, FEW, session="s")
        receipt, after = output.receipt, engine.stats()
        assert receipt.policy == "slide" and "gate_kl_bound = 1e-09" in str(receipt.fallback)
        assert receipt.slid_tokens == 0 < receipt.exact_tokens and receipt.is_exact and output.token_ids == full
        assert (after.fallbacks - before.fallbacks, after.slid_tokens - before.slid_tokens) == (1, 0)
        # Measured is what `slide` would have done.
        work(engine)
        measured = state(engine).latest
        assert measured is not None and measured.slid_tokens == expected.slid_tokens > 0
        assert measured.kl == pytest.approx(expected.kl, rel=1e-3, abs=1e-6)
        assert measured.key_cksim == pytest.approx(expected.key_cksim, abs=1e-5)
        watched.check_pages()
        appended = Prompt([*other.segments, Segment.suffix("yes\n")])
        assert watched.turn(appended, FEW, session="s").receipt.fallback is None, "nothing would have slid"
        assert watched.turn(turn(OLD + "x"), FEW, session="s", policy="prefix").receipt.fallback is None
        other_tenant = {"session": "s", "namespace": "b"}
        watched.turn(turn(OLD), FEW, **other_tenant)
        assert watched.turn(turn(NEW), FEW, **other_tenant).receipt.slid_tokens > 0


@pytest.mark.usefixtures("by_hand")
def test_the_gate_opens_again_when_measurements_are_good() -> None:
    with tiny_engine(gate_share=1.0, correction_share=1.0, staleness_bound=0.0) as engine:
        engine.generate(turn(OLD), FEW, session="s")
        gate: Gate = engine._runner.idle_work.gate
        for _ in range(3):
            gate.note(GateKey(SpaceKey("default", None), "slide"), drift(9.0))
        refused = 0
        for number in range(12):
            receipt = engine.generate(turn(f"memory: {number} cats.\n"), FEW, session="s").receipt
            work(engine)
            refused += receipt.fallback is not None
            assert (receipt.slid_tokens > 0) == (receipt.fallback is None)
        assert 1 < refused < 9 and receipt.fallback is None and state(engine).is_open


@pytest.mark.usefixtures("by_hand")
def test_every_second_prompt_is_measured_when_half_of_them_are_wanted() -> None:
    with tiny_engine(gate_share=0.5) as engine:
        engine.generate(turn(OLD), FEW, session="s")
        counts = []
        for number in range(6):
            engine.generate(turn(f"memory: {number} cats.\n"), FEW, session="s")
            work(engine)
            counts.append(engine.stats().shadow_runs)
        assert counts == [1, 1, 2, 2, 3, 3]


def test_nothing_is_measured_when_the_device_is_a_cpu() -> None:
    with tiny_engine() as engine:
        engine.generate(turn(OLD), FEW, session="s")
        engine.generate(turn(NEW), FEW, session="s")
        quiet(engine)
        assert engine.stats().gates == () and engine._scheduler._idle_step is None


@pytest.mark.usefixtures("by_hand")
def test_shadow_run_is_dropped_when_the_next_request_follows_at_once() -> None:
    with tiny_engine(gate_share=1.0) as engine:
        engine.generate(turn(OLD), FEW, session="s")
        engine.generate(turn(NEW), FEW, session="s")
        engine.generate(Prompt([Segment.suffix("yes")]), FEW)
        assert engine.stats().dropped_shadow_runs == 1
        work(engine)
        assert engine.stats().shadow_runs == 0


def test_shadow_run_is_dropped_when_a_request_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, copy = threading.Event(), Draft.copy

    def slow_copy(draft: Draft, layer_idx: int) -> None:
        begun.set()
        time.sleep(0.02)
        copy(draft, layer_idx)

    monkeypatch.setattr(Draft, "copy", slow_copy)
    with tiny_engine(gate_share=1.0) as engine:
        engine.generate(turn(OLD), FEW, session="s")
        engine.generate(turn(NEW), FEW, session="s")
        assert begun.wait(LONG_SECONDS)
        expected = engine.generate(first_turn(), FEW, policy="recompute", store=False).token_ids
        stats = engine.stats()
        assert (stats.shadow_runs, stats.dropped_shadow_runs) == (0, 1)
        engine.generate(turn("memory: 7 cats.\n"), FEW, session="s")  # still due
        quiet(engine)
        assert (engine.stats().shadow_runs, engine.stats().dropped_shadow_runs) == (1, 1)
        assert engine.generate(first_turn(), FEW, policy="prefix").token_ids == expected
        WatchedEngine(engine).check_pages()
        begun.clear()
        engine.generate(turn("memory: 9 dogs.\n"), FEW, session="s")
        assert begun.wait(LONG_SECONDS)
    WatchedEngine(engine).check_pages()


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("harm", ["forget", "fill"])
@pytest.mark.usefixtures("by_hand")
def test_shadow_run_is_dropped_when_its_pages_are_not_to_be_had(closed: bool, harm: str) -> None:
    with tiny_engine(gate_share=1.0) as engine:
        runner: Any = engine._runner
        engine.generate(turn(OLD), FEW, session="s")
        if closed:
            for _ in range(3):
                runner.idle_work.gate.note(GateKey(SpaceKey("default", None), "slide"), drift(9.0))
        engine.generate(turn(NEW), FEW, session="s")
        pool, taken, measured = runner.preparation.pool, [], state(engine).measured
        if harm == "forget":
            engine.forget("s")
        else:
            taken = pool.allocate(pool.num_free - 1)
        cached = engine.stats().cached_sequences
        work(engine)
        stats = engine.stats()
        assert (stats.shadow_runs, stats.dropped_shadow_runs) == (0, 1)
        assert stats.cached_sequences == cached and state(engine).measured == measured
        pool.release(taken)
        WatchedEngine(engine).check_pages()


def test_drift_is_measured_before_it_is_repaired() -> None:
    with tiny_engine(gate_share=1.0, repair=True, correction_share=0.0) as engine:
        engine.generate(first_turn(), FEW, session="s")
        expected = engine.drift(second_turn(), session="s")
        engine.generate(second_turn(), FEW, session="s")
        assert engine.wait_until_repaired(LONG_SECONDS)
        measured = state(engine).latest
        assert measured is not None and measured.kl == pytest.approx(expected.kl, rel=1e-3)
        assert min(measured.key_cksim) < 0.9999


def test_requests_are_served_when_a_shadow_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    with tiny_engine(gate_share=1.0) as engine:
        engine.generate(first_turn(), FEW, session="s")
        engine.generate(second_turn(), FEW, session="s")
        monkeypatch.setattr(Draft, "copy", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        quiet(engine)
        assert [type(error) for error in seen] == [MemoryError]
        assert engine.stats().dropped_shadow_runs == 1
        assert engine.generate(first_turn(), FEW, session="s").receipt.fallback is None
        WatchedEngine(engine).check_pages()


@pytest.mark.parametrize("setting", [{"gate_share": 1.1}, {"gate_share": "on"}, {"gate_kl_bound": 0}])
def test_error_when_a_setting_is_wrong(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(**setting)
