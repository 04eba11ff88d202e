"""The queue and its idle work: who goes first, what an error costs, how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cacheslide_agents.engine.errors import EngineClosedError
from cacheslide_agents.engine.run.scheduler import PAUSE_SECONDS, Scheduler

LONG_SECONDS = 20.0


class Work:
    """Idle work of a wanted number of steps, each going on until it is stopped or `finish` is set."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps
        self.finish = threading.Event()
        self.began = threading.Event()
        self.stopped = 0
        self.error: Exception | None = None

    def __call__(self, check: Callable[[], None]) -> bool:
        if self.error is not None:
            raise self.error
        if not self.left:
            return False
        self.began.set()
        try:
            while not self.finish.is_set():
                check()
                time.sleep(0.0005)
        except BaseException:
            self.stopped += 1
            raise
        self.left -= 1
        return True


@pytest.fixture
def work() -> Work:
    return Work(3)


@pytest.fixture
def scheduler(work: Work) -> Iterator[Scheduler]:
    scheduler = Scheduler("test", idle_step=work)
    yield scheduler
    scheduler.close()


def done(scheduler: Scheduler) -> threading.Event:
    event = threading.Event()
    scheduler.submit(event.set)
    return event


def test_idle_work_is_stopped_at_once_when_a_job_comes(scheduler: Scheduler, work: Work) -> None:
    for number in range(5):
        assert work.began.wait(LONG_SECONDS)
        assert done(scheduler).wait(LONG_SECONDS)
        assert (work.stopped, work.left) == (number + 1, 3)
        work.began.clear()
    work.finish.set()
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    assert work.left == 0


def test_jobs_go_first_when_they_follow_each_other(scheduler: Scheduler, work: Work) -> None:
    assert done(scheduler).wait(LONG_SECONDS)
    stopped = work.stopped
    until = time.monotonic() + 3 * PAUSE_SECONDS
    while time.monotonic() < until:
        assert done(scheduler).wait(LONG_SECONDS)
    assert work.stopped <= stopped + 1  # a busy machine may have made us pause once


def test_idle_work_begins_again_when_it_had_ended_before_a_job(scheduler: Scheduler, work: Work) -> None:
    work.finish.set()
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    work.left = 2
    assert done(scheduler).wait(LONG_SECONDS)
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    assert work.left == 0


def test_nobody_waits_for_ever_when_idle_work_goes_on(scheduler: Scheduler, work: Work) -> None:
    assert not scheduler.wait_until_quiet(0.05)
    closing = threading.Timer(0.1, scheduler.close)
    closing.start()
    with pytest.raises(EngineClosedError):
        scheduler.wait_until_quiet(LONG_SECONDS)
    closing.join()
    assert work.left == 3


def test_jobs_are_served_when_idle_work_fails(
    scheduler: Scheduler, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    assert work.began.wait(LONG_SECONDS)
    work.error = ValueError("a bug")
    assert done(scheduler).wait(LONG_SECONDS)
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    assert seen == [work.error]
    work.error = None
    work.finish.set()
    assert done(scheduler).wait(LONG_SECONDS)
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    assert work.left == 0


def test_waiting_jobs_run_when_it_is_closed_in_idle_work(scheduler: Scheduler, work: Work) -> None:
    assert work.began.wait(LONG_SECONDS)
    events = [done(scheduler) for _ in range(4)]
    scheduler.close()
    assert all(event.is_set() for event in events)
    with pytest.raises(EngineClosedError):
        done(scheduler)


def test_it_is_quiet_when_there_is_no_idle_work() -> None:
    scheduler = Scheduler("test")
    hold = threading.Event()

    def wait() -> None:
        hold.wait(LONG_SECONDS)

    scheduler.submit(wait)
    assert not scheduler.wait_until_quiet(0.02)
    hold.set()
    assert scheduler.wait_until_quiet(LONG_SECONDS)
    scheduler.close()


def nothing() -> None:
    pass


def test_it_is_quiet_again_when_a_job_is_withdrawn_that_the_thread_never_saw() -> None:
    own = Scheduler("test")
    for _ in range(50):
        assert own.wait_until_quiet(LONG_SECONDS)
        with own._changed:  # so that the thread cannot wake up in between
            own.submit(nothing)
            assert own.withdraw(nothing)
        assert own.wait_until_quiet(LONG_SECONDS)
    own.close()


def test_idle_work_goes_on_when_the_job_that_stopped_it_was_withdrawn(work: Work) -> None:
    withdrawn = threading.Event()

    def step(check: Callable[[], None]) -> bool:
        try:
            return work(check)
        finally:
            if work.stopped and not withdrawn.is_set():
                withdrawn.set()
                assert own.withdraw(nothing)

    own = Scheduler("test", idle_step=step)
    assert work.began.wait(LONG_SECONDS)
    own.submit(nothing)
    assert withdrawn.wait(LONG_SECONDS)
    work.finish.set()
    assert own.wait_until_quiet(LONG_SECONDS)
    assert (work.stopped, work.left) == (1, 0)
    own.close()
