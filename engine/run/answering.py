"""Answers on their way from the engine's thread to whoever asked, in threads or in asyncio, and cancelling them."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial

from ..errors import RequestCancelledError
from .request import Emit, Output, Piece, Request
from .scheduler import Job, Scheduler

Serve = Callable[[Request], None]
Ask = Callable[[Emit], Request]
"""Makes the request whose pieces go to `emit`, or raises what is wrong with it."""


def pieces(scheduler: Scheduler, serve: Serve, ask: Ask) -> Generator[Piece, None, None]:
    """Asks and yields an answer's pieces; closing the generator cancels the request and returns when it has ended.

    Args:
        scheduler: Whose thread serves.
        serve: Answers a request through its `emit`.
        ask: Called by the first `next`.

    Raises:
        EngineClosedError: The scheduler is closed, or belongs to the process of which this one is a fork.
    """
    events: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
    request = ask(events.put)
    job = partial(serve, request)
    scheduler.submit(job)
    ended = False
    try:
        while not ended:
            scheduler.check_process()
            event = events.get()
            ended = _is_last(event)
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        if not ended and not scheduler.is_forked:
            _cancel(scheduler, request, job)
            while not _is_last(events.get()):
                pass


async def pieces_async(scheduler: Scheduler, serve: Serve, ask: Ask) -> AsyncIterator[Piece]:
    """`pieces` for asyncio; closing the iterator cancels the request and does not wait for its end."""
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Piece | BaseException] = asyncio.Queue()

    def emit(event: Piece | BaseException) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:  # the loop was closed: nobody is listening any more
            request.cancel()

    request = ask(emit)
    job = partial(serve, request)
    scheduler.submit(job)
    ended = False
    try:
        while not ended:
            event = await events.get()
            ended = _is_last(event)
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        if not ended:
            _cancel(scheduler, request, job)


def collect(pieces: list[Piece]) -> Output:
    """A whole answer from all of its pieces."""
    last = pieces[-1]
    assert last.receipt is not None and last.finish_reason is not None
    return Output(
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=last.finish_reason,
        receipt=last.receipt,
    )


def _is_last(event: Piece | BaseException) -> bool:
    return isinstance(event, BaseException) or event.finish_reason is not None


def _cancel(scheduler: Scheduler, request: Request, job: Job) -> None:
    request.cancel()
    if scheduler.withdraw(job):
        request.emit(RequestCancelledError("the request was cancelled while it waited"))
