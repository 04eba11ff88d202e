"""Ready-made agent prompts."""

from __future__ import annotations

import pytest

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.templates import ChatMessage, ChatTemplate, MemoryTemplate


def test_memory_is_an_update_between_fixed_instructions_when_rendered() -> None:
    memory = MemoryTemplate("Be kind.", ["likes tea"], title="What you know", closing="Be brief.")
    system = memory.system_message()
    assert system.content == "Be kind.\n\n## What you know\n- likes tea\n\nBe brief."
    assert [part.segment for part in system.parts] == ["system", "update", "system"]
    assert memory.messages([ChatMessage.user("Hi")]) == [system, ChatMessage.user("Hi")]


def test_only_the_edited_line_changes_when_memory_is_edited() -> None:
    memory = MemoryTemplate("Be kind.")
    memory.set(["one", "two", "three"])
    memory.append("four")
    memory.replace("two", "2")
    memory.delete("three")
    assert memory.lines == ("one", "2", "four")


@pytest.mark.parametrize("edit", ["replace", "delete"])
def test_error_lists_the_lines_when_the_line_is_not_there(edit: str) -> None:
    memory = MemoryTemplate("Be kind.", ["one", "two"])
    with pytest.raises(PromptError, match="no line 'three': one; two"):
        memory.replace("three", "x") if edit == "replace" else memory.delete("three")


@pytest.mark.parametrize("line", ["", " ", "a\nb"])
def test_error_is_clear_when_a_line_is_none(line: str) -> None:
    with pytest.raises(PromptError, match="one line of text"):
        MemoryTemplate("Be kind.").append(line)


def test_context_is_an_update_when_a_chat_has_one() -> None:
    chat = ChatTemplate("Be kind.", "It is noon.")
    assert [(part.text, part.segment) for part in chat.system_message().parts] == [
        ("Be kind.", "system"),
        ("\n\nIt is noon.", "update"),
    ]
    assert ChatTemplate().messages([ChatMessage.user("Hi")]) == [ChatMessage.user("Hi")]
