"""What the engine's thread does while nobody asks: measures the drift of the latest answer, then repairs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..reuse.index import CachedSequence
from .gate import Gate, GateKey
from .preparation import Preparation
from .prepared import Prepared
from .repair import Repair
from .request import Call
from .shadow import Answered, Shadow

GPU_GATE_SHARE = 0.02
"""Of the requests that slide so many are measured on a GPU unless the user says otherwise; on a CPU none."""


class IdleWork:
    """The gate's shadow runs and repair, in steps that a request stops.

    Attributes:
        gate: Which prompts may slide.
        shadow: What measures them.
        repair: What makes cached sequences exact.
        is_repair_on: Whether cached sequences are repaired at all.
    """

    def __init__(self, preparation: Preparation) -> None:
        """Resolves the settings that depend on the device.

        Args:
            preparation: The settings, what is cached, and the way from a prompt to its logits.
        """
        config, forward = preparation.config, preparation.forward
        on_gpu = forward.decoder.device.type == "cuda"
        share = (GPU_GATE_SHARE if on_gpu else 0.0) if config.gate_share == "auto" else config.gate_share
        self.gate = Gate(share, config.gate_kl_bound)
        self.shadow = Shadow(preparation)
        self.is_repair_on = on_gpu if config.repair == "auto" else config.repair
        self.repair = Repair(preparation.index, forward, limit_seconds=config.repair_seconds)
        self._index = preparation.index
        self._answered: Answered | None = None

    @property
    def is_on(self) -> bool:
        """Whether there is ever anything to do."""
        return self.is_repair_on or self.gate.is_on

    def begin_request(self) -> None:
        """A request's turn has come: what was to be measured is lost, and repair has its time again."""
        self._drop()
        self.repair.restart()

    def end_request(self, prepared: Prepared, logits: Tensor, sequence: CachedSequence) -> None:
        """Notes an answered request if it is to be measured.

        Args:
            prepared: The prompt and its plan, carried out.
            logits: (1, vocab) float32: what the answer began with.
            sequence: Where it is cached, on the pages of `prepared`.
        """
        asked, plan = prepared.asked, prepared.plan
        refused = asked.refused is not None and plan.fallback == asked.refused
        key = GateKey(asked.call.space, asked.call.policy)
        if (refused or len(plan.slid_tokens())) and self.gate.is_due(key):
            self._answered = Answered(key, prepared, logits[-1], sequence)

    def refusal(self, call: Call) -> str | None:
        """Why a call's prompt may not slide now, or None if it may."""
        return self.gate.refusal(GateKey(call.space, call.policy))

    def step(self, check: Callable[[], None]) -> bool:
        """Does one thing; returns whether there may be more to do.

        Args:
            check: Called between layers; raises to stop.
        """
        answered = self._answered
        if answered is None:
            return self.is_repair_on and self.repair.step(check)
        if not self._index.holds(answered.sequence):
            self._drop()
            return True
        self._answered = None
        drift = self.shadow.run(answered, check)
        if drift is not None:
            self.gate.note(answered.key, drift)
        return True

    def _drop(self) -> None:
        self.shadow.dropped += self._answered is not None
        self._answered = None
