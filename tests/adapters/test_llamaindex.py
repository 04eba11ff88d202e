"""`CacheSlideLLM` over a tiny random model."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.llms.types import (
    CacheControl,
    CachePoint,
    ChatMessage,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from cacheslide_agents.adapters import CacheSlideChat, CacheSlideLLM
from cacheslide_agents.adapters.errors import UnsupportedFeatureError
from cacheslide_agents.adapters.llamaindex import from_llama_index
from cacheslide_agents.engine.errors import ConfigError, PromptError
from cacheslide_agents.templates import ChatMessage as Message
from cacheslide_agents.templates import TextPart, ToolCall
from tests.adapters.tiny_llm import tiny_settings

HI = [ChatMessage("Tell me of Alice.")]


def llm(**settings: Any) -> CacheSlideLLM:
    return CacheSlideLLM(**tiny_settings(**settings))


async def test_every_way_of_chatting_gives_the_same_answer_when_asked() -> None:
    model = llm()
    whole = model.chat(HI)
    streamed = list(model.stream_chat(HI))
    async_streamed = [response async for response in await model.astream_chat(HI)]
    assert whole.message.role == MessageRole.ASSISTANT
    texts = {whole.message.content, streamed[-1].message.content, async_streamed[-1].message.content}
    assert texts == {(await model.achat(HI)).message.content}
    assert "".join(response.delta or "" for response in streamed) == whole.message.content
    chat: Any = CacheSlideChat(**tiny_settings())
    assert chat.invoke(HI[0].content).content == whole.message.content


async def test_every_way_of_completing_gives_the_same_text_when_asked() -> None:
    model = llm()
    whole = model.complete("Once upon a time")
    streamed = list(model.stream_complete("Once upon a time"))
    async_streamed = [response async for response in await model.astream_complete("Once upon a time")]
    assert {whole.text, streamed[-1].text, async_streamed[-1].text} == {
        (await model.acomplete("Once upon a time")).text
    }
    assert "".join(response.delta or "" for response in streamed) == whole.text


def test_usage_is_the_same_when_chatted_and_streamed() -> None:
    model = llm()
    model.chat(HI)
    whole = model.chat(HI)
    *earlier, last = model.stream_chat(HI)
    assert isinstance(whole.raw, dict)
    assert isinstance(last.raw, dict)
    assert whole.raw["usage"] == last.raw["usage"]
    assert whole.raw["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert whole.additional_kwargs == last.additional_kwargs
    assert all(response.raw is None for response in earlier)
    assert whole.raw["cacheslide"]["generated_tokens"] == 8


def test_session_is_used_when_given_with_the_call_or_the_model() -> None:
    model = llm(session_id="own", max_tokens=2)
    sessions = [response.raw["cacheslide"]["session"] for response in (model.chat(HI), model.chat(HI, session="a"))]
    assert sessions == ["own", "a"]


def test_settings_hold_when_given_with_the_call() -> None:
    account = llm().chat(HI, max_tokens=3, policy="recompute").raw["cacheslide"]
    assert (account["generated_tokens"], account["policy"]) == (3, "recompute")
    with pytest.raises(ConfigError, match="no setting 'temprature'"):
        llm().chat(HI, temprature=1)
    with pytest.raises(ConfigError, match="CacheSlideLLM has no setting 'temprature'"):
        llm(temprature=1)
    with pytest.raises(UnsupportedFeatureError, match="later release"):
        llm().chat(HI, tools=[{"type": "function"}])


def test_metadata_states_the_context_when_asked() -> None:
    model = llm()
    assert model.metadata.context_window == model.engine.context_tokens
    assert model.metadata.num_output == 8
    assert model.metadata.is_chat_model
    assert model.metadata.model_name == model.model_name


async def test_event_loop_goes_on_when_an_answer_is_awaited() -> None:
    model = llm(max_tokens=64, ignore_eos=True)
    answer = asyncio.create_task(model.achat(HI))
    num_beats = 0
    while not answer.done():
        await asyncio.sleep(0.001)
        num_beats += 1
    assert num_beats >= 10


def test_request_ends_when_a_stream_is_closed() -> None:
    model = llm(max_tokens=2000, ignore_eos=True)
    responses = model.stream_chat(HI)
    next(responses)
    responses.close()
    del responses
    started = time.perf_counter()
    assert model.chat(HI, max_tokens=2).raw is not None
    assert time.perf_counter() - started < 5


def test_own_prompt_function_is_used_when_given() -> None:
    model = llm(messages_to_prompt=lambda messages: "Say: " + str(messages[-1].content), max_tokens=2)
    tokens = model.chat(HI).raw["usage"]["prompt_tokens"]
    assert tokens == model.complete("Say: Tell me of Alice.").raw["usage"]["prompt_tokens"]


def test_blocks_become_parts_when_converted() -> None:
    messages = [
        ChatMessage(
            role="system",
            content=[
                TextBlock(text="a"),
                TextBlock(text="b"),
                CachePoint(cache_control=CacheControl(type="ephemeral")),
                TextBlock(text="c"),
            ],
        ),
        ChatMessage("d", additional_kwargs={"cacheslide": "update"}),
        ChatMessage(
            role="assistant",
            content=[
                ThinkingBlock(content="hm"),
                ToolCallBlock(tool_name="go", tool_kwargs={"to": "Rome"}, tool_call_id="1"),
                ToolCallBlock(tool_name="go", tool_kwargs='{"to": "Bari"}', tool_call_id="2"),
                ToolCallBlock(tool_name="go", tool_kwargs="{", tool_call_id="3"),
            ],
        ),
        ChatMessage(role="tool", content="there", additional_kwargs={"tool_call_id": "1", "name": "go"}),
    ]
    assert from_llama_index(messages) == [
        Message.system("a", TextPart("\nb", ends_stable=True), "\nc"),
        Message.user(TextPart("d", "update")),
        Message.assistant(
            tool_calls=[
                ToolCall("go", {"to": "Rome"}, "1"),
                ToolCall("go", {"to": "Bari"}, "2"),
                ToolCall("go", {"arguments": "{"}, "3"),
            ]
        ),
        Message.tool("there", tool_call_id="1", name="go"),
    ]


def test_error_says_what_cannot_be_read_when_a_block_is_no_text() -> None:
    with pytest.raises(PromptError, match=r"message 0 \(user\) has a block of type 'image'"):
        llm().chat([ChatMessage(role="user", content=[ImageBlock(image=b"x")])])
