"""A sequence that is being generated: its tokens, their positions and pages."""

from __future__ import annotations

import numpy as np

from ..reuse.spans import Plan
from ..slide.assembly import Assembly


class RunningSequence:
    """The prompt's tokens and, behind them, those generated tokens whose K and V were computed.

    Attributes:
        table: The sequence's pages, one reference each.
        num_tokens: Tokens with K and V, or about to get them.
    """

    def __init__(self, token_ids: np.ndarray, plan: Plan, assembly: Assembly) -> None:
        self._prompt_ids = token_ids
        self._generated: list[int] = []
        self._plan = plan
        self._assembly = assembly
        self.table = assembly.table
        self.num_tokens = len(token_ids)

    def append(self, token_id: int) -> tuple[int, int]:
        """Adds a generated token; returns its token index and its position id."""
        self._generated.append(token_id)
        token = self.num_tokens
        self.num_tokens += 1
        return token, int(self._plan.positions[-1]) + len(self._generated)

    @property
    def token_ids(self) -> np.ndarray:
        """(tokens,) int64."""
        return np.concatenate([self._prompt_ids, np.asarray(self._generated, dtype=np.int64)])

    @property
    def positions(self) -> np.ndarray:
        """(tokens,) int64; generated tokens follow the prompt's last position."""
        last = int(self._plan.positions[-1])
        return np.concatenate([self._plan.positions, np.arange(last + 1, last + 1 + len(self._generated))])

    @property
    def hops(self) -> np.ndarray:
        """(tokens,) uint8: rotations that each key went through."""
        return np.concatenate([self._assembly.hops, np.zeros(len(self._generated), dtype=np.uint8)])

    @property
    def query_positions(self) -> np.ndarray:
        """(tokens,) int64: where the stored queries are rotated to; a generated token's own position."""
        return np.concatenate([self._assembly.query_positions, self.positions[len(self._prompt_ids) :]])

    @property
    def staleness(self) -> np.ndarray:
        """(tokens,) float32: what each token was left with."""
        return np.concatenate([self._assembly.staleness, np.zeros(len(self._generated), dtype=np.float32)])

    @property
    def exact_tokens(self) -> int:
        """Length of the untainted prefix: what was generated after a slid token is tainted too."""
        slid = any(span.treatment == "slid" for span in self._plan.spans)
        return self._plan.exact_tokens if slid else self.num_tokens
