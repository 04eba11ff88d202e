"""One queue, one thread: requests and other work on the model run first come, first served."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from ..errors import EngineClosedError

Job = Callable[[], None]


class Scheduler:
    """Runs jobs one after another on a thread of its own.

    A job handles its own errors: an exception that leaves it is a bug and ends up in `threading.excepthook`, without
    stopping the jobs behind it. A fork of the process has no such thread: there every job is refused.
    """

    def __init__(self, name: str) -> None:
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

    def withdraw(self, job: Job) -> bool:
        """Takes a job out of the queue; False if it has started or was never there."""
        with self._changed:
            try:
                self._jobs.remove(job)
            except ValueError:
                return False
            return True

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
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, self._thread)))
            finally:
                del job  # else it would live, with all that it holds, until the next one comes
