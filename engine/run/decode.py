"""Decode: samples an answer token by token and turns it into text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch

from .detokenize import Detokenizer
from .request import FinishReason, Piece
from .sampling import Sampler
from .stop import StopStrings


@dataclass
class Answer:
    """An answer as it grows.

    Attributes:
        token_ids: Every sampled token, a stop token included.
        text: What was emitted so far.
        finish_reason: Why it ended, or None.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None


def decode(
    answer: Answer,
    logits: torch.Tensor,
    step: Callable[[int], torch.Tensor],
    *,
    sampler: Sampler,
    detokenizer: Detokenizer,
    stop_strings: StopStrings,
    stop_token_ids: Collection[int],
    max_tokens: int,
    check: Callable[[], None],
) -> Iterator[Piece]:
    """Samples until a stop token, a stop string or the limit.

    Args:
        answer: Filled as the answer grows.
        logits: (1, vocab) float32 of the prompt's last token.
        step: Computes a sampled token and returns the logits after it, (1, vocab) float32. Never called for the last
            token of an answer, which therefore has no K and V.
        sampler: Draws a token from logits.
        detokenizer: Turns tokens into whole characters.
        stop_strings: Holds back what may become a stop string.
        stop_token_ids: Tokens that end the answer.
        max_tokens: Upper limit of the answer, at least 1.
        check: Called before every token; raises to stop.

    Yields:
        One piece a token, before the next token is computed.
    """
    while True:
        check()
        token_id = sampler.sample(logits[-1], answer.token_ids)
        answer.token_ids.append(token_id)
        is_stop_token = token_id in stop_token_ids
        text, stopped = stop_strings.feed("" if is_stop_token else detokenizer.push(token_id))
        if stopped or is_stop_token:
            answer.finish_reason = "stop"
        elif len(answer.token_ids) >= max_tokens:
            answer.finish_reason = "length"
        if answer.finish_reason is not None and not stopped:
            tail, stopped = stop_strings.feed(detokenizer.finish())
            text += tail
            if stopped:
                answer.finish_reason = "stop"
            else:
                text += stop_strings.flush()
        answer.text += text
        yield Piece(text, (token_id,), answer.finish_reason)
        if answer.finish_reason is not None:
            return
        logits = step(token_id)
