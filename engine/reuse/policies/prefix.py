"""`prefix`: the longest common prefix is reused, exactly; what follows the first changed token is computed.

This is prefix caching (ContextCache) by token instead of by block. Any session's sequence serves.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..diff import common_prefix_tokens
from ..index import CachedSequence
from ..spans import Plan, Span
from .interface import Isolation, PlanRequest


class Prefix:
    """Exact prefix reuse."""

    name = "prefix"
    isolation: Isolation | None = None

    def plan(self, request: PlanRequest) -> Plan:
        """At most one exact span, then one fresh span."""
        num_tokens = len(request.prompt)
        exact = exact_span(request)
        start = len(exact) if exact else 0
        fresh = Span(start, num_tokens, "fresh")
        return Plan(spans=(exact, fresh) if exact else (fresh,), positions=request.positions, policy=self.name)


def exact_span(request: PlanRequest) -> Span | None:
    """The longest prefix, without the last token, that some sequence holds untainted at the same positions.

    Of equally long ones the most recently used sequence's.
    """
    prompt, positions = request.prompt.token_ids[:-1], request.positions
    longest, source = 0, None
    for sequence in by_recency(request.sequences):
        limit = min(len(prompt), sequence.exact_tokens)
        # Most sequences share a start, so the token that would make one longer than the best rules most of them out.
        if limit <= longest or sequence.token_ids[longest] != prompt[longest]:
            continue
        length = common_prefix_tokens(prompt, sequence.token_ids[:limit])
        if length > longest:
            length = common_prefix_tokens(positions[:length], sequence.positions)
        if length > longest:
            longest, source = length, sequence.id
    return Span(0, longest, "exact", source=source, source_start=0) if source is not None else None


def by_recency(sequences: Sequence[CachedSequence]) -> list[CachedSequence]:
    """The sequences, most recently used first."""
    return sorted(sequences, key=lambda sequence: -sequence.last_used)
