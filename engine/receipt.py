"""The receipt: what happened in one request, in counts that add up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Treatment = Literal["exact", "slid", "corrected", "fresh"]
PositionKind = Literal["contiguous", "learned"]


@dataclass(frozen=True)
class Receipt:
    """What one request reused and computed.

    `exact_tokens + slid_tokens + fresh_tokens == prompt_tokens`; corrected tokens are slid tokens that were computed
    again, so `cache_read_tokens` leaves them out. A fallback's tokens are counted as what really happened to them.

    Attributes:
        policy: The policy that was asked for.
        fallback: Why less was reused than the policy allows, or None.
        prompt_tokens: Tokens of the prompt.
        exact_tokens: Tokens read from untainted pages of the same prefix.
        slid_tokens: Tokens whose KV came from an earlier turn, corrected ones included.
        corrected_tokens: Slid tokens that were computed again.
        fresh_tokens: Tokens computed without any cached copy.
        staleness: Mean staleness that the slid tokens are left with, 0 to 1; corrected ones owe nothing. None where
            tokens slid and nobody measured it: only `slide` does, with a `correction_share` above 0 and a model whose
            cache has room for stored queries. What an earlier turn slid unmeasured counts as 1 until it is corrected.
        positions: `learned` if ranges of positions were reserved for updates, see `EngineConfig.learned_positions`.
        positions_reason: Why they were not although they are on, or None. That by itself is no fallback.
        unused_positions: Positions of the context that reserved ranges left unused before the prompt's end.
        computed_share: Layers that prompt tokens were taken through, as a share of all layers for all of them. Some
            policies compute slid tokens in a few layers only; what is computed twice counts twice.
        generated_tokens: Tokens of the answer.
        pages_loaded: Pages read from a lower tier; 0 while all pages lie in one pool.
        pages_spilled: Pages written to a lower tier on behalf of this request; 0 while all pages lie in one pool.
        treatments: Runs of prompt tokens with one treatment, as (start, stop, treatment), partitioning the prompt.
        queue_seconds: Waiting for earlier requests.
        plan_seconds: Matching and planning.
        ttft_seconds: From the start of the request's turn on the engine to its first token.
        total_seconds: From the start of the request's turn on the engine to its last token.
        finish_reason: `stop`, `length` or `cancelled`; None while running.
        session: The session that the request belonged to, or None.
    """

    policy: str
    fallback: str | None
    prompt_tokens: int
    exact_tokens: int
    slid_tokens: int
    corrected_tokens: int
    fresh_tokens: int
    staleness: float | None = 0.0
    positions: PositionKind = "contiguous"
    positions_reason: str | None = None
    unused_positions: int = 0
    computed_share: float = 0.0
    generated_tokens: int = 0
    pages_loaded: int = 0
    pages_spilled: int = 0
    treatments: tuple[tuple[int, int, Treatment], ...] = ()
    queue_seconds: float = 0.0
    plan_seconds: float = 0.0
    ttft_seconds: float = 0.0
    total_seconds: float = 0.0
    finish_reason: Literal["stop", "length", "cancelled"] | None = None
    session: str | None = None

    @property
    def cache_read_tokens(self) -> int:
        """Prompt tokens that were not computed: exact + slid − corrected."""
        return self.exact_tokens + self.slid_tokens - self.corrected_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were computed: fresh + corrected."""
        return self.fresh_tokens + self.corrected_tokens

    @property
    def is_exact(self) -> bool:
        """Whether the answer is that of a full prefill, but for rounding: nothing slid."""
        return self.slid_tokens == 0

    def to_dict(self) -> dict[str, Any]:
        """The receipt as plain JSON values, with what is derived from them."""
        fields = asdict(self)
        fields["treatments"] = [list(run) for run in self.treatments]
        derived = ("cache_read_tokens", "computed_tokens", "is_exact")
        return {**fields, **{name: getattr(self, name) for name in derived}}
