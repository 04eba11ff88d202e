"""A local model is found in every LLM object that holds one; a remote one is refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig, pipeline

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.adapters.wrapping import unwrap
from cacheslide_agents.engine.errors import ConfigError
from tests.adapters.tiny_llm import tiny_llm, tiny_settings
from tests.tiny import tiny_model, tiny_tokenizer


class HuggingFacePipeline:
    def __init__(self, inner: Any, **pipeline_kwargs: Any) -> None:
        self.pipeline = inner
        self.pipeline_kwargs = pipeline_kwargs


class ChatHuggingFace:
    def __init__(self, llm: Any, **settings: Any) -> None:
        self.llm = llm
        self.tokenizer = tiny_tokenizer("qwen3")
        self.temperature = settings.get("temperature")
        self.stop = settings.get("stop")


class HuggingFaceEndpoint:
    endpoint_url = "https://example.org"


class HuggingFaceLLM:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.max_new_tokens = 7
        self.generate_kwargs = {"do_sample": True, "top_p": 0.5}
        self.stopping_ids = [3]


def text_pipeline(**settings: Any) -> Any:
    model, tokenizer = tiny_llm()
    build: Any = pipeline
    return build("text-generation", model=model, tokenizer=tokenizer, **settings)


def test_pair_is_taken_as_it_is_when_given() -> None:
    model, tokenizer = tiny_llm()
    found = unwrap((model, tokenizer))
    assert (found.model, found.tokenizer) == (model, tokenizer)
    assert CacheSlideChat(**tiny_settings()).engine.model is model


def test_model_and_settings_are_found_when_a_pipeline_is_given() -> None:
    model, _ = tiny_llm()
    found = unwrap(text_pipeline(max_new_tokens=5, do_sample=False))
    assert found.model is model
    assert found.sampling["max_tokens"] == 5
    assert found.sampling["temperature"] == 0.0
    default = unwrap(text_pipeline(generation_config=GenerationConfig(max_new_tokens=4)))
    assert (default.sampling["max_tokens"], default.sampling["temperature"]) == (4, 0.7)
    wrapped = unwrap(HuggingFacePipeline(text_pipeline(), max_new_tokens=9, do_sample=True, temperature=0.3))
    assert wrapped.model is model
    assert (wrapped.sampling["max_tokens"], wrapped.sampling["temperature"]) == (9, 0.3)


def test_model_and_settings_are_found_when_a_chat_over_a_pipeline_is_given() -> None:
    chat = ChatHuggingFace(HuggingFacePipeline(text_pipeline(do_sample=True)), temperature=0.2, stop=["x"])
    found = unwrap(chat)
    assert found.model is tiny_llm()[0]
    assert found.tokenizer is chat.tokenizer
    assert (found.sampling["temperature"], found.sampling["stop"]) == (0.2, ["x"])


def test_model_and_settings_are_found_when_llama_index_holds_it() -> None:
    model, tokenizer = tiny_llm()
    found = unwrap(HuggingFaceLLM(model, tokenizer))
    assert (found.model, found.tokenizer) == (model, tokenizer)
    assert found.sampling == {
        "max_tokens": 7,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.5,
        "stop_token_ids": (3,),
    }


def test_generation_config_is_kept_when_the_model_has_one() -> None:
    model = tiny_model(seed=3)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, repetition_penalty=1.1)
    found = unwrap((model, tiny_tokenizer()))
    assert found.sampling == {"repetition_penalty": 1.1, "temperature": 0.7, "top_k": 50, "top_p": 1.0}


def test_error_says_why_and_what_to_do_when_the_model_is_remote() -> None:
    openai: Any = pytest.importorskip("langchain_openai")
    with pytest.raises(ConfigError, match=r"ChatOpenAI of langchain_openai.*KV cache.*name a model with model="):
        CacheSlideChat(llm=openai.ChatOpenAI(api_key="x"))


@pytest.mark.parametrize(
    ("llm", "message"),
    [
        (ChatHuggingFace(HuggingFaceEndpoint()), "over HuggingFaceEndpoint of .*behind an API"),
        (HuggingFaceEndpoint(), "gives no access to a model in this process"),
        ("gpt-4", "llm= is a str"),
        (("a", "b"), r"llm=\(str, str\) is not a transformers \(model, tokenizer\) pair"),
        (SimpleNamespace(bound=1, kwargs={}), "give the object that it binds"),
    ],
    ids=["endpoint-chat", "endpoint", "text", "pair", "binding"],
)
def test_error_is_clear_when_there_is_no_local_model(llm: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        unwrap(llm)


def test_error_asks_for_the_tokenizer_when_a_model_is_given_alone() -> None:
    with pytest.raises(ConfigError, match="give the pair"):
        unwrap(tiny_llm()[0])


def test_error_names_the_task_when_a_pipeline_does_not_generate() -> None:
    other = SimpleNamespace(task="summarization", model=tiny_llm()[0], tokenizer=tiny_llm()[1])
    with pytest.raises(ConfigError, match="pipeline for 'summarization'"):
        unwrap(other)
