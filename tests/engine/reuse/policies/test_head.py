from __future__ import annotations

import numpy as np
import pytest

from cacheslide_agents.engine.reuse.index import CachedSequence
from cacheslide_agents.engine.reuse.spans import Plan, Span
from tests.engine.reuse.cached_text import cached, joined, planned, text


def head(tokens: np.ndarray, *sequences: CachedSequence, correction_share: float = 0.1, max_hops: int = 20) -> Plan:
    made = planned("head", tokens, *sequences, correction_share=correction_share, max_hops=max_hops)
    assert made.correction is None
    assert made.spans == planned("slide", tokens, *sequences, max_hops=max_hops).spans
    return made


def test_the_head_of_the_suffix_is_corrected_when_the_memory_block_grew() -> None:
    system, old, new, suffix, query = text(256), text(128), text(193), text(1_280), text(32)
    made = head(joined(system, new, suffix, query), cached(0, joined(system, old, suffix)))
    assert made.corrected.tolist() == list(range(449, 577))
    assert made.exact_tokens == 449


def test_the_head_of_the_rest_is_corrected_when_a_message_in_the_middle_is_dropped() -> None:
    start, dropped, rest, message = text(200), text(50), text(300), text(20)
    made = head(joined(start, rest, message), cached(0, joined(start, dropped, rest)))
    assert made.corrected.tolist() == list(range(200, 230))


def test_nothing_is_corrected_when_the_same_prefix_is_tainted() -> None:
    tokens, message = text(300), text(20)
    made = head(joined(tokens, message), cached(0, tokens, exact=100))
    assert made.spans[1] == Span(100, 300, "slid", 0, 100, after_change=False)
    assert len(made.corrected) == 0


def test_the_head_is_one_when_hops_run_out_inside_a_run() -> None:
    gone, rest = text(30), text(200)
    donor = cached(0, joined(gone, rest))
    donor.hops[30 + 40 : 30 + 60] = 20
    made = head(joined(rest, text(5)), donor, max_hops=20)
    assert [len(span) for span in made.spans] == [40, 20, 140, 5]
    assert made.corrected.tolist() == list(range(18))


def test_only_what_follows_the_change_is_corrected_when_the_prefix_is_tainted() -> None:
    start, dropped, rest, message = text(300), text(40), text(200), text(20)
    made = head(joined(start, rest, message), cached(0, joined(start, dropped, rest), exact=100))
    assert [(span.start, span.treatment, span.after_change) for span in made.spans] == [
        (0, "exact", False),
        (100, "slid", False),
        (300, "slid", True),
        (500, "fresh", False),
    ]
    assert made.corrected.tolist() == list(range(300, 320))


def test_each_run_has_a_head_of_its_own_when_there_are_two_changes() -> None:
    first, gone, second, third, message = text(50), text(30), text(100), text(205), text(10)
    made = head(joined(second, third, message), cached(0, joined(first, second, gone, third)))
    assert made.corrected.tolist() == [*range(10), *range(100, 121)]


@pytest.mark.parametrize(("share", "corrected"), [(0.0, 0), (0.1, 20), (0.101, 21), (1.0, 200)])
def test_the_head_is_as_long_as_the_share_says_when_a_run_slides(share: float, corrected: int) -> None:
    rest = text(200)
    made = head(joined(rest, text(5)), cached(0, joined(text(30), rest)), correction_share=share)
    assert made.corrected.tolist() == list(range(corrected))


def test_tainted_tokens_are_corrected_too_when_all_shall_be() -> None:
    tokens = text(300)
    made = head(joined(tokens, text(5)), cached(0, tokens, exact=100), correction_share=1.0)
    assert made.corrected.tolist() == list(range(100, 300))
