"""Segment tags: what wins, what `cache_control` means, what untagged text is."""

from __future__ import annotations

from typing import Any

import pytest

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.templates.messages import ChatMessage, TextPart, with_segments


def roles(*messages: ChatMessage) -> list[list[str | None]]:
    return [[part.segment for part in message.parts] for message in with_segments(messages)]


def test_leading_system_messages_are_system_when_nothing_is_tagged() -> None:
    assert roles(
        ChatMessage.system("a", "b"), ChatMessage.system("c"), ChatMessage.user("d"), ChatMessage.system("e")
    ) == [
        ["system", "system"],
        ["system"],
        ["suffix"],
        ["suffix"],
    ]


def test_explicit_tag_wins_when_it_is_given() -> None:
    message = ChatMessage.user(TextPart("a", "system"), TextPart("b", "update", ends_stable=True), "c")
    assert roles(message) == [["system", "update", "update"]]


def test_text_after_the_last_stable_end_is_update_when_cache_control_is_used() -> None:
    end = TextPart("x", ends_stable=True)
    assert roles(ChatMessage.system("a", end, "b", end, "c", "d"), ChatMessage.user("a", end, "b")) == [
        ["system", "system", "system", "system", "update", "update"],
        ["suffix", "suffix", "update"],
    ]


def test_block_comes_back_when_a_part_is_written_and_read() -> None:
    for part in (TextPart("a"), TextPart("b", "update"), TextPart("c", ends_stable=True)):
        assert TextPart.from_block(part.to_block()) == part


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (
            {"type": "text", "text": "a", "cacheslide": "sufix"},
            "'sufix' does not exist: use one of system, update, suffix",
        ),
        ({"type": "text", "text": 1}, "must be a string, not int"),
        ({"type": "text"}, "must be a string, not NoneType"),
    ],
)
def test_error_is_clear_when_a_block_is_wrong(block: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptError, match=message):
        TextPart.from_block(block)


def test_error_lists_roles_when_a_message_role_does_not_exist() -> None:
    role: Any = "bot"
    with pytest.raises(PromptError, match="'bot' does not exist: use one of system, user, assistant, tool"):
        ChatMessage(role)
