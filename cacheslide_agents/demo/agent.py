"""The demo's agent: a memory block in its system message, edited between turns, and a history that grows behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableConfig

from cacheslide_agents.templates import MemoryTemplate


@dataclass(frozen=True)
class Edit:
    """A change of one line of the memory.

    Attributes:
        old: The line as it stood, or None for a line that is added.
        new: The line that takes its place, or None for a line that is removed.
    """

    old: str | None = None
    new: str | None = None

    @property
    def kind(self) -> str:
        """What happens to the line: `insert`, `edit` or `delete`."""
        if self.old is None:
            return "insert"
        return "delete" if self.new is None else "edit"


class MemoryAgent:
    """Answers with what it remembers; everything behind the memory block keeps its keys and values when that changes.

    Attributes:
        memory: The system message's instructions and the facts that the agent knows.
        history: Every message so far, oldest first.

    Args:
        chat: A LangChain chat model, such as `CacheSlideChat` or one bound to a policy.
        memory: What it knows at the start; the agent edits it.
        thread_id: The conversation's name, by which the cache finds its earlier turns.
        history: Messages from before the first turn.
    """

    def __init__(
        self,
        chat: Runnable[LanguageModelInput, AIMessage],
        memory: MemoryTemplate,
        thread_id: str,
        history: Iterable[BaseMessage] = (),
    ) -> None:
        self._chat = chat
        self._config: RunnableConfig = {"configurable": {"thread_id": thread_id}}
        self.memory = memory
        self.history = list(history)

    def remember(self, edit: Edit) -> None:
        """Edits the memory.

        Raises:
            PromptError: The line to change is not in it.
        """
        if edit.old is not None and edit.new is not None:
            self.memory.replace(edit.old, edit.new)
        elif edit.old is not None:
            self.memory.delete(edit.old)
        elif edit.new is not None:
            self.memory.append(edit.new)

    def prompt(self, text: str) -> list[BaseMessage]:
        """What the model reads when the user says `text`: instructions, memory, history, and the text."""
        # The blocks' tags tell CacheSlide which part is rewritten between turns; other chat models skip them.
        blocks: list[str | dict[str, Any]] = [*self.memory.system_message().content_blocks()]
        return [SystemMessage(blocks), *self.history, HumanMessage(text)]

    def ask(self, text: str) -> AIMessage:
        """Answers, and keeps what was said in the history."""
        answer = self._chat.invoke(self.prompt(text), self._config)
        self.history += [HumanMessage(text), answer]
        return answer
