"""What the chat models of all frameworks have in common: settings, their checks, and requests to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from cacheslide_agents.engine.config import EngineConfig, PolicyName, SamplingParams
from cacheslide_agents.engine.errors import ConfigError
from cacheslide_agents.engine.segments import Prompt
from cacheslide_agents.templates.messages import ChatMessage

from .errors import UnsupportedFeatureError
from .registry import ENGINES, SharedEngine
from .wrapping import WrappedModel, unwrap

ENGINE_SETTINGS = tuple(field.name for field in fields(EngineConfig))
SAMPLING_SETTINGS = tuple(field.name for field in fields(SamplingParams))
CALL_SETTINGS = (*SAMPLING_SETTINGS, "policy", "session", "namespace", "model")
"""What may be given with a call."""

_TOOL_SETTINGS = ("tools", "tool_choice", "functions", "function_call", "response_format", "parallel_tool_calls")


@dataclass(frozen=True)
class Request:
    """A call that is ready for the engine.

    Attributes:
        shared: The engine and its renderers.
        prompt: What to answer.
        params: How to sample.
        session: Whose earlier turns may be slid.
        namespace: The tenant.
        policy: How reuse is decided.
    """

    shared: SharedEngine
    prompt: Prompt
    params: SamplingParams
    session: str | None
    namespace: str | None
    policy: PolicyName | None

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Engine.generate` and its kin."""
        return {
            "prompt": self.prompt,
            "params": self.params,
            "session": self.session,
            "namespace": self.namespace,
            "policy": self.policy,
        }


class ChatSettings:
    """A chat model's settings, read off its fields at every call, so that changing a field takes effect.

    Args:
        owner: A chat model with the fields of `ModelFields`.

    Raises:
        ConfigError: A value is outside its limits, settings contradict each other or `llm` holds no local model.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.wrapped: WrappedModel | None = None if owner.llm is None else unwrap(owner.llm)
        if self.wrapped is not None:
            for name in ("model", "device", "dtype"):
                if getattr(owner, name) != getattr(EngineConfig(), name):
                    raise ConfigError(
                        f"{name}={getattr(owner, name)!r} and llm= contradict each other: the wrapped model is used as "
                        "it is, so move or convert it before, or name a model without llm="
                    )
        self.config = EngineConfig(**{name: getattr(owner, name) for name in ENGINE_SETTINGS})
        self.sampling()

    def shared(self, model: str | Path | None = None) -> SharedEngine:
        """The engine, loaded if it is not yet; `model` is another one to use instead.

        Raises:
            CacheSlideError: The model cannot be loaded.
        """
        if model is None or model == self._owner.model:
            return ENGINES.get(self.config, self.wrapped)
        if self.wrapped is not None:
            raise ConfigError(f"model={model!r} cannot be used with llm=: make another chat model for it")
        return ENGINES.get(self.config.with_changes(model=model))

    def peek(self) -> SharedEngine | None:
        """The engine if it is loaded."""
        return ENGINES.peek(self.config, self.wrapped)

    def close(self) -> None:
        """Closes the engine and forgets it."""
        ENGINES.close(self.config, self.wrapped)

    def render(self, shared: SharedEngine, messages: Sequence[ChatMessage]) -> Prompt:
        """The prompt of a conversation.

        Raises:
            PromptError: The conversation cannot be rendered.
        """
        tokenizer = None if self.wrapped is None else self.wrapped.tokenizer
        template: str | Path | None = self._owner.chat_template
        date: datetime | None = self._owner.prompt_date
        variables: dict[str, Any] = self._owner.template_variables
        return shared.renderer(tokenizer, template, date).render(messages, variables=variables)

    def sampling(self, call: Mapping[str, Any] | None = None) -> SamplingParams:
        """The sampling settings of a call: what is given with it, else by the owner, else by the wrapped LLM."""
        layers = (
            self.wrapped.sampling if self.wrapped is not None else {},
            {name: getattr(self._owner, name) for name in SAMPLING_SETTINGS},
            {name: value for name, value in (call or {}).items() if name in SAMPLING_SETTINGS},
        )
        return SamplingParams(**{name: value for layer in layers for name, value in layer.items() if value is not None})

    def request(self, messages: list[ChatMessage] | Prompt, session: str | None, call: Mapping[str, Any]) -> Request:
        """A call of the framework as a request to the engine.

        Raises:
            ConfigError: A setting of the call does not exist or a value is outside its limits.
            PromptError: The conversation cannot be rendered.
            UnsupportedFeatureError: The call wants tools or structured output.
        """
        check_call(call)
        params = self.sampling(call)
        shared = self.shared(call.get("model"))
        prompt = messages if isinstance(messages, Prompt) else self.render(shared, messages)
        return Request(
            shared=shared,
            prompt=prompt,
            params=params,
            session=session,
            namespace=self.config.namespace if call.get("namespace") is None else call["namespace"],
            policy=cast(PolicyName, call.get("policy") or self.config.policy),
        )


def check_call(call: Mapping[str, Any]) -> None:
    """Refuses settings of a call that do not exist.

    Raises:
        ConfigError: A setting does not exist.
        UnsupportedFeatureError: The call wants tools or structured output.
    """
    for name in _TOOL_SETTINGS:
        if call.get(name):
            raise no_tools(name)
    if unknown := [name for name in call if name not in (*CALL_SETTINGS, *_TOOL_SETTINGS)]:
        raise ConfigError(f"a call has no setting {', '.join(map(repr, unknown))}; it has {', '.join(CALL_SETTINGS)}")


def no_tools(what: str) -> UnsupportedFeatureError:
    """The error of everything that needs tool calling or constrained output."""
    return UnsupportedFeatureError(
        f"{what} needs tool calling or structured output, which come in a later release: "
        "until then describe tools in the system message and parse the answer. Histories with tool calls are read."
    )


def explain(name: str, known: list[str], error: ValidationError) -> ConfigError:
    """A constructor's validation error with each wrong setting named."""
    lines = []
    for detail in error.errors():
        setting = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            lines.append(f"{name} has no setting {setting!r}; it has {', '.join(known)}")
        else:
            lines.append(f"{name}.{setting} = {detail['input']!r}: {detail['msg']}")
    return ConfigError("; ".join(lines))
