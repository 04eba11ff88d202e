"""Which conversation a LangChain call belongs to.

LangChain tells a chat model's `_generate` and `_stream` nothing of the config of a plain call, so `invoke` and its
kin note the thread id in a context variable while LangChain's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

_THREAD: ContextVar[str | None] = ContextVar("cacheslide_thread", default=None)
_NAMES = ("thread_id", "session_id")


@contextmanager
def in_thread(thread: str | None) -> Iterator[None]:
    """Notes the thread id of a call for the code within."""
    token = _THREAD.set(thread)
    try:
        yield
    finally:
        _THREAD.reset(token)


def thread_of_config(config: RunnableConfig | None) -> str | None:
    """The thread id in a call's config or in that of the runnable around it."""
    whole = ensure_config(config)
    return _named(whole.get("configurable")) or _named(whole.get("metadata"))


def thread_of_call(session: Any, run_manager: Any) -> str | None:
    """The thread id of a running call: `session=`, the noted one, the run's metadata, the runnable around it."""
    if session is not None:
        return str(session)
    return _THREAD.get() or _named(getattr(run_manager, "metadata", None)) or thread_of_config(None)


def with_thread(config: RunnableConfig | None) -> RunnableConfig:
    """The config with its thread id in the metadata too, which reach the model in every way of streaming events."""
    whole = ensure_config(config)
    thread = thread_of_config(config)
    if thread is not None:
        whole["metadata"] = {"thread_id": thread, **(whole.get("metadata") or {})}
    return whole


def _named(values: Mapping[str, Any] | None) -> str | None:
    found = next((values[name] for name in _NAMES if values.get(name) is not None), None) if values else None
    return None if found is None else str(found)
