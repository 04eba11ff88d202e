"""Made-up tokens and cached sequences of them, without pages: what policies plan with."""

from __future__ import annotations

from itertools import count, islice

import numpy as np

from cacheslide_agents.engine.config import EngineConfig
from cacheslide_agents.engine.reuse.index import CachedSequence, SpaceKey
from cacheslide_agents.engine.reuse.plan import PlanRequest, assert_valid, plan
from cacheslide_agents.engine.reuse.spans import Plan
from cacheslide_agents.engine.segments import EncodedPrompt
from cacheslide_agents.engine.slide.block_table import BlockTable

_tokens = count()


def text(num_tokens: int) -> np.ndarray:
    """Tokens that occur nowhere else."""
    return np.fromiter(islice(_tokens, num_tokens), dtype=np.int64)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def cached(
    number: int, tokens: np.ndarray, exact: int | None = None, session: str | None = "a", hops: int = 0
) -> CachedSequence:
    num_tokens = len(tokens)
    return CachedSequence(
        id=number,
        space=SpaceKey("default", None),
        session=session,
        token_ids=np.asarray(tokens, dtype=np.int64),
        positions=np.arange(num_tokens),
        exact_tokens=num_tokens if exact is None else exact,
        hops=np.full(num_tokens, hops, dtype=np.uint8),
        query_positions=np.arange(num_tokens),
        staleness=np.zeros(num_tokens, dtype=np.float32),
        table=BlockTable(),
        last_used=number,
    )


def planned(
    policy: str,
    tokens: np.ndarray,
    *sequences: CachedSequence,
    session: str | None = "a",
    reserved: np.ndarray | None = None,
    **settings: float,
) -> Plan:
    """A valid plan of a prompt for a session."""
    prompt = EncodedPrompt(tokens, (0,), ("suffix",))
    request = PlanRequest(prompt, session, sequences, EngineConfig().with_changes(**settings), reserved)
    made = plan(policy, request)
    assert_valid(made)
    return made
