"""The local model inside another framework's LLM object, without importing that framework or loading weights again.

Objects are known by their attributes. What runs its model elsewhere is refused: its KV cache is out of reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from cacheslide_agents.engine.errors import ConfigError

_HOW = (
    "give a transformers (model, tokenizer) pair, a text-generation pipeline, HuggingFacePipeline, ChatHuggingFace "
    "over one, or llama-index's HuggingFaceLLM; or name a model with model="
)

_GENERATE_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
"""What transformers' `generate` samples with where nothing is set."""


@dataclass(frozen=True)
class WrappedModel:
    """A local model taken out of an LLM object.

    Attributes:
        model: A transformers model; its weights are used where they are.
        tokenizer: Its tokenizer, with the chat template that the LLM object uses.
        sampling: Generation settings that the LLM object carries, as `SamplingParams` names them.
    """

    model: Any
    tokenizer: Any
    sampling: Mapping[str, Any] = field(default_factory=dict)


def unwrap(llm: Any) -> WrappedModel:
    """Takes the model out of an LLM object.

    Raises:
        ConfigError: The object holds no local model; the message says why and what to give.
    """
    found = _find(llm)
    if found is not None:
        return WrappedModel(found.model, found.tokenizer, {**_sampling(found.generate), **found.sampling})
    if _is_model(llm):
        raise ConfigError("llm= is a model without its tokenizer: give the pair, llm=(model, tokenizer)")
    if hasattr(llm, "bound") and hasattr(llm, "kwargs"):
        raise ConfigError(
            f"llm= is a {type(llm).__name__}: give the object that it binds, and its settings to CacheSlide itself"
        )
    raise ConfigError(
        f"llm= is a {_name(llm)}, which gives no access to a model in this process: an answer from behind an API "
        f"comes without its KV cache, so there is nothing to reuse. Instead {_HOW}"
    )


class _Found(NamedTuple):
    """A model with the arguments of transformers' `generate` that come with it, and settings in our own names."""

    model: Any
    tokenizer: Any
    generate: Mapping[str, Any]
    sampling: Mapping[str, Any]


def _find(llm: Any) -> _Found | None:
    if isinstance(llm, (tuple, list)):
        return _in_pair(llm)
    if hasattr(llm, "pipeline") and hasattr(llm.pipeline, "tokenizer"):  # HuggingFacePipeline
        found = _in_pipeline(llm.pipeline)
        return found._replace(generate={**found.generate, **_given(getattr(llm, "pipeline_kwargs", None))})
    if hasattr(llm, "llm") and hasattr(llm, "tokenizer"):  # ChatHuggingFace
        return _in_chat(llm)
    if hasattr(llm, "task") and hasattr(llm, "model") and hasattr(llm, "tokenizer"):  # transformers' Pipeline
        return _in_pipeline(llm)
    if _is_model(getattr(llm, "_model", None)) and hasattr(llm, "_tokenizer"):  # llama-index's HuggingFaceLLM
        return _in_llama_index(llm)
    return None


def _in_pair(pair: Any) -> _Found:
    if len(pair) != 2 or not _is_model(pair[0]) or not hasattr(pair[1], "apply_chat_template"):
        kinds = ", ".join(type(item).__name__ for item in pair)
        raise ConfigError(f"llm=({kinds}) is not a transformers (model, tokenizer) pair: {_HOW}")
    return _Found(pair[0], pair[1], _generation_config(pair[0]), {})


def _in_pipeline(pipeline: Any) -> _Found:
    task = getattr(pipeline, "task", "text-generation")
    if task != "text-generation" or not _is_model(pipeline.model) or pipeline.tokenizer is None:
        raise ConfigError(
            f"llm= is a pipeline for {task!r} over {type(pipeline.model).__name__}; only text-generation with a "
            f"tokenizer continues a prompt: {_HOW}"
        )
    given = _given(getattr(pipeline, "_generate_kwargs", None))
    generate = {
        **_given(getattr(pipeline, "_generation_defaults", None)),
        **_generation_config(pipeline.model),
        **_generation_config(pipeline),
        **_generation_config(SimpleNamespace(generation_config=given.pop("generation_config", None))),
        **given,
        **_given(getattr(pipeline, "_forward_params", None)),
    }
    return _Found(pipeline.model, pipeline.tokenizer, generate, {})


def _in_chat(chat: Any) -> _Found:
    if not hasattr(chat.llm, "pipeline"):
        raise ConfigError(
            f"llm= is a {_name(chat)} over {_name(chat.llm)}, which runs its model behind an API: its KV cache is out "
            f"of reach. Instead {_HOW}"
        )
    found = _find(chat.llm)
    assert found is not None
    names = ("max_tokens", "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    sampling = _given({name: getattr(chat, name, None) for name in names})
    return found._replace(tokenizer=chat.tokenizer or found.tokenizer, sampling=sampling)


def _in_llama_index(llm: Any) -> _Found:
    generate = {
        **_generation_config(llm._model),
        **_given({"max_new_tokens": getattr(llm, "max_new_tokens", None)}),
        **_given(getattr(llm, "generate_kwargs", None)),
    }
    stop_ids = tuple(getattr(llm, "stopping_ids", None) or ())
    return _Found(llm._model, llm._tokenizer, generate, {"stop_token_ids": stop_ids} if stop_ids else {})


def _generation_config(holder: Any) -> dict[str, Any]:
    """What a model's or pipeline's `generation_config` sets."""
    config = getattr(holder, "generation_config", None)
    names = ("max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "stop_strings")
    return _given({name: getattr(config, name, None) for name in names})


def _given(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (settings or {}).items() if value is not None}


def _sampling(generate: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' `generate` as settings of `SamplingParams`; what is unset is left out."""
    settings: dict[str, Any] = {}
    if "max_new_tokens" in generate:
        settings["max_tokens"] = generate["max_new_tokens"]
    if "repetition_penalty" in generate:
        settings["repetition_penalty"] = generate["repetition_penalty"]
    for name in ("stop_strings", "stop_sequences", "stop"):
        if name in generate:
            settings["stop"] = generate[name]
    if generate.get("do_sample"):
        settings.update({name: generate.get(name, default) for name, default in _GENERATE_DEFAULTS.items()})
    elif "do_sample" in generate:
        settings["temperature"] = 0.0
    return settings


def _is_model(value: Any) -> bool:
    return hasattr(value, "config") and hasattr(value, "parameters") and hasattr(value, "forward")


def _name(value: Any) -> str:
    return f"{type(value).__name__} of {type(value).__module__.partition('.')[0]}"
