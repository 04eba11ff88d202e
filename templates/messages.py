"""Chat messages as every adapter hands them over: roles, text parts with their segment tags, tool calls.

Framework-free. What a framework's own message becomes here is the adapter's matter; how a conversation becomes the
text of a prompt is that of `render`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.engine.segments import ROLES, Role

MessageRole = Literal["system", "user", "assistant", "tool"]
MESSAGE_ROLES: tuple[str, ...] = get_args(MessageRole)

TAG = "cacheslide"
"""The key in a text block that names its segment role: `{"type": "text", "text": …, "cacheslide": "update"}`."""

STABLE_TAG = "cache_control"
"""The key (Anthropic's) in a text block that says: what is rewritten between turns comes after this block."""


@dataclass(frozen=True)
class TextPart:
    """A piece of a message's text.

    Attributes:
        text: Of any length; the message's content is its parts put together with nothing between.
        segment: The explicit segment role, or None to take the message's default.
        ends_stable: Whether a stable part of the message ends here (`cache_control`, LlamaIndex's `CachePoint`).

    Raises:
        PromptError: The segment role does not exist, or the text is no string.
    """

    text: str
    segment: Role | None = None
    ends_stable: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise PromptError(f"a text block's text must be a string, not {type(self.text).__name__}")
        if self.segment is not None and self.segment not in ROLES:
            raise PromptError(
                f"the tag {TAG!r}: {self.segment!r} does not exist: use one of {', '.join(ROLES)}, or leave it out"
            )

    @classmethod
    def from_block(cls, block: Mapping[str, Any]) -> TextPart:
        """A text block of a content list, with its `cacheslide` and `cache_control` tags.

        Raises:
            PromptError: The tag does not exist, or the text is no string.
        """
        return cls(cast(str, block.get("text")), cast("Role | None", block.get(TAG)), block.get(STABLE_TAG) is not None)

    def to_block(self) -> dict[str, Any]:
        """The part as a text block, the inverse of `from_block`."""
        block: dict[str, Any] = {"type": "text", "text": self.text}
        if self.segment is not None:
            block[TAG] = self.segment
        if self.ends_stable:
            block[STABLE_TAG] = {"type": "ephemeral"}
        return block


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made.

    Attributes:
        name: The tool.
        arguments: JSON values by argument name.
        id: Links the call to its result; None where a framework has none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        role: Who speaks.
        parts: The text, in order; empty for an assistant message that only calls tools.
        tool_calls: Of an assistant message.
        tool_call_id: Of a tool message: the call that it answers.
        name: The speaker's or tool's name, where there is one.

    Raises:
        PromptError: The role does not exist.
    """

    role: MessageRole
    parts: tuple[TextPart, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in MESSAGE_ROLES:
            raise PromptError(f"message role {self.role!r} does not exist: use one of {', '.join(MESSAGE_ROLES)}")

    @classmethod
    def system(cls, *texts: str | TextPart) -> ChatMessage:
        """What the model is told about its task."""
        return cls("system", _parts(texts))

    @classmethod
    def user(cls, *texts: str | TextPart) -> ChatMessage:
        """What the person says."""
        return cls("user", _parts(texts))

    @classmethod
    def assistant(cls, *texts: str | TextPart, tool_calls: Iterable[ToolCall] = ()) -> ChatMessage:
        """What the model answered."""
        return cls("assistant", _parts(texts), tuple(tool_calls))

    @classmethod
    def tool(cls, *texts: str | TextPart, tool_call_id: str | None = None, name: str | None = None) -> ChatMessage:
        """What a tool returned."""
        return cls("tool", _parts(texts), tool_call_id=tool_call_id, name=name)

    @property
    def content(self) -> str:
        """The whole text."""
        return "".join(part.text for part in self.parts)

    def content_blocks(self) -> list[dict[str, Any]]:
        """The parts as text blocks with their tags: the content of a LangChain message."""
        return [part.to_block() for part in self.parts]


def with_segments(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Gives every part its segment role.

    An explicit tag wins. In a message with `ends_stable` parts, the parts up to the last of them are stable (`system`
    in a leading system message, `suffix` elsewhere) and those after it are `update`. Without any tag a leading system
    message is `system` and everything else is `suffix`.
    """
    settled: list[ChatMessage] = []
    leading = True
    for message in messages:
        leading = leading and message.role == "system"
        stable: Role = "system" if leading else "suffix"
        last_stable = max(
            (idx for idx, part in enumerate(message.parts) if part.ends_stable), default=len(message.parts)
        )
        parts = (
            replace(part, segment=part.segment or (stable if idx <= last_stable else "update"))
            for idx, part in enumerate(message.parts)
        )
        settled.append(replace(message, parts=tuple(parts)))
    return settled


def _parts(texts: Iterable[str | TextPart]) -> tuple[TextPart, ...]:
    return tuple(text if isinstance(text, TextPart) else TextPart(text) for text in texts)
