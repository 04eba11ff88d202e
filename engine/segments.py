"""Segments and prompts: what a person gives to the engine, before any token is computed.

A prompt is an ordered list of segments. It is tokenized as one text (`engine.tokenization`), so that its ids are
those of the chat template's own rendering; segments are then mapped onto token offsets.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from .errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Role = Literal["system", "update", "suffix"]
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True)
class Segment:
    """A piece of prompt text with one role.

    Attributes:
        role: `system` never changes, `update` is rewritten between turns, `suffix` keeps its text but may shift.
        text: The piece's text, of any length.
        literal: Whether control tokens typed in `text` (such as `<|im_end|>`) stay plain text. Adapters set it for
            what users and tools wrote; a chat template's own glue is never literal.

    Raises:
        PromptError: The role does not exist or the text is no string.
    """

    role: Role
    text: str
    literal: bool = False

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise PromptError(f"segment role {self.role!r} does not exist: use one of {', '.join(ROLES)}")
        if not isinstance(self.text, str):
            raise PromptError(f"segment text must be a string, not {type(self.text).__name__}")

    @classmethod
    def system(cls, text: str, *, literal: bool = False) -> Segment:
        """Text that never changes."""
        return cls("system", text, literal)

    @classmethod
    def update(cls, text: str, *, literal: bool = False) -> Segment:
        """Text that is rewritten between turns: a memory block, reflections, a tool list."""
        return cls("update", text, literal)

    @classmethod
    def suffix(cls, text: str, *, literal: bool = False) -> Segment:
        """Text that stays, but shifts when an update before it changes length: history, documents."""
        return cls("suffix", text, literal)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as token ids.

    Attributes:
        token_ids: (tokens,) int64.
        segment_starts: The token offset at which each segment begins; a token that straddles two segments belongs to
            the later one. As many as `roles`, not decreasing.
        roles: The segments' roles, in order.
    """

    token_ids: np.ndarray
    segment_starts: tuple[int, ...]
    roles: tuple[Role, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    def segment_ranges(self) -> tuple[tuple[int, int], ...]:
        """Each segment's token range (start, stop), partitioning the prompt; a segment without a token is empty."""
        return tuple(pairwise((*self.segment_starts, len(self))))


@dataclass(frozen=True)
class Prompt:
    """The ordered segments of one request.

    Attributes:
        segments: At least one; their concatenated text is what the model reads.
        template: Identity of the chat template that rendered the text, or None for plain text. Nothing is reused
            across templates. A plain prompt gets the special tokens that the tokenizer itself adds (a BOS); a
            rendered one carries its own.

    Raises:
        PromptError: There is no segment, an element is no `Segment`, or the whole text is empty.
    """

    segments: tuple[Segment, ...]
    template: str | None = None

    def __init__(self, segments: Iterable[Segment], template: str | None = None) -> None:
        if not isinstance(segments, Iterable):
            raise PromptError(f"a prompt is a list of Segment, not a {type(segments).__name__}")
        if template is not None and not isinstance(template, str):
            raise PromptError(f"a prompt's template is a text that names it, not a {type(template).__name__}")
        object.__setattr__(self, "segments", tuple(segments))
        object.__setattr__(self, "template", template)
        for segment in self.segments:
            if not isinstance(segment, Segment):
                raise PromptError(
                    f"a prompt is a list of Segment, not of {type(segment).__name__}: wrap text as Segment.suffix(text)"
                )
        if not self.text:
            raise PromptError("the prompt is empty: give at least one segment with text")

    @property
    def text(self) -> str:
        """The whole text as the model reads it."""
        return "".join(segment.text for segment in self.segments)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> EncodedPrompt:
        """Tokenizes the prompt as one text and maps its segments onto token offsets."""
        from .tokenization import encode_prompt

        return encode_prompt(self, tokenizer)

    def token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The prompt's token ids, equal to the chat template's own."""
        ids: list[int] = self.encode(tokenizer).token_ids.tolist()
        return ids
