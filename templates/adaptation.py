"""What a chat template does not take, said in a way that it takes.

A template is given the conversation as it is. Only where it refuses, or where it would silently leave tool calls
out, is the conversation put differently, the way people expect:

- no tools in the template: calls become `<tool_call>` JSON at the end of the assistant's text, results become
  `<tool_response>` text of a user message, results in a row in one message;
- tool call ids of nine letters and digits wanted (Mistral): ids are hashed to that form;
- alternating roles wanted: neighbours of one role are merged with an empty line between, and a system message in
  the middle speaks as the user;
- no system role: the leading system message goes to the head of the first user message.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from .messages import ChatMessage, TextPart, ToolCall


def as_template_message(message: ChatMessage) -> dict[str, Any]:
    """The message as chat templates read it (Hugging Face's convention, arguments as a mapping)."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "type": "function",
                **({"id": call.id} if call.id is not None else {}),
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def variants(messages: Sequence[ChatMessage]) -> Iterator[list[ChatMessage]]:
    """The conversation as it is, then ever further from that, for a template that refuses it.

    Args:
        messages: With a segment role on every part, as `with_segments` gives them: merged parts keep theirs.
    """
    current = list(messages)
    yield current
    for change in (_short_ids, _alternating, _without_system):
        changed = change(current)
        if changed != current:
            current = changed
            yield current


def tools_as_text(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Tool calls and results as text of the assistant and the user."""
    plain: list[ChatMessage] = []
    for is_tool, group in groupby(messages, key=lambda message: message.role == "tool"):
        if not is_tool:
            plain += [_with_calls_as_text(message) for message in group]
            continue
        parts: list[TextPart] = []
        for message in group:
            head = "\n<tool_response>\n" if parts else "<tool_response>\n"
            parts += [TextPart(head, "suffix"), *message.parts, TextPart("\n</tool_response>", "suffix")]
        plain.append(ChatMessage("user", tuple(parts)))
    return plain


def _with_calls_as_text(message: ChatMessage) -> ChatMessage:
    if not message.tool_calls:
        return message
    calls = "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False, default=str)
        + "\n</tool_call>"
        for call in message.tool_calls
    )
    text = f"\n{calls}" if message.content else calls
    return replace(message, parts=(*message.parts, TextPart(text, "suffix")), tool_calls=())


def _short_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    def short(call_id: str | None) -> str | None:
        if call_id is None or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]

    def short_call(call: ToolCall, place: str) -> ToolCall:
        return replace(call, id=short(call.id if call.id is not None else place))

    if not any(message.tool_calls or message.role == "tool" for message in messages):
        return list(messages)
    return [
        replace(
            message,
            tool_calls=tuple(short_call(call, f"{idx}.{place}") for place, call in enumerate(message.tool_calls)),
            tool_call_id=short(message.tool_call_id),
        )
        for idx, message in enumerate(messages)
    ]


def _alternating(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    merged: list[ChatMessage] = []
    for message in messages:
        if message.role == "system" and any(earlier.role != "system" for earlier in merged):
            message = replace(message, role="user")
        if merged and merged[-1].role == message.role != "tool":
            merged[-1] = _joined(merged[-1], message, merged[-1])
        else:
            merged.append(message)
    return merged


def _without_system(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    if not messages or messages[0].role != "system":
        return list(messages)
    system, *rest = messages
    if rest and rest[0].role == "user":
        return [_joined(system, rest[0], rest[0]), *rest[1:]]
    return [replace(system, role="user"), *rest]


def _joined(first: ChatMessage, second: ChatMessage, like: ChatMessage) -> ChatMessage:
    """Both texts with an empty line between, in a message like `like`."""
    parts = first.parts + second.parts
    if first.content and second.content:
        gap = TextPart("\n\n", first.parts[-1].segment)
        parts = (*first.parts, gap, *second.parts)
    return replace(like, parts=parts, tool_calls=first.tool_calls + second.tool_calls)
