"""Repair: cached tokens that hang on slid ones are computed again while nobody asks, until the sequence is exact.

Two phases a sequence, the most recently used sequence first. The stalest tokens come first, which
brings quality soonest. Then all go from left to right, which alone brings exactness: a token is exact only if all
before it are. Both go in small steps of which a request stops the one that runs, without a trace of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from ..config import PAGE_TOKENS
from ..reuse.index import CachedSequence, CacheIndex
from ..slide.draft import Draft
from .forward import Forward
from .scheduler import InterruptedStepError

STEP_TOKENS = 128
"""Tokens computed in one step. Larger steps use a CPU better; a request that comes in between loses at most one."""

WORTH_STALENESS = 0.01
"""From there on a token is computed in the first phase; it will be computed once more in the second."""


class Repair:
    """Makes cached sequences exact, a step at a time, on the engine's one thread.

    Pages are taken only if they are free: nothing is forgotten for repair.

    Attributes:
        tokens: Tokens that were made exact.
        seconds: Time spent, interrupted steps included.
        interrupted_steps: Steps that a request stopped.
    """

    def __init__(self, index: CacheIndex, forward: Forward, *, limit_seconds: float) -> None:
        """Takes what it works on.

        Args:
            index: What is cached.
            forward: The model's loop, over the pages that the index has.
            limit_seconds: Most time to spend before the next request.
        """
        self._index = index
        self._forward = forward
        self._limit_seconds = limit_seconds
        self._spent_seconds = 0.0
        self._failed: set[int] = set()
        self.tokens = 0
        self.seconds = 0.0
        self.interrupted_steps = 0

    def restart(self) -> None:
        """Begins a new period with its own time limit: a request came."""
        self._spent_seconds = 0.0

    @torch.inference_mode()
    def step(self, check: Callable[[], None]) -> bool:
        """Computes some tokens of one sequence again.

        Args:
            check: Called between layers; raises `InterruptedStepError` if somebody waits.

        Returns:
            Whether something may be left to do; False also if the time is spent or no page is free.
        """
        if self._spent_seconds >= self._limit_seconds:
            return False
        for sequence in self._index.by_recency():
            if sequence.pins or sequence.id in self._failed or sequence.exact_tokens == len(sequence):
                continue
            tokens = self._next_tokens(sequence)
            if len(tokens):
                self._recompute(sequence, tokens, check)
                return True
        return False

    def _next_tokens(self, sequence: CachedSequence) -> np.ndarray:
        """(n,) int64, increasing: what the next step computes; nothing if there is no free page."""
        start, num_pages = sequence.exact_tokens, self._forward.pool.num_free
        if len(sequence) - start > STEP_TOKENS:
            staleness = sequence.staleness[start:]
            owing = np.flatnonzero(staleness >= WORTH_STALENESS)
            if len(owing):
                stalest = start + owing[np.argsort(-staleness[owing], kind="stable")[:STEP_TOKENS]]
                of_stalest = sequence.table.page_indices(stalest)
                pages = list(dict.fromkeys(of_stalest.tolist()))[:num_pages]
                return np.sort(stalest[np.isin(of_stalest, pages)])
        tokens = np.arange(start, min(len(sequence), start + STEP_TOKENS))
        page_indices = sequence.table.page_indices(tokens)
        num_pages = min(num_pages, STEP_TOKENS // PAGE_TOKENS)
        within: np.ndarray = tokens[page_indices < page_indices[0] + num_pages]
        return within

    def _recompute(self, sequence: CachedSequence, tokens: np.ndarray, check: Callable[[], None]) -> None:
        started = time.perf_counter()
        draft = Draft(sequence.table, len(sequence), tokens, self._forward.pool, self._forward.queries)
        try:
            self._forward.rows(
                sequence.token_ids[tokens],
                sequence.positions[tokens],
                tokens,
                draft.table,
                wanted=0,
                before_layer=draft.copies(check),
            )
            self._forward.wait()  # else steps would pile up on a GPU, in front of the next request
        except InterruptedStepError:
            draft.discard()
            self.interrupted_steps += 1
        except BaseException:
            draft.discard()
            self._failed.add(sequence.id)
            raise
        else:
            draft.commit()
            self._note(sequence, tokens)
        finally:
            elapsed = time.perf_counter() - started
            self.seconds += elapsed
            self._spent_seconds += elapsed

    def _note(self, sequence: CachedSequence, tokens: np.ndarray) -> None:
        """Writes down what the step achieved."""
        sequence.hops[tokens] = 0
        sequence.staleness[tokens] = 0.0
        sequence.query_positions[tokens] = sequence.positions[tokens]
        follows = tokens == sequence.exact_tokens + np.arange(len(tokens))
        num_exact = int(follows.cumprod().sum())
        sequence.exact_tokens += num_exact
        self.tokens += num_exact
        if sequence.exact_tokens == len(sequence):
            self._index.settle(sequence.id)
