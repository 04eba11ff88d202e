"""Idle work beside requests, closing, failures and forks: requests come first, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cacheslide_agents.engine import Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import EngineClosedError, RequestCancelledError
from cacheslide_agents.engine.run import repair as repair_module
from cacheslide_agents.engine.slide.draft import Draft
from tests.engine.turns import FEW, HISTORY, QUERY, SYSTEM, first_turn, second_turn, tiny_engine, two_turns
from tests.reference.session_check import WatchedEngine

LONG_SECONDS = 60.0


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair_module, "STEP_TOKENS", 32)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Makes steps take long; the event is set whenever one has begun."""
    begun, copy = threading.Event(), Draft.copy

    def slow_copy(draft: Draft, layer_idx: int) -> None:
        begun.set()
        time.sleep(0.01)
        copy(draft, layer_idx)

    monkeypatch.setattr(Draft, "copy", slow_copy)
    return begun


def test_answers_are_right_and_nothing_leaks_when_threads_ask_in_the_middle_of_repair(
    slow_steps: threading.Event,
) -> None:
    with tiny_engine(repair=True, correction_share=1.0, staleness_bound=0.0) as engine:
        two_turns(engine)
        prompts = [Prompt([*second_turn().segments, Segment.suffix(f" {number}?")]) for number in range(8)]
        expected = [engine.logits(prompt, [5], policy="recompute") for prompt in prompts]
        answers: dict[int, tuple[int, ...]] = {}
        got: dict[int, torch.Tensor] = {}

        def call(number: int) -> None:
            time.sleep(0.03 * number)
            slow_steps.wait(LONG_SECONDS)
            got[number] = engine.logits(prompts[number], [5], session="s")
            answers[number] = engine.generate(prompts[number], FEW, session="s").token_ids

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, prompt in enumerate(prompts):
            torch.testing.assert_close(got[number], expected[number], atol=1e-3, rtol=1e-3)
            assert answers[number] == engine.generate(prompt, FEW, policy="recompute").token_ids
        assert engine.stats().interrupted_repairs > 0
        assert engine.wait_until_repaired(LONG_SECONDS)
        WatchedEngine(engine).check_pages()


def test_engine_closes_at_once_when_it_is_in_the_middle_of_a_step(slow_steps: threading.Event) -> None:
    engine = tiny_engine(repair=True, correction_share=0.02)
    two_turns(engine)
    slow_steps.clear()
    assert slow_steps.wait(LONG_SECONDS)
    engine.close()
    assert engine.stats().interrupted_repairs >= 1
    WatchedEngine(engine).check_pages()
    with pytest.raises(EngineClosedError):
        engine.wait_until_repaired()


def test_a_request_can_be_cancelled_when_it_interrupts_repair(slow_steps: threading.Event) -> None:
    with tiny_engine(repair=True, correction_share=0.02) as engine:
        two_turns(engine)
        slow_steps.clear()
        assert slow_steps.wait(LONG_SECONDS)
        stream = engine.stream(first_turn(), SamplingParams(max_tokens=500, ignore_eos=True), session="s")
        next(stream)
        stream.close()
        with pytest.raises((StopIteration, RequestCancelledError)):
            next(stream)
        assert engine.wait_until_repaired(LONG_SECONDS)
        WatchedEngine(engine).check_pages()


def test_requests_are_served_when_repair_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    with tiny_engine(repair=True, correction_share=0.02) as engine:
        calls = 0

        def fail(*_: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("no room")

        monkeypatch.setattr(Draft, "copy", fail)
        sequence = two_turns(engine)
        assert not engine.wait_until_repaired(LONG_SECONDS)
        monkeypatch.undo()
        assert [type(error) for error in seen] == [MemoryError]
        assert not any(sequence.pins for sequence in engine._runner.preparation.index.by_recency())
        WatchedEngine(engine).check_pages()
        assert sequence.exact_tokens < len(sequence), "what failed once is not tried again"
        full = engine.generate(second_turn(), FEW, policy="recompute", namespace="other").token_ids
        assert engine.generate(second_turn(), FEW, policy="prefix", session="s").token_ids == full
        engine.generate(Prompt([Segment.system(SYSTEM), Segment.suffix(HISTORY + QUERY)]), FEW, session="s")
        engine.forget("s")
        assert engine.wait_until_repaired(LONG_SECONDS)


FORK = """
import os, signal, sys, threading, time, warnings
import torch
from cacheslide_agents.engine import Prompt
from cacheslide_agents.engine.errors import EngineClosedError
from cacheslide_agents.engine.slide.draft import Draft
from tests.engine.turns import FEW, first_turn, second_turn, tiny_engine

torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on a fork of a process with threads warns
begun, copy = threading.Event(), Draft.copy

def slow_copy(draft, layer_idx):
    begun.set()
    time.sleep(0.02)
    copy(draft, layer_idx)

Draft.copy = slow_copy
engine = tiny_engine(repair=True)
engine.generate(first_turn(), FEW, session="s")
engine.generate(second_turn(), FEW, session="s")
assert begun.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(60)
    for call in (engine.wait_until_repaired, lambda: engine.generate(first_turn())):
        try:
            call()
        except EngineClosedError as error:
            assert "fork" in str(error)
        else:
            os._exit(2)
    engine.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert engine.wait_until_repaired(60)
begun.clear()
engine.generate(Prompt([*first_turn().segments, *second_turn().segments[1:]]), FEW, session="s")
print("left")  # in the middle of the next step, or before it
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_process_exits_quietly_and_forks_refuse_when_repair_goes_on() -> None:
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", FORK],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left\n", "")
