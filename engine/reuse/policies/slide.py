"""`slide`: the common prefix is reused exactly, and what follows a change is moved from one earlier sequence.

Of the runs that could slide, a short one between two changes is computed with the text around it.

The donor is a sequence of the same session (any branch): its KV was computed in context and carries that context into
the answer. Which slid tokens are corrected is chosen by their staleness and the demand for them, after planning
(`run.correction`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..diff import common_prefix_tokens, matching_runs
from ..index import CachedSequence
from ..rules import ByStaleness
from ..spans import Plan, Span, add_fresh
from .interface import Isolation, PlanRequest
from .prefix import by_recency, exact_span

MAX_DIFFS = 8
"""Donors compared in full; the others promised less."""


@dataclass(frozen=True)
class SlidRun:
    """Prompt tokens that a donor has in one piece, and those of them that slide.

    Attributes:
        start: First prompt token.
        source_start: The donor's token there.
        after_change: Whether what stands before the run changed.
        tokens: (n,) int64: the prompt tokens that slide, in pieces of at least `min_slide_tokens`.
    """

    start: int
    source_start: int
    after_change: bool
    tokens: np.ndarray


class Slide:
    """Exact prefix, then slid runs, of which stale tokens in demand are corrected; the rest is fresh."""

    name = "slide"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """Exact, slid and fresh spans; the engine selects what to correct, at most `correction_share`."""
        corrects = request.config.correction_share > 0.0
        spans, runs = slid_spans(request, worthwhile if corrects else list)
        rule = ByStaleness(request.config.staleness_bound, request.config.correction_share)
        return Plan(
            spans=tuple(spans),
            positions=request.positions,
            correction=rule if runs and corrects else None,
            policy=self.name,
        )


def slid_spans(
    request: PlanRequest, keep: Callable[[list[SlidRun]], list[SlidRun]] = list
) -> tuple[list[Span], list[SlidRun]]:
    """The spans of a prompt whose unchanged text slides, and the slid runs among them.

    Args:
        request: What is planned.
        keep: Takes the runs of a donor that could slide, in order, and gives those that do.
    """
    exact = exact_span(request)
    spans = [exact] if exact else []
    donor, runs = _best_donor(request, len(exact) if exact else 0, keep)
    for run in runs:
        for start, stop in _pieces(run.tokens):
            add_fresh(spans, start)
            spans.append(Span(start, stop, "slid", donor, run.source_start + start - run.start, run.after_change))
    add_fresh(spans, len(request.prompt))
    return spans, runs


def worthwhile(runs: list[SlidRun]) -> list[SlidRun]:
    """The runs that are longer than what is computed between them and the next one, and the last.

    Text between two slid runs is computed before anything is corrected, and again over what is corrected before it. To
    compute a run that is no longer with it costs about as much as that second time, which it often saves, and the
    run, which the whole rest of the prompt sees, has its true context then: on edited memory blocks of eight lines
    this takes about a third off the divergence.
    """
    kept = runs[-1:]
    for run in runs[-2::-1]:
        if len(run.tokens) > kept[0].tokens[0] - run.tokens[-1] - 1:
            kept.insert(0, run)
    return kept


def _best_donor(
    request: PlanRequest, exact_tokens: int, keep: Callable[[list[SlidRun]], list[SlidRun]]
) -> tuple[int | None, list[SlidRun]]:
    """The donor that slides most tokens behind the exact ones, the most recently used of equals, and its runs."""
    prompt = request.prompt.token_ids[:-1]
    wanted = len(prompt) - exact_tokens
    if request.config.share_slid:
        donors = by_recency(request.sequences)
    elif request.session is not None:
        donors = [donor for donor in by_recency(request.sequences) if donor.session == request.session]
    else:
        donors = []
    promises = _promises(prompt[exact_tokens:], donors, request.config.min_slide_tokens) if wanted > 0 else []
    ranking = sorted(zip(promises, donors, strict=False), key=lambda pair: (-pair[0], -pair[1].last_used))
    best = (0, 0)
    found: tuple[int | None, list[SlidRun]] = (None, [])
    for promise, donor in ranking[:MAX_DIFFS]:
        if (promise, donor.last_used) <= best:
            break
        runs = keep(list(_runs(request, donor, exact_tokens)))
        rating = (sum(len(run.tokens) for run in runs), donor.last_used)
        if runs and rating > best:
            best, found = rating, (donor.id, runs)
    return found


def _promises(tokens: np.ndarray, donors: list[CachedSequence], min_tokens: int) -> list[int]:
    """For each donor an upper bound of the tokens it can slide: those in runs whose every token it has somewhere."""
    if len(donors) <= 1:
        return [len(tokens)] * len(donors)
    seen = np.zeros(1 + max(int(tokens.max()), *(int(donor.token_ids.max()) for donor in donors)), dtype=np.bool_)
    promises = []
    for donor in donors:
        seen[donor.token_ids] = True
        promises.append(sum(stop - start for start, stop in _true_runs(seen[tokens], min_tokens)))
        seen[donor.token_ids] = False
    return promises


def _runs(request: PlanRequest, donor: CachedSequence, exact_tokens: int) -> Iterator[SlidRun]:
    """What the donor has of the prompt between its exact part and its last token, in order."""
    prompt = request.prompt.token_ids[:-1]
    same = common_prefix_tokens(prompt, donor.token_ids)
    # Its tainted part of an unchanged prefix; behind a range that was not there or is there no more it has moved.
    stays = common_prefix_tokens(request.positions[:same], donor.positions)
    if stays > exact_tokens:
        yield from _run(request, donor, exact_tokens, exact_tokens, stays - exact_tokens, after_change=False)
    moved = max(exact_tokens, stays)
    if same > moved:
        yield from _run(request, donor, moved, moved, same - moved, after_change=True)
    start = max(same, exact_tokens)
    for at, to, length in matching_runs(prompt[start:], donor.token_ids[same:], request.config.min_slide_tokens):
        yield from _run(request, donor, start + at, same + to, length, after_change=True)


def _run(
    request: PlanRequest, donor: CachedSequence, start: int, source_start: int, num_tokens: int, *, after_change: bool
) -> Iterator[SlidRun]:
    """The run without tokens whose keys were rotated too often, or nothing if no piece is left that is long enough."""
    source = slice(source_start, source_start + num_tokens)
    moves = donor.positions[source] != request.positions[start : start + num_tokens]
    allowed = donor.hops[source].astype(np.int64) + moves <= request.config.max_hops
    pieces = _true_runs(allowed, request.config.min_slide_tokens)
    if pieces:
        tokens = np.concatenate([np.arange(start + first, start + last, dtype=np.int64) for first, last in pieces])
        yield SlidRun(start, source_start, after_change, tokens)


def _true_runs(mask: np.ndarray, min_tokens: int) -> list[tuple[int, int]]:
    """The (start, stop) of runs of True that are at least `min_tokens` long."""
    borders = np.flatnonzero(np.diff(np.concatenate([[0], mask.view(np.int8), [0]])))
    starts, stops = borders[::2], borders[1::2]
    long = stops - starts >= min_tokens
    return list(zip(starts[long].tolist(), stops[long].tolist(), strict=True))


def _pieces(tokens: np.ndarray) -> list[tuple[int, int]]:
    """Increasing tokens as (start, stop) of contiguous pieces."""
    breaks = np.flatnonzero(np.diff(tokens) != 1) + 1
    return [(int(piece[0]), int(piece[-1]) + 1) for piece in np.split(tokens, breaks)]
