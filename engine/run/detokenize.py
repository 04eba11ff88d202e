"""Token ids become text one at a time, as `tokenizer.decode` would give it for all of them at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ..vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Detokenizer:
    """Incremental decoding at a cost per token that does not grow with the text.

    What `push` and `finish` return adds up to `tokenizer.decode(ids, skip_special_tokens=True)`. Characters come
    whole: what may still become one is held back. Byte-level tokens are joined as bytes. Others are decoded in a
    window behind the last token, so that leading spaces come out as in the whole; a run of byte tokens (`<0xE4>`) is
    held until it ends, because decoding turns all of it into U+FFFD if any of it is no UTF-8.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, context_ids: Sequence[int] = ()) -> None:
        """Starts a text.

        Args:
            tokenizer: A fast Hugging Face tokenizer.
            context_ids: Tokens that stand before the text. With them a SentencePiece answer keeps its leading space,
                which decoding the answer alone drops.

        Raises:
            UnsupportedModelError: The tokenizer is not a fast one.
        """
        vocabulary = Vocabulary.of(tokenizer)
        self._backend = vocabulary.backend
        self._special_ids = vocabulary.special_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if vocabulary.is_byte_level else None
        self._has_byte_tokens = vocabulary.has_byte_tokens
        self._window: list[int] = []
        self._shown_chars = 0
        if self._utf8 is None:
            before = next((token_id for token_id in reversed(context_ids) if self._token(token_id)), None)
            self._start_window([] if before is None else [before])

    def push(self, token_id: int) -> str:
        """Adds a token; returns the text that became complete: often the token's own, perhaps none."""
        token = self._token(token_id)
        if not token:
            return ""
        if self._utf8 is not None:
            return self._utf8.decode(_token_bytes(token))
        self._window.append(token_id)
        if self._has_byte_tokens and _is_byte_token(token):
            return ""
        text = self._window_text()
        self._start_window([token_id])
        return text

    def finish(self) -> str:
        """Returns what was held back; bytes that make no character are U+FFFD. The next push starts a new text."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", final=True)
        text = self._window_text()
        self._start_window([])
        return text

    def _token(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for what decoding leaves out."""
        return "" if token_id in self._special_ids else self._backend.id_to_token(token_id) or ""

    def _window_text(self) -> str:
        return self._backend.decode(self._window)[self._shown_chars :]

    def _start_window(self, context_ids: list[int]) -> None:
        self._window = context_ids
        self._shown_chars = len(self._backend.decode(context_ids)) if context_ids else 0


def _is_byte_token(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; an added token with other characters stands for itself."""
    byte_of = _byte_alphabet()
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The printable character for each byte in byte-level BPE (GPT-2, Radford et al. 2019), the other way round."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(hidden)}
