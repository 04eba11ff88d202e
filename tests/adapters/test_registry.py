"""One engine per configuration, loaded once however many ask at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.adapters.registry import EngineKey, EngineRegistry
from cacheslide_agents.adapters.wrapping import WrappedModel
from cacheslide_agents.engine import engine as engine_module
from cacheslide_agents.engine.config import EngineConfig
from cacheslide_agents.engine.errors import ModelError
from tests.tiny import tiny_tokenizer


class CountedEngine:
    """Stands for an engine: loading takes a moment and may fail."""

    num_loaded = 0
    failing = False

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.num_closed = 0

    @classmethod
    def load(cls, config: EngineConfig) -> CountedEngine:
        threading.Event().wait(0.05)
        if cls.failing:
            raise ModelError("no model")
        cls.num_loaded += 1
        return cls()

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, config: EngineConfig) -> CountedEngine:
        return cls.load(config)

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture(name="registry")
def _registry(monkeypatch: pytest.MonkeyPatch) -> EngineRegistry:
    monkeypatch.setattr(engine_module, "Engine", CountedEngine)
    monkeypatch.setattr(CountedEngine, "num_loaded", 0)
    return EngineRegistry()


def test_model_is_loaded_once_when_many_threads_ask(registry: EngineRegistry) -> None:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(registry.get(EngineConfig()))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CountedEngine.num_loaded == 1
    assert len(found) == 8
    assert all(shared is found[0] for shared in found)


def test_key_is_the_same_when_only_requests_differ() -> None:
    base = EngineConfig(model="a")
    assert EngineKey.of(base, None) == EngineKey.of(
        EngineConfig(model=Path("a"), policy="prefix", namespace="other"), None
    )
    assert EngineKey.of(base, None) != EngineKey.of(EngineConfig(model="a", correction_share=0.2), None)
    assert EngineKey.of(base, None) != EngineKey.of(base, WrappedModel(object(), object()))


def test_loading_is_tried_again_when_it_failed(registry: EngineRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedEngine, "failing", True)
    with pytest.raises(ModelError):
        registry.get(EngineConfig())
    assert registry.peek(EngineConfig()) is None
    monkeypatch.setattr(CountedEngine, "failing", False)
    assert registry.get(EngineConfig()) is registry.peek(EngineConfig())


def test_engine_is_closed_once_when_the_registry_closes(registry: EngineRegistry) -> None:
    engines: list[Any] = [registry.get(EngineConfig()).engine, registry.get(EngineConfig(max_hops=1)).engine]
    registry.close(EngineConfig())
    registry.close(EngineConfig())
    registry.close_all()
    assert [engine.num_closed for engine in engines] == [1, 1]
    assert registry.get(EngineConfig()).engine is not engines[0]


def test_engine_is_open_when_another_thread_closed_the_one_that_was_waited_for(registry: EngineRegistry) -> None:
    first: Any = registry.get(EngineConfig())
    place = next(iter(registry._places.values()))
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: registry.close(EngineConfig())),
        threading.Thread(target=lambda: found.append(registry.get(EngineConfig()))),
    ]
    with place.lock:
        threads[1].start()
        threading.Event().wait(0.05)  # it waits for the place now
        threads[0].start()
        while registry._places:
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    assert first.engine.num_closed == 1
    assert found[0].engine.num_closed == 0
    assert registry.peek(EngineConfig()) is found[0]


def test_renderer_is_kept_when_asked_for_again(registry: EngineRegistry) -> None:
    shared = registry.get(EngineConfig())
    assert shared.renderer() is shared.renderer()
    assert shared.renderer(chat_template="a") is not shared.renderer(chat_template="b")
