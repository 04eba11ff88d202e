"""Prompts become token ids: one text, so that the ids are the chat template's own, with segments on token offsets.

Control tokens typed inside literal segments stay text. Only prompts that hold one pay for it and are encoded in
pieces; all others are encoded in one call, exactly as the template's rendering would be.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .errors import PromptError
from .run.detokenize import Detokenizer
from .segments import EncodedPrompt, Prompt
from .vocabulary import Tokens, Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Replies = Callable[[str], "np.ndarray | None"]


class TextPiece(NamedTuple):
    """Text between two special tokens, and its ids, (tokens,) int64."""

    text: str
    ids: np.ndarray


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, replies: Replies | None = None) -> EncodedPrompt:
    """Tokenizes a prompt as one text and maps its segments onto token offsets.

    A prompt of a chat template gets exactly the ids of its text. A plain prompt (`template` None) also gets what the
    tokenizer puts before a text (a BOS), unless it begins with that; an EOS is never added. A control token inside a
    literal segment is encoded as text, as by transformers' `sanitize_control_tokens`; one that would come about where
    a literal segment meets other text is cut there.

    Args:
        prompt: What to tokenize.
        tokenizer: A fast Hugging Face tokenizer.
        replies: Gives, for the text of a piece between special tokens, the ids that were sampled for it, or None.
            Sampled ids need not be the canonical ones. They are taken unless they would add or remove a control token.

    Raises:
        PromptError: The text cannot be encoded (a lone surrogate), or encodes to no token.
        UnsupportedModelError: The tokenizer is not a fast one.
    """
    encoded, _ = _encode(prompt, tokenizer, replies)
    return encoded


def last_piece(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, replies: Replies | None = None) -> TextPiece:
    """The text after a prompt's last special token, with its ids: what an answer to the prompt continues.

    Together with the answer's text and ids it is what `replies` must give back when the answer returns as history.
    Arguments and errors are those of `encode_prompt`.
    """
    _, piece = _encode(prompt, tokenizer, replies)
    return piece


def _encode(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, replies: Replies | None
) -> tuple[EncodedPrompt, TextPiece]:
    text = prompt.text
    _check_text(text, prompt)
    vocabulary = Vocabulary.of(tokenizer)
    starts = [0, *accumulate(len(segment.text) for segment in prompt.segments)]
    tokens = _encode_text(text, _Borders(prompt, starts), vocabulary)
    ids = np.asarray(tokens.ids, dtype=np.int64)
    ends = np.maximum.accumulate(np.asarray(tokens.ends, dtype=np.int64)) if tokens.ends else ids
    breaks = np.flatnonzero(np.isin(ids, list(vocabulary.special_ids)))
    last = int(breaks[-1]) + 1 if len(breaks) else 0
    tail = TextPiece(text[ends[last - 1] :] if last else text, ids[last:])
    if replies is not None:
        ids, ends, tail = _with_replies(text, ids, ends, breaks, replies, tokenizer, vocabulary)
    opening = vocabulary.opening_ids
    if prompt.template is None and opening and ids[: len(opening)].tolist() != opening:
        ids = np.concatenate([np.asarray(opening, dtype=np.int64), ids])
        ends = np.concatenate([np.zeros(len(opening), dtype=np.int64), ends])
    if not len(ids):
        raise PromptError(f"the prompt's text {text[:40]!r} encodes to no token: give text that the model can read")
    segment_starts = np.searchsorted(ends, starts[:-1], side="right")
    segment_starts[0] = 0
    encoded = EncodedPrompt(
        token_ids=ids,
        segment_starts=tuple(segment_starts.tolist()),
        roles=tuple(segment.role for segment in prompt.segments),
    )
    return encoded, tail


def _check_text(text: str, prompt: Prompt) -> None:
    """Refuses what has no UTF-8 form; every other character, NUL included, is encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        offset = error.start
        for segment_idx, segment in enumerate(prompt.segments):
            if offset < len(segment.text):
                raise PromptError(
                    f"segment {segment_idx} ({segment.role}) holds the lone surrogate {text[error.start]!r} at "
                    f"character {offset}, which no encoding can carry: remove it, or decode the text's source with "
                    "errors='replace'"
                ) from None
            offset -= len(segment.text)


class _Borders:
    """Where segments begin and which characters are literal."""

    def __init__(self, prompt: Prompt, starts: list[int]) -> None:
        self._starts = starts
        self._literal_starts: list[int] = []
        self._literal_stops: list[int] = []
        for segment, start in zip(prompt.segments, starts, strict=False):
            if segment.literal and segment.text:
                self._literal_starts.append(start)
                self._literal_stops.append(start + len(segment.text))

    def any_literal(self) -> bool:
        return bool(self._literal_starts)

    def is_literal(self, start: int, stop: int) -> bool:
        """Whether a character of the range is literal."""
        idx = bisect_right(self._literal_stops, start)
        return idx < len(self._literal_starts) and self._literal_starts[idx] < stop

    def inside(self, start: int, stop: int) -> list[int]:
        """Segment borders strictly inside the range."""
        return self._starts[bisect_right(self._starts, start) : bisect_left(self._starts, stop)]


class _Piece(NamedTuple):
    """A range of the text that is encoded by itself; `as_text` ignores control tokens."""

    start: int
    stop: int
    as_text: bool


def _encode_text(text: str, borders: _Borders, vocabulary: Vocabulary) -> Tokens:
    """Encodes the whole text; in pieces only where literal characters would take part in a control token."""
    tokens, starts = vocabulary.encode(text)
    if not borders.any_literal():
        return tokens
    cuts: set[int] = {0, len(text)}
    typed: set[int] = set()
    while found := _literal_controls(text, tokens, starts, borders, vocabulary, typed):
        for start, stop in found:
            if inner := borders.inside(start, stop):
                cuts.update(inner)
            else:
                cuts.update((start, stop))
                typed.add(start)
        edges = sorted(cuts)
        pieces = [_Piece(a, b, a in typed) for a, b in pairwise(edges)]
        tokens, starts = _encode_pieces(text, pieces, vocabulary)
    return tokens


def _encode_pieces(text: str, pieces: list[_Piece], vocabulary: Vocabulary) -> tuple[Tokens, list[int]]:
    ids: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    for start, stop, as_text in pieces:
        if as_text:
            piece_ids = vocabulary.encode_as_text(text[start:stop])
            ids += piece_ids
            starts += [start] * len(piece_ids)
            ends += [stop] * len(piece_ids)
            continue
        encode = vocabulary.encode_inside if start else vocabulary.encode
        piece, piece_starts = encode(text[start:stop])
        ids += piece.ids
        starts += [start + offset for offset in piece_starts]
        ends += [start + offset for offset in piece.ends]
    return Tokens(ids, ends), starts


def _literal_controls(
    text: str, tokens: Tokens, starts: list[int], borders: _Borders, vocabulary: Vocabulary, typed: set[int]
) -> list[tuple[int, int]]:
    """Ranges of control tokens with literal characters in them, without the blanks that a token may swallow."""
    found = []
    control_ids = vocabulary.control_ids
    for idx, token_id in enumerate(tokens.ids):
        if token_id not in control_ids:
            continue
        start, stop = starts[idx], tokens.ends[idx]
        core = text[start:stop].strip()
        if core:
            start += text[start:stop].index(core)
            stop = start + len(core)
        if borders.is_literal(start, stop):
            assert start not in typed, "a control token came out of text that was encoded without them"
            found.append((start, stop))
    return found


def _with_replies(
    text: str,
    ids: np.ndarray,
    ends: np.ndarray,
    breaks: np.ndarray,
    replies: Replies,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
) -> tuple[np.ndarray, np.ndarray, TextPiece]:
    """Puts the sampled ids of known pieces in place of the canonical ones.

    Returns:
        The ids and ends of all tokens, both (tokens,) int64, and the last piece.
    """
    all_ids: list[np.ndarray] = []
    all_ends: list[np.ndarray] = []
    start, char = 0, 0
    for stop in [*breaks.tolist(), len(ids)]:
        is_last = stop == len(ids)
        # A special token may swallow blanks before it (lstrip); they are of no piece, and neither is its own text.
        piece_stop = len(text) if is_last else int(ends[stop - 1]) if stop > start else char
        piece_text, piece_ids, piece_ends = text[char:piece_stop], ids[start:stop], ends[start:stop]
        sampled = replies(piece_text) if piece_text else None
        if sampled is not None and _same_controls(sampled, piece_ids, vocabulary):
            piece_ids = np.asarray(sampled, dtype=np.int64)
            piece_ends = char + _ends_of(piece_ids, len(piece_text), tokenizer)
        last = TextPiece(piece_text, piece_ids)
        all_ids += [piece_ids, ids[stop : stop + 1]]
        all_ends += [piece_ends, ends[stop : stop + 1]]
        if not is_last:
            start, char = stop + 1, int(ends[stop])
    return np.concatenate(all_ids), np.concatenate(all_ends), last


def _same_controls(sampled: np.ndarray, canonical: np.ndarray, vocabulary: Vocabulary) -> bool:
    control_ids = list(vocabulary.control_ids)
    return len(sampled) > 0 and np.array_equal(
        sampled[np.isin(sampled, control_ids)], canonical[np.isin(canonical, control_ids)]
    )


def _ends_of(ids: np.ndarray, num_chars: int, tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Where each token's text ends in a piece, from the growth of the decoded text; (tokens,) int64.

    Decoding may leave out a leading blank; it is counted to the first token.
    """
    detokenizer = Detokenizer(tokenizer)
    ends, num_decoded = [], 0
    for token_id in ids.tolist():
        grown = len(detokenizer.push(token_id))
        ends.append(num_decoded + max(grown, 1))  # a token without text of its own yet belongs to the next character
        num_decoded += grown
    num_decoded += len(detokenizer.finish())
    return np.minimum(np.asarray(ends, dtype=np.int64) + max(num_chars - num_decoded, 0), num_chars)
