"""One queue, one thread: requests and other work on the model run first come, first served.

While the queue is empty the thread may do work that nobody waits for, in steps that stop when a job comes.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..errors import EngineClosedError

T = TypeVar("T")
Job = Callable[[], None]
IdleStep = Callable[[Callable[[], None]], bool]
"""Does one step; is handed a `check` to call often, which raises `InterruptedStepError` when a job waits.

Returns whether there may be more to do."""

PAUSE_SECONDS = 0.05
"""The queue has to be empty for so long before idle work begins: a caller's next request often follows at once."""


class InterruptedStepError(Exception):
    """A step of idle work is not wanted any more: a job waits, or the scheduler closes. Never seen by a caller."""


class Scheduler:
    """Runs jobs one after another on a thread of its own.

    A job handles its own errors: an exception that leaves it is a bug and ends up in `threading.excepthook`, without
    stopping the jobs behind it. A fork of the process has no such thread: there every job is refused.
    """

    def __init__(self, name: str, idle_step: IdleStep | None = None) -> None:
        """Starts the thread.

        Args:
            name: The thread's.
            idle_step: Called again and again while no job waits, until it returns False; after the next job it is
                called again. An exception that leaves it is a bug, as with jobs, and ends it until the next job.
        """
        self._idle_step = idle_step
        self._is_idle = False  # whether the thread has nothing to do and waits for a job
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        return len(self._jobs)

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the process that has the thread."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raises in a fork of the process.

        Raises:
            EngineClosedError: The thread lives in another process.
        """
        if self.is_forked:
            raise EngineClosedError(
                f"the engine belongs to process {self._process_id}, of which this one is a fork: load one here"
            )

    def submit(self, job: Job) -> None:
        """Puts a job at the end of the queue.

        Raises:
            EngineClosedError: `close` was called, or the thread lives in another process.
        """
        self.check_process()  # before the lock, which may have been held when the process was forked
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            self._jobs.append(job)
            self._changed.notify_all()

    def call(self, work: Callable[[], T]) -> T:
        """Runs something as a job, waits for it, and returns its result or raises its error.

        Raises:
            EngineClosedError: As in `submit`.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self.submit(job)
        return future.result()

    def withdraw(self, job: Job) -> bool:
        """Takes a job out of the queue; False if it has started or was never there."""
        with self._changed:
            try:
                self._jobs.remove(job)
            except ValueError:
                return False
            self._changed.notify_all()  # the thread may never have seen it: then all is as quiet as before
            return True

    def wait_until_quiet(self, timeout_seconds: float | None = None) -> bool:
        """Waits until no job runs or waits and no idle work is left; False if that takes longer.

        Raises:
            EngineClosedError: `close` was called, or the thread lives in another process.
        """
        self.check_process()
        with self._changed:
            quiet = self._changed.wait_for(lambda: (self._is_idle and not self._jobs) or self._closed, timeout_seconds)
            if self._closed:
                raise EngineClosedError("the engine is closed: load a new one")
            return quiet

    def close(self) -> None:
        """Takes no more jobs, runs those that wait (cancel them first to be quick) and ends the thread."""
        if self.is_forked:
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        is_idle_work_left = True
        pause: float | None = PAUSE_SECONDS
        while True:
            with self._changed:
                if self._idle_step is None or not is_idle_work_left:
                    self._is_idle = True
                    self._changed.notify_all()
                    pause = None
                self._changed.wait_for(lambda: self._jobs or self._closed, pause)
                self._is_idle = False
                if not self._jobs and self._closed:
                    return
                job = self._jobs.popleft() if self._jobs else None
            if job is not None:
                self._attempt(job)
                del job  # else it would live, with all that it holds, until the next one comes
                is_idle_work_left, pause = True, PAUSE_SECONDS
            else:
                is_idle_work_left, pause = bool(self._attempt(self._step)), 0.0

    def _step(self) -> bool:
        assert self._idle_step is not None
        try:
            return self._idle_step(self._check_idle)
        except InterruptedStepError:
            return True  # the job that stopped it may have been withdrawn meanwhile

    def _check_idle(self) -> None:
        if self._jobs or self._closed:
            raise InterruptedStepError

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Runs something; its result, or None if it raised."""
        try:
            return work()
        except Exception as error:
            threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
            return None
