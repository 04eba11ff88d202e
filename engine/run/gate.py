"""The gate: whether prompts of a kind may slide, by how far the last measured ones were from their full prefill.

Plain numbers: it decides what is measured and what follows from it, by namespace, template and policy. The model is the
engine's own. Measuring is `run.shadow`'s business. A closed gate lets nothing slide: `prefix` reads only what is exact,
so nothing more has to be computed than is unsafe.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..reuse.index import SpaceKey
from .drift import Drift

WEIGHT = 0.25
"""Of the newest measurement in the mean, which begins at 0: a kind of prompt is trusted until it is measured."""

MOST_BOUNDS = 8.0
"""A measurement counts at most so many times the bound, so that one outlier does not close a gate for good: it takes
five good ones to open it again."""

CLOSED_SHARE = 0.25
"""Of the refused requests so many are measured, if not more are wanted anyway."""

MAX_KEYS = 1024


class GateKey(NamedTuple):
    """A kind of prompt.

    Attributes:
        space: Its namespace and template.
        policy: The policy that it asks for.
    """

    space: SpaceKey
    policy: str


@dataclass(frozen=True)
class GateState:
    """What is known of one kind of prompt.

    Attributes:
        namespace: The tenant.
        template: Identity of the chat template, or None for plain text.
        policy: The policy that was asked for.
        is_open: Whether such prompts may slide.
        mean_kl: Exponential mean of the measured KL(full ‖ reuse) of the next token, nats.
        measured: Measurements since the engine was loaded.
        latest: The latest of them, or None.
    """

    namespace: str
    template: str | None
    policy: str
    is_open: bool = True
    mean_kl: float = 0.0
    measured: int = 0
    latest: Drift | None = None


class Gate:
    """The gates of one engine, the least recently used forgotten first.

    They close when the mean passes the bound and open again when it is at most half of it, so that it does not swing.
    """

    def __init__(self, share: float, kl_bound: float) -> None:
        """Opens all gates.

        Args:
            share: Of the requests that slid, how many are measured, 0 to 1; 0 measures and refuses nothing.
            kl_bound: Mean KL past which nothing slides, nats.
        """
        self._share = share
        self._kl_bound = kl_bound
        self._states: OrderedDict[GateKey, GateState] = OrderedDict()
        self._due: dict[GateKey, float] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is measured."""
        return self._share > 0.0

    def refusal(self, key: GateKey) -> str | None:
        """Why prompts of this kind may not slide, for the receipt; None if they may."""
        state = self._states.get(key)
        if state is None or state.is_open:
            return None
        return (
            f"drift: recent answers were {state.mean_kl:.2g} nats from a full prefill in the mean, more than "
            f"gate_kl_bound = {self._kl_bound:g}, so that only exact text is reused until they are within half of that"
        )

    def is_due(self, key: GateKey) -> bool:
        """Counts a request that slid, or was refused to; whether it is to be measured, the first one always."""
        if not self.is_on:
            return False
        state = self._state(key)
        share = self._share if state.is_open else max(self._share, CLOSED_SHARE)
        # What could not be measured stays due, but does not pile up.
        self._due[key] = min(self._due.get(key, 1.0 - share) + share, 2.0)
        return self._due[key] >= 1.0 - 1e-9

    def note(self, key: GateKey, drift: Drift) -> None:
        """Takes in a measurement; one that is not finite says nothing."""
        if not math.isfinite(drift.kl):
            return
        state = self._state(key)
        self._due[key] = max(0.0, self._due.get(key, 1.0) - 1.0)
        counted = min(drift.kl, MOST_BOUNDS * self._kl_bound)
        mean_kl = state.mean_kl + WEIGHT * (counted - state.mean_kl)
        is_open = mean_kl <= (self._kl_bound if state.is_open else self._kl_bound / 2)
        self._states[key] = replace(state, is_open=is_open, mean_kl=mean_kl, measured=state.measured + 1, latest=drift)

    def states(self) -> tuple[GateState, ...]:
        """What is known of each kind of prompt; safe from any thread."""
        return tuple(self._states.copy().values())

    def _state(self, key: GateKey) -> GateState:
        """The key's state, made at first use, and the most recently used."""
        if key not in self._states:
            self._states[key] = GateState(key.space.namespace, key.space.template, key.policy)
        self._states.move_to_end(key)
        while len(self._states) > MAX_KEYS:
            forgotten, _ = self._states.popitem(last=False)
            self._due.pop(forgotten, None)
        return self._states[key]
