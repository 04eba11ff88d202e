"""LangChain messages as chat messages and back."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.load import dumps, loads
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    merge_message_runs,
)

from cacheslide_agents.adapters.messages import from_langchain, to_langchain
from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.templates import ChatMessage as Message
from cacheslide_agents.templates import MemoryTemplate, TextPart, ToolCall


def test_every_kind_becomes_its_role_when_converted() -> None:
    messages: list[BaseMessage] = [
        SystemMessage("a"),
        HumanMessage("b", name="bob"),
        AIMessage("c"),
        ToolMessage("d", tool_call_id="1"),
        FunctionMessage(content="e", name="f"),
        ChatMessage(content="g", role="developer"),
        ChatMessage(content="h", role="assistant"),
    ]
    assert [(message.role, message.content) for message in from_langchain(messages)] == [
        ("system", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("tool", "d"),
        ("tool", "e"),
        ("system", "g"),
        ("assistant", "h"),
    ]


def test_blocks_keep_their_tags_when_converted() -> None:
    content: list[Any] = [
        "plain ",
        {"type": "text", "text": "stable", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "new", "cacheslide": "update"},
    ]
    (message,) = from_langchain([SystemMessage(content)])
    assert message.parts == (TextPart("plain "), TextPart("stable", ends_stable=True), TextPart("new", "update"))


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_tags_survive_when_messages_are_saved_or_merged() -> None:
    original = SystemMessage([{"type": "text", "text": "a", "cacheslide": "update"}])
    saved = loads(dumps(original), allowed_objects=[SystemMessage])
    merged = merge_message_runs([original, SystemMessage("b")])
    assert from_langchain([saved])[0].parts == (TextPart("a", "update"),)
    assert TextPart("a", "update") in from_langchain(merged)[0].parts


def test_calls_are_kept_and_reasoning_left_out_when_an_answer_is_converted() -> None:
    content: list[Any] = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "text", "text": "Going."},
        {"type": "tool_use", "id": "1", "name": "go", "input": {}},
    ]
    calls: Any = [{"name": "go", "args": {"to": "Rome"}, "id": "1", "type": "tool_call"}]
    broken: Any = [{"name": "go", "args": "{", "id": "2", "error": "bad JSON", "type": "invalid_tool_call"}]
    (message,) = from_langchain([AIMessage(content, tool_calls=calls, invalid_tool_calls=broken)])
    assert message == Message.assistant(
        "Going.", tool_calls=[ToolCall("go", {"to": "Rome"}, "1"), ToolCall("go", {"arguments": "{"}, "2")]
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (
            HumanMessage([{"type": "image_url", "image_url": {"url": "x"}}]),
            r"message 0 \(human\).*'image_url'.*text only",
        ),
        (ToolMessage([{"type": "json", "json": {}}], tool_call_id="1"), "'json'"),
        (ChatMessage(content="x", role="narrator"), "role 'narrator'"),
        (RemoveMessage(id="1"), "type RemoveMessage"),
        (HumanMessage([{"type": "text", "text": "x", "cacheslide": "tail"}]), "'tail' does not exist"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_says_what_cannot_be_read_when_a_message_is_wrong(message: BaseMessage, error: str) -> None:
    with pytest.raises(PromptError, match=error):
        from_langchain([message])


def test_messages_come_back_when_converted_there_and_back() -> None:
    memory = MemoryTemplate("Be kind.", ["likes tea"])
    messages = memory.messages(
        [
            Message.user("Hi"),
            Message.assistant("Going.", tool_calls=[ToolCall("go", {"to": "Rome"}, "1")]),
            Message.tool("There.", tool_call_id="1", name="go"),
        ]
    )
    assert from_langchain(to_langchain(messages)) == messages


def test_a_message_tag_marks_all_its_text_when_blocks_have_none():
    tagged = HumanMessage(
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cacheslide": "suffix"}],
        additional_kwargs={"cacheslide": "update"},
    )
    (message,) = from_langchain([tagged])
    assert [part.segment for part in message.parts] == ["update", "suffix"]
    with pytest.raises(PromptError, match="updat"):
        from_langchain([SystemMessage("x", additional_kwargs={"cacheslide": "updat"})])
