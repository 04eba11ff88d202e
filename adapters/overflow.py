"""A prompt that is too long, as the error by which LangChain's middleware knows to summarize and try again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import LangChainException

from cacheslide_agents.engine.errors import ContextLengthError

try:
    from langchain_core.exceptions import ContextOverflowError
except ImportError:  # langchain-core of the early 1.x releases, whose middleware looks for nothing

    class ContextOverflowError(LangChainException):  # type: ignore[no-redef]
        """Stands for LangChain's own."""


class ChatContextLengthError(ContextLengthError, ContextOverflowError):
    """`ContextLengthError` for those who catch our errors and those who catch LangChain's."""

    def __init__(self, error: ContextLengthError) -> None:
        Exception.__init__(self, str(error))
        self.num_tokens = error.num_tokens
        self.limit_tokens = error.limit_tokens


@contextmanager
def known_overflow() -> Iterator[None]:
    """Raises a prompt's overflow within as `ChatContextLengthError`."""
    try:
        yield
    except ContextLengthError as error:
        raise ChatContextLengthError(error) from error
