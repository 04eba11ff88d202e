"""One engine per configuration in a process, however often its chat model is built, bound, copied or pickled."""

from __future__ import annotations

import atexit
import os
import threading
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cacheslide_agents.engine.config import EngineConfig

if TYPE_CHECKING:
    from cacheslide_agents.engine.engine import Engine
    from cacheslide_agents.templates.render import ChatRenderer

    from .wrapping import WrappedModel

_PER_REQUEST = {name: getattr(EngineConfig(), name) for name in ("policy", "namespace")}
"""Settings that every request carries itself, so that chat models which differ in them share an engine."""


class EngineKey(NamedTuple):
    """What tells engines apart: the settings and, if one is wrapped, the model object."""

    config: EngineConfig
    model_id: int | None

    @classmethod
    def of(cls, config: EngineConfig, wrapped: WrappedModel | None) -> EngineKey:
        """The key of a configuration; a path as text and as `Path` are the same."""
        model = None if config.model is None else str(config.model)
        shared: EngineConfig = config.with_changes(model=model, **_PER_REQUEST)
        return cls(shared, None if wrapped is None else id(wrapped.model))


class SharedEngine:
    """An engine with the renderers of its chat templates.

    Renderers live here and not in the chat model, so that the date they settle on stays while the engine does.

    Attributes:
        engine: Safe from any thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._renderers: dict[tuple[Any, ...], ChatRenderer] = {}
        self._lock = threading.Lock()

    def renderer(
        self,
        tokenizer: Any = None,
        chat_template: str | Path | None = None,
        date: datetime | None = None,
    ) -> ChatRenderer:
        """The renderer of a chat template, made at its first use.

        Raises:
            PromptError: The template's file cannot be read.
        """
        from cacheslide_agents.templates.render import ChatRenderer

        tokenizer = tokenizer or self.engine.tokenizer
        key = (id(tokenizer), chat_template, date)
        with self._lock:
            if key not in self._renderers:
                self._renderers[key] = ChatRenderer(tokenizer, chat_template=chat_template, date=date)
            return self._renderers[key]


class _Place:
    """A key's engine, or the lock of the thread that loads it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shared: SharedEngine | None = None


class EngineRegistry:
    """Engines by configuration. Safe from any thread; different engines load at the same time."""

    def __init__(self) -> None:
        self._places: dict[EngineKey, _Place] = {}
        self._lock = threading.Lock()

    def get(self, config: EngineConfig, wrapped: WrappedModel | None = None) -> SharedEngine:
        """The engine of a configuration, loaded at the first call.

        Raises:
            CacheSlideError: What loading raises; the next call tries again.
        """
        key = EngineKey.of(config, wrapped)
        while True:
            with self._lock:
                place = self._places.setdefault(key, _Place())
            with place.lock:
                if self._places.get(key) is not place:  # closed while we waited for the lock
                    continue
                if place.shared is None:
                    place.shared = SharedEngine(_load(key.config, wrapped))
                return place.shared

    def peek(self, config: EngineConfig, wrapped: WrappedModel | None = None) -> SharedEngine | None:
        """The engine of a configuration if it is loaded."""
        with self._lock:
            place = self._places.get(EngineKey.of(config, wrapped))
        return None if place is None else place.shared

    def close(self, config: EngineConfig, wrapped: WrappedModel | None = None) -> None:
        """Closes a configuration's engine, whoever else uses it; the next `get` loads another."""
        with self._lock:
            place = self._places.pop(EngineKey.of(config, wrapped), None)
        self._close([place] if place is not None else [])

    def abandon(self) -> None:
        """Forgets every engine without closing it: in a fork of the process, which has none of their threads."""
        self._lock = threading.Lock()  # the old one may be held by a thread that is not here
        self._places = {}

    def close_all(self) -> None:
        """Closes every engine."""
        with self._lock:
            places = list(self._places.values())
            self._places.clear()
        self._close(places)

    @staticmethod
    def _close(places: list[_Place]) -> None:
        for place in places:
            with place.lock:
                if place.shared is not None:
                    place.shared.engine.close()


def _load(config: EngineConfig, wrapped: WrappedModel | None) -> Engine:
    from cacheslide_agents.engine.engine import Engine

    if wrapped is None:
        return Engine.load(config)
    return Engine.from_model(wrapped.model, wrapped.tokenizer, config)


ENGINES = EngineRegistry()
"""The process's engines; closed when it exits. A fork loads its own."""

atexit.register(ENGINES.close_all)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=ENGINES.abandon)
