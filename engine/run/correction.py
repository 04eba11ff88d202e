"""Correction: which slid tokens of a plan are computed again, once the changed text and the question are.

A token is worth it if it is stale and the new text behind the slid tokens looks at it. Not here: how stale a token is
with respect to some keys, and how much in demand (`reuse.staleness`), and which are picked (`reuse.select`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..reuse.diff import common_prefix_tokens
from ..reuse.index import CachedSequence
from ..reuse.select import select_needed
from ..reuse.spans import Plan, Span
from ..reuse.staleness import Asking, Keys, attention_change, demand
from ..slide.assembly import Assembly
from .forward import Forward

ASKING_TOKENS = 32
"""Tokens behind the last slid one that say what is in demand. They are computed twice if anything is corrected."""


class Correction:
    """Chooses what to correct in one prompt.

    Attributes:
        first_tokens: (n,) int64, increasing: what is computed before `choose`: the fresh tokens between the slid ones,
            and the first behind them.
        chosen: (n,) int64, increasing: the slid tokens to compute again; empty until `choose`.
    """

    def __init__(
        self,
        token_ids: np.ndarray,
        plan: Plan,
        sequences: Mapping[int, CachedSequence],
        assembly: Assembly,
        forward: Forward,
        *,
        prompt_tokens: int,
        bound: float,
        cap_share: float,
    ) -> None:
        """Takes what it needs to know.

        Args:
            token_ids: (tokens,) int64: the prompt, and what is compared behind it.
            plan: Its slid tokens all come from one donor.
            sequences: The cached sequences that the plan names, pinned.
            assembly: The new sequence's pages.
            forward: The model's loop, over the pages that the assembly is of.
            prompt_tokens: Tokens of the prompt proper.
            bound: Stale attention of the new text that may be left, as a share of all its attention.
            cap_share: Most of the slid tokens that are chosen, as a share.
        """
        self._token_ids = token_ids
        self._plan = plan
        self._assembly = assembly
        self._forward = forward
        self._bound = bound
        self._cap_share = cap_share
        self._spans = [span for span in plan.spans if span.treatment == "slid"]
        self._donor = _donor(self._spans, sequences)
        fresh = plan.fresh_tokens()
        behind = fresh[(fresh > plan.slid_tokens()[-1]) & (fresh < prompt_tokens)]
        self._asking = behind[:ASKING_TOKENS]
        self.first_tokens = np.concatenate([fresh[fresh < behind[0]], self._asking])
        self.chosen = np.empty(0, dtype=np.int64)

    def choose(self) -> np.ndarray:
        """Measures every slid token's staleness and demand, and picks; `first_tokens` are computed.

        Returns:
            (n,) int64, increasing: `chosen`. What the others owe is written to the assembly.
        """
        slid = self._plan.slid_tokens()
        debt = self._assembly.staleness[slid]
        staleness = np.minimum(debt + self._owed(slid), 1.0)
        self._assembly.staleness[slid] = staleness
        picked = slid[select_needed(staleness, self._demand(slid), self._bound, self._cap_share)]
        self.chosen = self._assembly.correct(picked)
        return self.chosen

    def _demand(self, slid: np.ndarray) -> np.ndarray:
        """(slid,) float32: what the new text behind the slid tokens pays to each of them."""
        forward, table = self._forward, self._assembly.table
        asking = Asking(
            Keys(slid, table, forward.decoder.device), self._asking, np.zeros(len(self._asking), dtype=np.int64)
        )
        slots = forward.to_device(table.slots(self._asking))
        paid: np.ndarray = demand(forward.pool, forward.queries, forward.decoder.spec, slots, asking).cpu().numpy()
        return paid

    def _owed(self, slid: np.ndarray) -> np.ndarray:
        """(slid,) float32: how much each one's attention changed with this turn."""
        donor, plan, forward = self._donor, self._plan, self._forward
        donor_tokens = np.concatenate([_source_tokens(span) for span in self._spans])
        recorded = donor.query_positions[donor_tokens]
        same = common_prefix_tokens(self._token_ids, donor.token_ids)
        gone = Keys(_others(donor_tokens, same), donor.table, forward.decoder.device)
        new = Keys(_others(slid, same), self._assembly.table, forward.decoder.device)
        change = attention_change(
            forward.pool,
            forward.queries,
            forward.decoder.spec,
            forward.to_device(donor.table.slots(donor_tokens)),
            gone=Asking(gone, donor_tokens, donor.positions[donor_tokens] - recorded),
            new=Asking(new, slid, plan.positions[slid] - recorded),
        )
        owed: np.ndarray = change.cpu().numpy()
        return owed


def _donor(spans: list[Span], sequences: Mapping[int, CachedSequence]) -> CachedSequence:
    sources = {span.source for span in spans}
    assert len(sources) == 1, "slid spans come from one donor"
    (source,) = sources
    assert source is not None
    return sequences[source]


def _others(tokens: np.ndarray, same: int) -> np.ndarray:
    """(n,) int64: what stands before the last of the slid tokens, neither slid itself nor in the common prefix."""
    others = np.arange(tokens[-1]) >= same
    others[tokens[:-1]] = False
    return np.flatnonzero(others)


def _source_tokens(span: Span) -> np.ndarray:
    assert span.source_start is not None
    return np.arange(span.source_start, span.source_start + len(span))
