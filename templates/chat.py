"""The generic chat: fixed instructions, perhaps some context that is rewritten every turn, then the history."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .messages import ChatMessage, TextPart


@dataclass(frozen=True)
class ChatTemplate:
    """A conversation that begins with a system message.

    Attributes:
        instructions: What never changes (`system`).
        context: What is rewritten between turns, such as a time stamp or a list of tools (`update`).
    """

    instructions: str = ""
    context: str = ""

    def system_message(self) -> ChatMessage:
        """The system message; `content_blocks()` of it is the content of a LangChain `SystemMessage`."""
        parts = []
        if self.instructions:
            parts.append(TextPart(self.instructions, "system"))
        if self.context:
            parts.append(TextPart(f"\n\n{self.context}" if parts else self.context, "update"))
        return ChatMessage("system", tuple(parts))

    def messages(self, history: Iterable[ChatMessage]) -> list[ChatMessage]:
        """The whole conversation of a turn; without instructions and context just the history."""
        system = self.system_message()
        return [system, *history] if system.parts else list(history)
