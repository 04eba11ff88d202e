from __future__ import annotations

import time

import numpy as np

from cacheslide_agents.engine.reuse.index import CachedSequence
from cacheslide_agents.engine.reuse.spans import Span
from tests.engine.reuse.cached_text import cached, planned


def spans(tokens: np.ndarray, *sequences: CachedSequence, session: str | None = "a") -> tuple[Span, ...]:
    return planned("prefix", tokens, *sequences, session=session).spans


def test_all_but_the_last_token_is_exact_when_the_prompt_repeats() -> None:
    tokens = np.arange(40)
    assert spans(tokens, cached(0, tokens)) == (Span(0, 39, "exact", 0, 0), Span(39, 40, "fresh"))


def test_everything_is_fresh_when_nothing_matches_or_one_token_is_asked() -> None:
    assert spans(np.arange(5), cached(0, np.arange(1, 9))) == (Span(0, 5, "fresh"),)
    assert spans(np.arange(1), cached(0, np.arange(9))) == (Span(0, 1, "fresh"),)
    assert spans(np.arange(5)) == (Span(0, 5, "fresh"),)


def test_any_session_serves_when_its_prefix_is_the_longest() -> None:
    prompt = np.arange(40)
    others = (cached(0, np.arange(10)), cached(1, np.arange(30), session="b"), cached(2, np.arange(20), session=None))
    assert spans(prompt, *others, session=None)[0] == Span(0, 30, "exact", 1, 0)


def test_the_most_recently_used_serves_when_prefixes_are_equally_long() -> None:
    assert spans(np.arange(40), cached(3, np.arange(30)), cached(7, np.arange(30)))[0].source == 7


def test_tainted_tokens_are_never_read_when_a_sequence_has_slid() -> None:
    prompt = np.arange(40)
    assert spans(prompt, cached(0, prompt, exact=12), cached(1, prompt, exact=0)) == (
        Span(0, 12, "exact", 0, 0),
        Span(12, 40, "fresh"),
    )


def test_moved_tokens_are_not_exact_when_a_sequence_has_a_gap_in_its_positions() -> None:
    gapped = cached(0, np.arange(40))
    gapped.positions = np.concatenate([np.arange(16), np.arange(20, 44)])
    assert spans(np.arange(40), gapped)[0] == Span(0, 16, "exact", 0, 0)


def test_time_stays_small_when_hundreds_of_long_sequences_share_a_start() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 49_152, 4_000)
    sequences = [cached(i, np.concatenate([start, rng.integers(0, 49_152, 4_000)])) for i in range(400)]
    prompt = sequences[200].token_ids
    started = time.process_time()
    assert spans(prompt, *sequences)[0] == Span(0, 7_999, "exact", 200, 0)
    assert time.process_time() - started < 0.5  # about 0.001 s
