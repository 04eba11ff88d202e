"""LangChain's messages as the chat messages that templates render, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages import ChatMessage as RoleMessage

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.templates.messages import TAG, ChatMessage, MessageRole, TextPart, ToolCall

_ROLES: dict[str, MessageRole] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "tool": "tool",
    "function": "tool",
}

_TOLD_ELSEWHERE = {"tool_use", "tool_call", "tool_call_chunk", "server_tool_call", "function_call", "input_json_delta"}
"""Block types that repeat what `AIMessage.tool_calls` says."""

_REASONING = {"reasoning", "reasoning_content", "thinking", "redacted_thinking"}
"""Block types of an earlier answer's reasoning: no part of the history that a model reads."""


def from_langchain(messages: Iterable[BaseMessage]) -> list[ChatMessage]:
    """LangChain messages as chat messages.

    A content list's text blocks become parts, put together with nothing between, as LangChain's own `.text` does.
    Their `cacheslide` and `cache_control` keys become segment tags; `additional_kwargs={"cacheslide": role}` of a
    message tags all its text that has none. Reasoning of earlier answers is left out.

    Raises:
        PromptError: A message has a role or a block that is no text, or a tag that does not exist; the message says
            which one.
    """
    return [_from_message(idx, message) for idx, message in enumerate(messages)]


def to_langchain(messages: Iterable[ChatMessage]) -> list[BaseMessage]:
    """Chat messages, of a template say, as LangChain messages whose text blocks carry the segment tags."""
    return [_to_message(message) for message in messages]


def _from_message(idx: int, message: BaseMessage) -> ChatMessage:
    parts = tuple(_parts(idx, message))
    if isinstance(message, SystemMessage):
        return ChatMessage("system", parts, name=message.name)
    if isinstance(message, HumanMessage):
        return ChatMessage("user", parts, name=message.name)
    if isinstance(message, AIMessage):
        calls = [ToolCall(call["name"], call["args"], call["id"]) for call in message.tool_calls]
        calls += [
            ToolCall(call["name"] or "unknown", {"arguments": call["args"]}, call["id"])
            for call in message.invalid_tool_calls
        ]
        return ChatMessage("assistant", parts, tuple(calls), name=message.name)
    if isinstance(message, ToolMessage):
        return ChatMessage("tool", parts, tool_call_id=message.tool_call_id, name=message.name)
    if isinstance(message, FunctionMessage):
        return ChatMessage("tool", parts, name=message.name)
    if isinstance(message, RoleMessage) and message.role in _ROLES:
        return ChatMessage(_ROLES[message.role], parts, name=message.name)
    role = f"role {message.role!r}" if isinstance(message, RoleMessage) else f"type {type(message).__name__}"
    raise PromptError(
        f"message {idx} has the {role}, which a chat template cannot take: use system, user, assistant or tool"
    )


def _parts(idx: int, message: BaseMessage) -> Iterable[TextPart]:
    blocks: list[Any] = [message.content] if isinstance(message.content, str) else message.content
    tag = message.additional_kwargs.get(TAG)
    for block in blocks:
        if isinstance(block, str):
            if block:
                yield TextPart.from_block({"text": block, TAG: tag})
            continue
        kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
        if kind == "text":
            yield TextPart.from_block({TAG: tag, **block})
        elif not (isinstance(message, AIMessage) and kind in _TOLD_ELSEWHERE | _REASONING):
            raise PromptError(
                f"message {idx} ({message.type}) has a block of type {kind!r}, but the model reads text only: "
                "describe it in a text block, or leave it out"
            )


def _to_message(message: ChatMessage) -> BaseMessage:
    plain = all(part.segment is None and not part.ends_stable for part in message.parts)
    content: Any = message.content if plain else message.content_blocks()
    if message.role == "system":
        return SystemMessage(content, name=message.name)
    if message.role == "user":
        return HumanMessage(content, name=message.name)
    if message.role == "tool":
        return ToolMessage(content, tool_call_id=message.tool_call_id or "", name=message.name)
    calls: list[Any] = [
        {"type": "tool_call", "name": call.name, "args": dict(call.arguments), "id": call.id}
        for call in message.tool_calls
    ]
    return AIMessage(content, tool_calls=calls, name=message.name)
