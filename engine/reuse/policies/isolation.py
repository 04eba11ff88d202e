"""Segments computed in isolation: with nothing before them, as the caches do that reuse text wherever it stands.

Copies lie in a space of their own (`SpaceKey.context`), so no policy that reuses KV in context ever meets one. A copy
saw its own segment alone: it carries no other conversation's context and serves every session of its namespace.
Pure; `run.registration` computes the copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from ...segments import EncodedPrompt
from ..diff import common_prefix_tokens
from ..index import CachedSequence
from ..spans import Span, add_fresh
from .interface import Isolation, PlanRequest

BORDER_TOKENS = 4
"""So many tokens at a segment's end may differ from its copy's: text is tokenized across segments, so what follows a
segment may change how it ends. They are computed."""


def isolated_spans(request: PlanRequest, isolation: Isolation) -> list[Span]:
    """The spans of a prompt whose segments are reused from isolated copies.

    The prompt's first segment is exact: nothing stands before it in the prompt either. Every other one is slid, and
    what no copy holds is fresh. The prompt's last token is fresh always.
    """
    spans: list[Span] = []
    for start, stop in request.prompt.segment_ranges():
        stop = min(stop, len(request.prompt) - 1)
        tokens, positions = request.prompt.token_ids[start:stop], request.positions[start:stop]
        copies = [copy for copy in request.sequences if _rotations(copy, positions) <= request.config.max_hops]
        copy, num_tokens = find_copy(tokens, positions, copies, isolation, request.config.min_slide_tokens)
        if copy is None:
            continue
        add_fresh(spans, start)
        is_exact = start == 0 and np.array_equal(copy.positions[:num_tokens], positions[:num_tokens])
        treatment: Literal["exact", "slid"] = "exact" if is_exact else "slid"
        spans.append(Span(start, start + num_tokens, treatment, copy.id, 0, after_change=start > 0))
    add_fresh(spans, len(request.prompt))
    return spans


def find_copy(
    tokens: np.ndarray,
    positions: np.ndarray,
    sequences: Sequence[CachedSequence],
    isolation: Isolation,
    min_tokens: int,
) -> tuple[CachedSequence | None, int]:
    """The copy of a segment that need not move, if there is one, and of these the one that holds most of it.

    Args:
        tokens: (n,) int64: the segment.
        positions: (n,) int64: its position ids.
        sequences: What is cached in isolation. More tokens behind the segment's do no harm: what comes before them
            does not depend on them.
        isolation: The policy's way.
        min_tokens: A shorter segment has no copy.

    Returns:
        The copy, or None, and how many of the segment's tokens it holds, from the first on.
    """
    best: tuple[bool, int] = (False, 0)
    found = None
    for sequence in sequences:
        common = common_prefix_tokens(tokens, sequence.token_ids)
        if common < max(min_tokens, len(tokens) - BORDER_TOKENS):
            continue
        rating = (np.array_equal(sequence.positions[:common], positions[:common]), common)
        if (isolation.moves or rating[0]) and rating > best:
            best, found = rating, sequence
    return found, best[1]


def missing_segments(
    prompt: EncodedPrompt,
    positions: np.ndarray,
    sequences: Sequence[CachedSequence],
    isolation: Isolation,
    min_tokens: int,
) -> list[tuple[int, int]]:
    """The ranges (start, stop) of a prompt's segments of at least `min_tokens` of which no copy is cached.

    Args:
        prompt: What was asked.
        positions: (tokens,) int64: its position ids.
        sequences: What is cached in isolation.
        isolation: The policy's way.
        min_tokens: Shorter segments are never kept.
    """
    return [
        (start, stop)
        for start, stop in prompt.segment_ranges()
        if stop - start >= min_tokens
        and find_copy(prompt.token_ids[start:stop], positions[start:stop], sequences, isolation, min_tokens)[0] is None
    ]


def _rotations(copy: CachedSequence, positions: np.ndarray) -> int:
    """Rotations that a copy's keys will have gone through if it serves at some positions."""
    moved = len(positions) == 0 or copy.positions[0] != positions[0]
    return int(copy.hops.max()) + moved
