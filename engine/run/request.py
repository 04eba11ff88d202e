"""A request on its way through the engine, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..config import PolicyName, SamplingParams
from ..errors import RequestCancelledError
from ..receipt import Receipt
from ..reuse.index import SpaceKey
from ..segments import Prompt

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Piece:
    """A part of an answer as it is generated.

    Attributes:
        text: New text; characters come whole and stop strings never appear. May be empty.
        token_ids: The tokens sampled since the piece before, stop tokens included.
        finish_reason: Set on the last piece alone.
        receipt: Set on the last piece alone.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None


@dataclass(frozen=True)
class Output:
    """A whole answer.

    Attributes:
        text: The answer without special tokens and without the stop string.
        token_ids: Every sampled token, a stop token at the end included.
        finish_reason: `stop` or `length`.
        receipt: What was reused and computed.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    receipt: Receipt


@dataclass(frozen=True)
class Call:
    """A prompt, who asks, and how its reuse is decided; checked by `arguments.checked_call`.

    Attributes:
        prompt: What is asked.
        session: Whose earlier turns may be slid; None for nobody's.
        namespace: The tenant.
        policy: How reuse is decided.
    """

    prompt: Prompt
    session: str | None
    namespace: str
    policy: PolicyName

    @property
    def space(self) -> SpaceKey:
        """Where it may find what it reuses."""
        return SpaceKey(self.namespace, self.prompt.template)


Emit = Callable[[Piece | BaseException], None]
"""Takes an answer's pieces in order, or the error that ended it. Called on the engine's thread."""


@dataclass(eq=False)
class Request:
    """A call that is to be answered: how, where its pieces go, and whether it was cancelled.

    Attributes:
        call: What is asked.
        params: How to sample.
        emit: Takes the pieces.
        submitted_at: `time.perf_counter()` at submission, in seconds.
        closing: Set when the engine closes, which cancels every request.
        store: Whether later requests may reuse what is computed for this one.
    """

    call: Call
    params: SamplingParams
    emit: Emit
    submitted_at: float
    closing: threading.Event = field(default_factory=threading.Event)
    store: bool = True
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Stops the request at its next layer or token. Safe from any thread, any time."""
        self._cancelled.set()

    def check(self) -> None:
        """Raises if the request was cancelled.

        Raises:
            RequestCancelledError: Somebody called `cancel` or closed the engine.
        """
        if self._cancelled.is_set() or self.closing.is_set():
            raise RequestCancelledError("the request was cancelled before it finished")
