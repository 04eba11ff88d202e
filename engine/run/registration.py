"""Registration: a prompt's segments computed alone after its answer, for the policies that reuse them in isolation.

The systems that these policies follow compute their chunks ahead of time. Here that happens once an answer is out, so
it is never in front of a first token; it stops when the request is cancelled or the engine closes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..errors import RequestCancelledError
from ..reuse.policies.interface import Isolation
from ..reuse.policies.isolation import missing_segments
from ..slide.pages import PoolFullError
from .preparation import Preparation, space_of
from .prepared import Prepared
from .request import Call


def register(
    preparation: Preparation,
    prepared: Prepared,
    isolation: Isolation,
    check: Callable[[], None],
) -> None:
    """Caches every segment of a prompt of which there is no isolated copy yet, as far as the pool has room.

    Args:
        preparation: The pool, the index and the model's loop.
        prepared: The prompt that was answered; its pages are not looked at.
        isolation: The policy's way.
        check: Called between layers; raises `RequestCancelledError` to stop.
    """
    call, prompt, positions = prepared.asked.call, prepared.asked.encoded, prepared.plan.positions
    cached = preparation.index.candidates(space_of(call))
    for start, stop in missing_segments(prompt, positions, cached, isolation, preparation.config.min_slide_tokens):
        own = isolation.positions(positions[start:stop])
        try:
            _compute(preparation, prompt.token_ids[start:stop], own, call, check)
        except (PoolFullError, RequestCancelledError):
            return


def _compute(
    preparation: Preparation,
    token_ids: np.ndarray,
    positions: np.ndarray,
    call: Call,
    check: Callable[[], None],
) -> None:
    """Computes one segment's tokens (n,) int64 at their positions, with nothing before them, and caches them.

    They are the calling session's: its `forget` drops them.
    """
    assembly = preparation.compute_alone(token_ids, positions, check)
    preparation.index.add(
        space_of(call),
        call.session,
        token_ids=token_ids,
        positions=positions,
        exact_tokens=len(token_ids),
        hops=assembly.hops,
        query_positions=positions,
        staleness=assembly.staleness,
        table=assembly.table,
    )
