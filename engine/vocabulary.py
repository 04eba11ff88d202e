"""What a tokenizer's added tokens mean to us: which control the model, which open a plain text, how to avoid them.

Only fast tokenizers are served: the mapping of segments onto tokens needs the character offsets that they give.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from .errors import PromptError, UnsupportedModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


class Tokens(NamedTuple):
    """Ids of a text and, for each, the offsets in characters at which it starts and ends.

    Byte-level tokens of one character share its offsets. A special token's range holds the blanks that it swallows.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]


class Vocabulary:
    """A fast tokenizer's added tokens, and the encodings that respect or ignore them.

    A *control token* is an added token that is special or that the chat template writes (`chat_control_tokens` counts
    where a tokenizer has it), as in transformers' `sanitize_control_tokens`. Other added tokens are ordinary words.

    Attributes:
        backend: The Rust tokenizer.
        control_ids: Ids of control tokens.
        special_ids: Those that are special: they are left out of decoded text.
        opening_ids: What the tokenizer itself puts before a text (a BOS); often empty.
        is_byte_level: Whether tokens are spelled in the byte alphabet of GPT-2.
        has_byte_tokens: Whether `<0xE4>` and the like stand for bytes (SentencePiece's byte fallback).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise UnsupportedModelError(
                f"{type(tokenizer).__name__} is not a fast tokenizer: it gives no character offsets, which segments "
                "need; use a model with a tokenizer.json, or load its tokenizer with AutoTokenizer"
            )
        backend: Tokenizer = getattr(tokenizer, "backend_tokenizer")  # noqa: B009 (only fast tokenizers declare it)
        template = _template_source(tokenizer)
        listed = getattr(tokenizer, "chat_control_tokens", None)
        self.backend = backend
        self.control_ids: frozenset[int] = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
            or (
                token.content in listed
                if listed is not None
                else token.content in template and not token.content.isspace()
            )
        )
        self.special_ids: frozenset[int] = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self.opening_ids = _opening_ids(backend)
        decoders = _decoder_types(backend)
        self.is_byte_level = "ByteLevel" in decoders and decoders <= {"ByteLevel", "Fuse"}
        self.has_byte_tokens = "ByteFallback" in decoders
        self._newline_ids = backend.encode("\n", add_special_tokens=False).ids
        self._as_text: dict[str, list[int]] = {}

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
        """The vocabulary of a tokenizer, made once and made anew when tokens or the template were changed.

        Raises:
            UnsupportedModelError: The tokenizer is not a fast one.
        """
        state = (len(tokenizer), _template_source(tokenizer))
        known = _KNOWN.get(tokenizer)
        if known is None or known[0] != state:
            known = _KNOWN[tokenizer] = (state, cls(tokenizer))
        vocabulary = known[1]
        if vocabulary.backend.truncation is not None:  # left over from somebody else's call; never cut a prompt
            vocabulary.backend.no_truncation()
        if vocabulary.backend.padding is not None:
            vocabulary.backend.no_padding()
        if vocabulary.backend.encode_special_tokens:
            vocabulary.backend.encode_special_tokens = False
        return vocabulary

    def encode(self, text: str) -> Tokens:
        """Encodes a text, adding nothing to it."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        starts: list[int] = []
        ends: list[int] = []
        for start, end in encoding.offsets:
            starts.append(start)
            ends.append(end)
        return Tokens(encoding.ids, starts, ends)

    def encode_inside(self, text: str) -> Tokens:
        """Encodes text that stands in the middle of another, without the space that SentencePiece puts at a start.

        The text is encoded behind a newline, which is taken off again, as transformers does.
        """
        ids, starts, ends = self.encode("\n" + text)
        drop = len(self._newline_ids)
        if ids[:drop] != self._newline_ids:
            return self.encode(text)
        return Tokens(ids[drop:], [max(start - 1, 0) for start in starts[drop:]], [end - 1 for end in ends[drop:]])

    def encode_as_text(self, text: str) -> list[int]:
        """Encodes a typed control token as the plain text it is.

        Raises:
            PromptError: The model's own merges produce a control token from every way to cut the text.
        """
        ids = self._as_text.get(text)
        if ids is None:
            ids = self._as_text[text] = self._spell(text)
        return ids

    def _spell(self, text: str) -> list[int]:
        drop = len(self._newline_ids)
        ids = self._encode_without_added_tokens("\n" + text)
        ids = ids[drop:] if ids[:drop] == self._newline_ids else self._encode_without_added_tokens(text)
        if self.control_ids.isdisjoint(ids):
            return ids
        if len(text) < 2:
            raise PromptError(
                f"the text holds the control token {text!r}, which this tokenizer cannot write as text: remove it"
            )
        # The vocabulary builds the token from its letters: cut it, so that no merge can.
        return self._spell(text[:1]) + self._spell(text[1:])

    def _encode_without_added_tokens(self, text: str) -> list[int]:
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        words = [text]
        if self.backend.pre_tokenizer is not None:
            words = [word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in self.backend.model.tokenize(word)]


_KNOWN: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[Any, Vocabulary]] = WeakKeyDictionary()


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    template: Any = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\0".join(map(str, template.values()))


def _decoder_types(backend: Tokenizer) -> set[str]:
    """The kinds of decoder in the tokenizer's pipeline."""
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {decoder["type"] for decoder in (state["decoders"] if state["type"] == "Sequence" else [state])}


def _opening_ids(backend: Tokenizer) -> list[int]:
    encoding = backend.encode("a", add_special_tokens=True)
    mask: Sequence[int] = encoding.special_tokens_mask
    opening = int(np.argmin(mask)) if len(mask) and 0 in mask else 0
    return encoding.ids[:opening]
