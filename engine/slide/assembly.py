"""Carries out a plan on pages: which pages a new sequence shares, which it copies into, and the move of each layer.

A page is shared only if every one of its tokens keeps its place: the same slot, the same position, no correction.
Everything else that is reused is copied into the sequence's own pages, keys turned to their new position on the way.
The move happens layer by layer, right before that layer's attention needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..config import PAGE_TOKENS
from ..model.spec import RopeSpec
from ..position.rope import Rotary, rotate_keys, turn_by
from ..reuse.index import CachedSequence
from ..reuse.rules import ByDeviation, ByStaleness
from ..reuse.spans import Plan, Span
from .block_table import BlockTable, slot_gaps
from .pages import PagePool, PoolFullError
from .queries import StoredQueries
from .slots import Slots

WHOLLY_STALE = 1.0
"""Staleness of what slid behind a change where nobody measures it: it may be all wrong, until a turn corrects it."""


@dataclass(frozen=True)
class Move:
    """Tokens that are copied from a cached sequence, all turned by the same number of positions.

    Attributes:
        source: Slots to read, in token order.
        target: Slots to write, in token order, as many as the source has.
        rotation: The turn of the keys, or None where positions stay.
    """

    source: Slots
    target: Slots
    rotation: Rotary | None


class Assembly:
    """The block table of a new sequence and what must be moved into it.

    Attributes:
        table: Holds one reference to each of its pages.
        hops: (tokens,) uint8: rotations that each prompt token's key will have gone through.
        query_positions: (tokens,) int64: where each prompt token's stored query is rotated to.
        staleness: (tokens,) float32: what each prompt token is left with.
    """

    def __init__(
        self,
        plan: Plan,
        sequences: dict[int, CachedSequence],
        pool: PagePool,
        queries: StoredQueries,
        rope: RopeSpec,
        reserve_tokens: int,
        allocate: Callable[[int, int | None], list[int]],
    ) -> None:
        """Takes the pages that the plan needs.

        Args:
            plan: A valid plan.
            sequences: The cached sequences that it names, by id; they must stay alive until the last `slide`.
            pool: Where all pages lie.
            queries: The stored queries beside them.
            rope: The model's rotary embedding.
            reserve_tokens: Tokens to hold room for, at least the plan's.
            allocate: `allocate(num_pages, after)` returns pages with one reference each, evicting if it must.

        Raises:
            PoolFullError: From `allocate`. Whatever is raised, no reference is kept then.
        """
        self._pool = pool
        self._queries = queries
        self._rope = rope
        self._allocate = allocate
        self._positions = plan.positions
        self._device = pool.kv.device
        self.hops = _hops(plan, sequences)
        self.query_positions, self.staleness = _carried(plan, sequences)
        gaps = slot_gaps(plan.positions)
        shared = _shared_pages(plan, sequences, pool, gaps)
        num_places = reserve_tokens + (int(gaps[-1, 1]) if len(gaps) else 0)
        num_pages = -(-num_places // PAGE_TOKENS)
        missing = [page_idx for page_idx in range(num_pages) if page_idx not in shared]
        pool.retain(list(shared.values()))
        try:
            after = shared.get(missing[0] - 1) if missing else None
            own = dict(zip(missing, allocate(len(missing), after), strict=True))
        except BaseException:
            pool.release(list(shared.values()))
            raise
        pages = (own[page_idx] if page_idx in own else shared[page_idx] for page_idx in range(num_pages))
        self.table = BlockTable(pages, gaps)
        try:
            self._moves = _moves(plan, sequences, self.table, rope, self._device)
        except BaseException:
            pool.release(self.table.pages)
            raise

    def slide(self, layer_idx: int) -> None:
        """Copies one layer's reused K and V into place, keys turned to their new positions, and its stored queries."""
        layer = self._pool.layer(layer_idx)
        kv_heads = layer.shape[1] // 2
        for move in self._moves:
            if self._queries.wants(layer_idx):
                self._queries.move(layer_idx, move.source, move.target)
            kv = move.source.read(layer)
            if move.rotation is None:
                move.target.write(layer, kv)
                continue
            move.target.write(layer[:, :kv_heads], rotate_keys(kv[:, :kv_heads], move.rotation, self._rope))
            move.target.write(layer[:, kv_heads:], kv[:, kv_heads:])

    def correct(self, tokens: np.ndarray) -> np.ndarray:
        """Makes room for slid tokens to be computed again: a page that others read too is copied first.

        Args:
            tokens: (n,) int64, increasing: slid tokens that were chosen, once every layer has been slid.

        Returns:
            (n,) int64: those that can be written; the pool may be too full to copy a page.
        """
        page_indices = self.table.page_indices(tokens)
        tokens = tokens[np.isin(page_indices, self._make_writable(np.unique(page_indices)))]
        self.hops[tokens] = 0
        self.staleness[tokens] = 0.0
        self.query_positions[tokens] = self._positions[tokens]
        return tokens

    def _make_writable(self, page_indices: np.ndarray) -> np.ndarray:
        """Copies those of the pages that others read too, all at once; returns those that can be written now."""
        pages = np.asarray(self.table.pages, dtype=np.int64)[page_indices]
        is_shared = self._pool.references(pages) > 1
        shared = page_indices[is_shared]
        own = self._pages_for(len(shared))
        if own:
            copied = shared[: len(own)].tolist()
            old = [self.table.pages[page_idx] for page_idx in copied]
            source, target = (Slots(_slots_of(pages), self._device) for pages in (old, own))
            for layer in self._pool.kv:
                target.write(layer, source.read(layer))
            for layer_idx in self._queries.layers:
                self._queries.move(layer_idx, source, target)
            for page_idx, page in zip(copied, own, strict=True):
                self.table.pages[page_idx] = page
            self._pool.release(old)
        return np.concatenate([page_indices[~is_shared], shared[: len(own)]])

    def _pages_for(self, num_pages: int) -> list[int]:
        """So many new pages, or as many as there are."""
        own: list[int] = []
        try:
            return self._allocate(num_pages, None)
        except PoolFullError:
            with suppress(PoolFullError):  # one by one: evicting makes room for some where it does not for all
                while len(own) < num_pages:
                    own += self._allocate(1, None)
            return own


def _slots_of(pages: list[int]) -> np.ndarray:
    """(pages * PAGE_TOKENS,) int64."""
    slots: np.ndarray = (np.asarray(pages, dtype=np.int64)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).ravel()
    return slots


def _hops(plan: Plan, sequences: dict[int, CachedSequence]) -> np.ndarray:
    hops = np.zeros(plan.num_tokens, dtype=np.uint8)
    for span, sequence, tokens in _reused(plan, sequences):
        turned = sequence.positions[tokens] != plan.positions[span.start : span.stop]
        hops[span.start : span.stop] = sequence.hops[tokens] + turned
    hops[plan.corrected] = 0
    return hops


def _carried(plan: Plan, sequences: dict[int, CachedSequence]) -> tuple[np.ndarray, np.ndarray]:
    """Where the prompt tokens' stored queries are rotated to, and the staleness they bring along."""
    query_positions, staleness = plan.positions.copy(), np.zeros(plan.num_tokens, dtype=np.float32)
    is_measured = isinstance(plan.correction, ByStaleness)
    for span, sequence, tokens in _reused(plan, sequences):
        query_positions[span.start : span.stop] = sequence.query_positions[tokens]
        owes = sequence.staleness[tokens] if is_measured or not span.after_change else WHOLLY_STALE
        staleness[span.start : span.stop] = owes
    query_positions[plan.corrected] = plan.positions[plan.corrected]
    staleness[plan.corrected] = 0.0
    return query_positions, staleness


def _reused(plan: Plan, sequences: dict[int, CachedSequence]) -> list[tuple[Span, CachedSequence, slice]]:
    """The exact and slid spans, each with its cached sequence and the token range there."""
    reused = []
    for span in plan.spans:
        if span.source is not None and span.source_start is not None:
            tokens = slice(span.source_start, span.source_start + len(span))
            reused.append((span, sequences[span.source], tokens))
    return reused


def _shared_pages(plan: Plan, sequences: dict[int, CachedSequence], pool: PagePool, gaps: np.ndarray) -> dict[int, int]:
    """Page index in the new sequence → page of a cached one that serves unchanged.

    A page serves if all tokens of it are reused from one place, keep position and slot, and are not corrected.
    """
    shared: dict[int, int] = {}
    # One place more than tokens: where the next one would go, so that a page that is not full is not taken for whole.
    places = BlockTable((), gaps).places(np.arange(plan.num_tokens + 1))
    page_indices = places // PAGE_TOKENS
    stays = np.ones(plan.num_tokens, dtype=np.bool_)
    stays[plan.corrected] = False
    if isinstance(plan.correction, ByDeviation):  # every slid token is computed in some layers
        stays[plan.slid_tokens()] = False
    for span, sequence, tokens in _reused(plan, sequences):
        slots = sequence.table.slots(np.arange(tokens.start, tokens.stop))
        own = slice(span.start, span.stop)
        keeps = stays[own] & (sequence.positions[tokens] == plan.positions[own])
        keeps &= slots % PAGE_TOKENS == places[own] % PAGE_TOKENS
        starts = np.flatnonzero(np.diff(page_indices[own], prepend=-1))
        pages = slots // PAGE_TOKENS
        serves = np.logical_and.reduceat(keeps, starts)
        serves &= np.minimum.reduceat(pages, starts) == np.maximum.reduceat(pages, starts)
        if span.start and page_indices[span.start - 1] == page_indices[span.start]:
            serves[0] = False
        if page_indices[span.stop - 1] == page_indices[span.stop]:
            serves[-1] &= _may_append(span, sequence, tokens, pool, int(pages[-1]))
        firsts = starts[serves]
        shared.update(zip(page_indices[own][firsts].tolist(), pages[firsts].tolist(), strict=True))
    return shared


def _may_append(span: Span, sequence: CachedSequence, tokens: slice, pool: PagePool, page: int) -> bool:
    """Whether the new sequence may write on behind the cached one, in the page that this left partly filled.

    It may if it continues the cached sequence at its very end and nobody else refers to the page: the slots behind
    the end are nobody's then. Otherwise the page is copied on write.
    """
    continues = span.treatment == "exact" and span.start == tokens.start == 0 and tokens.stop == len(sequence.token_ids)
    return continues and pool.references([page])[0] == 1


def _moves(
    plan: Plan,
    sequences: dict[int, CachedSequence],
    table: BlockTable,
    rope: RopeSpec,
    device: torch.device,
) -> list[Move]:
    moves = []
    rotations: dict[int, Rotary] = {}
    for span, sequence, tokens in _reused(plan, sequences):
        deltas = plan.positions[span.start : span.stop] - sequence.positions[tokens]
        # Not by page: a page that continues a cached sequence holds its tokens and, behind them, tokens that move in.
        target_slots = table.slots(np.arange(span.start, span.stop))
        elsewhere = target_slots != sequence.table.slots(np.arange(tokens.start, tokens.stop))
        for start, stop in _even_runs(deltas, elsewhere):
            delta = int(deltas[start])
            if delta and delta not in rotations:
                rotations[delta] = turn_by(delta, rope, device)
            source = sequence.table.slots(np.arange(tokens.start + start, tokens.start + stop))
            target = table.slots(np.arange(span.start + start, span.start + stop))
            moves.append(Move(Slots(source, device), Slots(target, device), rotations.get(delta)))
    return moves


def _even_runs(deltas: np.ndarray, wanted: np.ndarray) -> list[tuple[int, int]]:
    """Maximal ranges of wanted tokens with one delta."""
    borders = np.flatnonzero((np.diff(deltas) != 0) | (wanted[1:] != wanted[:-1])) + 1
    edges = [0, *borders.tolist(), len(deltas)]
    return [(start, stop) for start, stop in pairwise(edges) if wanted[start]]
