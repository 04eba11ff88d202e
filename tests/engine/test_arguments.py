"""Wrong types and values in settings and calls: each is refused in our own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import CacheSlideError, ConfigError, PromptError
from tests.tiny import tiny_model, tiny_tokenizer

PROMPT = Prompt([Segment.suffix("hello there")])
ODD_VALUES: tuple[Any, ...] = (
    True,
    float("nan"),
    float("inf"),
    "",
    b"x",
    -1,
    2**70,
    10**400,
    1.5,
    [],
    {},
    {"a": 1},
    [[]],
    object(),
    Path("x"),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_model(tiny_model(), tiny_tokenizer(None), EngineConfig(pool_tokens=512)) as engine:
        yield engine


@pytest.mark.parametrize("settings", [EngineConfig, SamplingParams])
def test_nothing_but_our_own_error_when_a_setting_has_an_odd_value(settings: type) -> None:
    for field in fields(settings):
        for value in ODD_VALUES:
            with suppress(ConfigError):
                settings(**{field.name: value})


@pytest.mark.parametrize("tokens", [2**45, 2**62, 2**70])
def test_error_gives_the_size_when_the_pool_cannot_be_held(tokens: int) -> None:
    with pytest.raises(ConfigError, match=r"pool of \d+ tokens needs \d+ MiB.*lower pool_tokens"):
        Engine.from_model(tiny_model(), tiny_tokenizer(None), EngineConfig(pool_tokens=tokens))


@pytest.mark.parametrize("prompt", ["text", None, 5, [Segment.suffix("text")]])
def test_error_when_the_prompt_is_no_prompt(engine: Engine, prompt: Any) -> None:
    for call in (engine.generate, lambda wrong: engine.logits(wrong, "x")):
        with pytest.raises(PromptError, match="Segment"):
            call(prompt)
    if not isinstance(prompt, list):
        with pytest.raises(PromptError, match="Segment"):
            Prompt(prompt)


@pytest.mark.parametrize("template", [5, [], {}])
def test_error_when_the_template_is_no_text(template: Any) -> None:
    with pytest.raises(PromptError, match="template"):
        Prompt(PROMPT.segments, template=template)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "text", 5, 0])
def test_error_when_the_sampling_parameters_are_something_else(engine: Engine, params: Any) -> None:
    with pytest.raises(ConfigError, match="SamplingParams"):
        engine.generate(PROMPT, params)


@pytest.mark.parametrize("session", [5, [], {}, b"x", float("nan"), True, ("a",)])
def test_error_when_the_session_is_no_text(engine: Engine, session: Any) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: engine.generate(PROMPT, session=session),
        lambda: engine.logits(PROMPT, "x", session=session),
        lambda: engine.forget(session),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="session"):
            call()


@pytest.mark.parametrize("namespace", ["", 5, [], {}, b"x"])
def test_error_when_the_namespace_is_empty_or_no_text(engine: Engine, namespace: Any) -> None:
    for call in (
        lambda: engine.generate(PROMPT, namespace=namespace),
        lambda: engine.logits(PROMPT, "x", namespace=namespace),
        lambda: engine.forget("s", namespace=namespace),
    ):
        with pytest.raises(ConfigError, match="namespace"):
            call()


@pytest.mark.parametrize("policy", ["", 5, [], {}, "SLIDE"])
def test_error_when_the_policy_is_no_policy(engine: Engine, policy: Any) -> None:
    with pytest.raises(ConfigError, match="policy"):
        engine.generate(PROMPT, policy=policy)


@pytest.mark.parametrize(
    "continuation", [[], "", [1.5], ["a"], [2**70], None, 5, [[1]], [[1], [2, 3]], [True], "\ud800"]
)
def test_error_when_the_continuation_is_no_list_of_token_ids(engine: Engine, continuation: Any) -> None:
    with pytest.raises(PromptError, match=r"continuation|surrogate"):
        engine.logits(PROMPT, continuation)


@pytest.mark.parametrize("continuation", [(7, 8), [7, 8], torch.tensor([7, 8])])
def test_token_ids_are_taken_in_any_list(engine: Engine, continuation: Any) -> None:
    assert engine.logits(PROMPT, continuation).shape[0] == 2


def test_error_when_a_counted_text_has_a_lone_surrogate(engine: Engine) -> None:
    with pytest.raises(PromptError, match="surrogate"):
        engine.count_tokens("a\ud800")


def test_engine_serves_on_when_calls_were_wrong(engine: Engine) -> None:
    with pytest.raises(CacheSlideError):
        engine.generate("text")  # type: ignore[arg-type]
    assert engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)).receipt.generated_tokens == 2
