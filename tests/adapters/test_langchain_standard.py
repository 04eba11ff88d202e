"""LangChain's own conformance suites, over a tiny random model and without a network."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from cacheslide_agents.adapters import CacheSlideChat
from tests.adapters.tiny_llm import tiny_settings

STANDARD = {"temperature": 0, "max_tokens": 12, "stop": []}
"""The suite's own settings without those of a remote service (`timeout`, `max_retries`, `api_key`)."""


class TestUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return CacheSlideChat

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in tiny_settings().items() if name != "max_tokens"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return STANDARD

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False


class TestIntegration(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return CacheSlideChat

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {name: value for name, value in tiny_settings().items() if name != "max_tokens"}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return STANDARD

    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def supports_model_override(self) -> bool:
        return False  # a wrapped model cannot be another one; test_langchain.py overrides a checkpoint's

    @property
    def supported_usage_metadata_details(self) -> Any:
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return _second_turn(stream, "cache_read")

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> AIMessage:
        return _second_turn(stream, "cache_creation")


def _second_turn(stream: bool, detail: str) -> AIMessage:
    """An answer whose prompt was partly cached and partly not."""
    chat = CacheSlideChat(**tiny_settings())
    history = "Alice likes tea. " * 8
    chat.invoke(history)
    if stream:
        chunks = iter(chat.stream(f"{history} And coffee?"))
        answer: Any = next(chunks)
        for chunk in chunks:
            answer = answer + chunk
    else:
        answer = chat.invoke(f"{history} And coffee?")
    assert answer.usage_metadata["input_token_details"][detail] > 0
    assert isinstance(answer, AIMessage)
    return answer


@pytest.mark.real_model
class TestBundledModel(TestIntegration):
    """The same on the bundled model, where it is installed."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"pool_tokens": 4096}
