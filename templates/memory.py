"""An agent with a memory block: what it knows of the user stands in the system message and is edited between turns."""

from __future__ import annotations

from collections.abc import Iterable

from cacheslide_agents.engine.errors import PromptError

from .messages import ChatMessage, TextPart


class MemoryTemplate:
    """A system message of fixed instructions, a memory block and perhaps fixed closing instructions.

    The block is an `update` segment. Editing a line leaves the other lines as they are, so that only what changed is
    computed again. Not safe for use from several threads; an agent owns its memory.

    Attributes:
        instructions: What never changes, before the memory.
        closing: What never changes, after it.
        title: The heading of the block.

    Raises:
        PromptError: A line is empty or has a line break, here and in every edit.
    """

    def __init__(
        self, instructions: str, memory: Iterable[str] = (), *, title: str = "Memory", closing: str = ""
    ) -> None:
        self.instructions = instructions
        self.closing = closing
        self.title = title
        self._lines: list[str] = []
        self.set(memory)

    @property
    def lines(self) -> tuple[str, ...]:
        """The memory, one fact a line."""
        return tuple(self._lines)

    def set(self, lines: Iterable[str]) -> None:
        """Replaces the whole memory."""
        self._lines = [_checked(line) for line in lines]

    def append(self, line: str) -> None:
        """Adds a line at the end."""
        self._lines.append(_checked(line))

    def replace(self, old: str, new: str) -> None:
        """Puts a line in another's place.

        Raises:
            PromptError: No line is `old`.
        """
        self._lines[self._place(old)] = _checked(new)

    def delete(self, line: str) -> None:
        """Removes a line.

        Raises:
            PromptError: There is no such line.
        """
        del self._lines[self._place(line)]

    def system_message(self) -> ChatMessage:
        """The system message; `content_blocks()` of it is the content of a LangChain `SystemMessage`."""
        block = "\n".join([f"## {self.title}", *(f"- {line}" for line in self._lines)])
        parts = [TextPart(f"{self.instructions}\n\n", "system"), TextPart(block, "update")]
        if self.closing:
            parts.append(TextPart(f"\n\n{self.closing}", "system"))
        return ChatMessage("system", tuple(parts))

    def messages(self, history: Iterable[ChatMessage]) -> list[ChatMessage]:
        """The whole conversation of a turn."""
        return [self.system_message(), *history]

    def _place(self, line: str) -> int:
        try:
            return self._lines.index(line)
        except ValueError:
            known = "; ".join(self._lines) or "it is empty"
            raise PromptError(f"the memory has no line {line!r}: {known}") from None


def _checked(line: str) -> str:
    if not line.strip() or "\n" in line:
        raise PromptError(f"a memory line is one line of text, not {line!r}: give several lines as several entries")
    return line
