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
    encoded, _ = encode_with_last_piece(prompt, tokenizer, replies)
    return encoded


def encode_with_last_piece(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, replies: Replies | None = None
) -> tuple[EncodedPrompt, TextPiece]:
    """`encode_prompt`, and the text after the prompt's last special token, which an answer to it continues.

    Together with the answer's text and ids, that piece is what `replies` must give back when the answer returns as
    history. Its ids are those in the prompt. Arguments and errors are those of `encode_prompt`.
    """
    text = prompt.text
    _check_text(text, prompt)
    vocabulary = Vocabulary.of(tokenizer)
    starts = [0, *accumulate(len(segment.text) for segment in prompt.segments)]
    tokens = _encode_text(text, _Borders(prompt, starts), vocabulary)
    ids = np.asarray(tokens.ids, dtype=np.int64)
    ends = np.maximum.accumulate(np.asarray(tokens.ends, dtype=np.int64)) if len(ids) else ids
    breaks = [idx for idx, token_id in enumerate(tokens.ids) if token_id in vocabulary.special_ids]
    if replies is None:
        last = breaks[-1] + 1 if breaks else 0
        tail = TextPiece(text[tokens.ends[last - 1] :] if last else text, ids[last:])
    else:
        piece_stops = [tokens.starts[idx] for idx in breaks]
        ids, ends, tail = _with_replies(text, ids, ends, breaks, piece_stops, replies, tokenizer, vocabulary)
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
    tokens = vocabulary.encode(text)
    if not borders.any_literal():
        return tokens
    cuts: set[int] = {0, len(text)}
    typed: set[int] = set()
    while found := _literal_controls(text, tokens, borders, vocabulary):
        for start, stop in found:
            assert start not in typed, "a control token came out of text that was encoded without them"
            if inner := borders.inside(start, stop):
                cuts.update(inner)
            else:
                cuts.update((start, stop))
                typed.add(start)
        edges = sorted(cuts)
        tokens = _encode_pieces(text, [_Piece(a, b, a in typed) for a, b in pairwise(edges)], vocabulary)
    return tokens


def _encode_pieces(text: str, pieces: list[_Piece], vocabulary: Vocabulary) -> Tokens:
    whole = Tokens([], [], [])
    for start, stop, as_text in pieces:
        if as_text:
            ids = vocabulary.encode_as_text(text[start:stop])
            piece = Tokens(ids, [0] * len(ids), [stop - start] * len(ids))
        else:
            piece = (vocabulary.encode_inside if start else vocabulary.encode)(text[start:stop])
        whole.ids.extend(piece.ids)
        whole.starts.extend(start + offset for offset in piece.starts)
        whole.ends.extend(start + offset for offset in piece.ends)
    return whole


def _literal_controls(text: str, tokens: Tokens, borders: _Borders, vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """Ranges of control tokens with literal characters in them, without the blanks that a token may swallow."""
    found = []
    control_ids = vocabulary.control_ids
    for idx, token_id in enumerate(tokens.ids):
        if token_id not in control_ids:
            continue
        start, stop = tokens.starts[idx], tokens.ends[idx]
        core = text[start:stop].strip()
        if core:
            start += text[start:stop].index(core)
            stop = start + len(core)
        if borders.is_literal(start, stop):
            found.append((start, stop))
    return found


def _with_replies(
    text: str,
    ids: np.ndarray,
    ends: np.ndarray,
    breaks: list[int],
    piece_stops: list[int],
    replies: Replies,
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
) -> tuple[np.ndarray, np.ndarray, TextPiece]:
    """Puts the sampled ids of known pieces in place of the canonical ones.

    Args:
        text: The whole text.
        ids: (tokens,) int64.
        ends: (tokens,) int64: the character at which each token ends, not decreasing.
        breaks: The special tokens' indices.
        piece_stops: The characters at which the special tokens start.
        replies: As in `encode_prompt`.
        tokenizer: Decodes sampled ids, to find out where each of them ends.
        vocabulary: The tokenizer's.

    Returns:
        The ids and ends of all tokens, both (tokens,) int64, and the last piece.
    """
    all_ids: list[np.ndarray] = []
    all_ends: list[np.ndarray] = []
    start, char = 0, 0
    for stop, piece_stop in zip([*breaks, len(ids)], [*piece_stops, len(text)], strict=True):
        piece_text, piece_ids, piece_ends = text[char:piece_stop], ids[start:stop], ends[start:stop]
        sampled = _sampled_ids(piece_text, piece_ids, replies, vocabulary)
        if sampled is not None:
            piece_ids, piece_ends = sampled, char + _ends_of(sampled, len(piece_text), tokenizer)
        last = TextPiece(piece_text, piece_ids)
        all_ids += [piece_ids, ids[stop : stop + 1]]
        all_ends += [piece_ends, ends[stop : stop + 1]]
        if stop < len(ids):
            start, char = stop + 1, int(ends[stop])
    return np.concatenate(all_ids), np.concatenate(all_ends), last


def _sampled_ids(piece_text: str, canonical: np.ndarray, replies: Replies, vocabulary: Vocabulary) -> np.ndarray | None:
    """The sampled ids of a piece, (tokens,) int64, unless they would add or remove a control token."""
    sampled = replies(piece_text) if piece_text else None
    if sampled is None and piece_text.startswith(" ") and not vocabulary.is_byte_level:
        sampled = replies(piece_text[1:])  # SentencePiece decodes an answer without the space before it
    if sampled is None or not len(sampled):
        return None
    control_ids = list(vocabulary.control_ids)
    sampled = np.asarray(sampled, dtype=np.int64)
    kept, wanted = sampled[np.isin(sampled, control_ids)], canonical[np.isin(canonical, control_ids)]
    return sampled if np.array_equal(kept, wanted) else None


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
