from __future__ import annotations

import numpy as np
import pytest

from cacheslide_agents.engine.reuse.index import CachedSequence
from cacheslide_agents.engine.reuse.rules import ByStaleness
from cacheslide_agents.engine.reuse.spans import Plan, Span
from tests.engine.reuse.cached_text import cached, joined, planned, text


def slide(
    tokens: np.ndarray,
    *sequences: CachedSequence,
    session: str | None = "a",
    reserved: np.ndarray | None = None,
    **settings: float,
) -> Plan:
    return planned("slide", tokens, *sequences, session=session, reserved=reserved, **settings)


def test_the_suffix_slides_when_the_memory_block_grew() -> None:
    system, old, new, suffix, query = text(256), text(128), text(193), text(1_280), text(32)
    made = slide(joined(system, new, suffix, query), cached(0, joined(system, old, suffix)))
    assert made.spans == (
        Span(0, 256, "exact", 0, 0),
        Span(256, 449, "fresh"),
        Span(449, 1_729, "slid", 0, 384, after_change=True),
        Span(1_729, 1_761, "fresh"),
    )
    assert made.exact_tokens == 449


def test_everything_is_exact_when_a_conversation_only_grows() -> None:
    history, reply, message = text(300), text(40), text(25)
    made = slide(joined(history, reply, message), cached(0, joined(history, reply)))
    assert made.spans == (Span(0, 340, "exact", 0, 0), Span(340, 365, "fresh"))
    assert made.correction is None and len(made.corrected) == 0


def test_the_rest_slides_when_a_message_in_the_middle_is_dropped() -> None:
    head, dropped, rest, message = text(200), text(50), text(300), text(20)
    made = slide(joined(head, rest, message), cached(0, joined(head, dropped, rest)))
    assert made.spans == (
        Span(0, 200, "exact", 0, 0),
        Span(200, 500, "slid", 0, 250, after_change=True),
        Span(500, 520, "fresh"),
    )


def test_the_rest_slides_when_the_head_of_the_history_is_dropped() -> None:
    system, header, first, second, message = text(60), text(4), text(90), text(400), text(20)
    made = slide(
        joined(system, header, second, header, message),
        cached(0, joined(system, header, first, header, second)),
    )
    assert made.spans == (
        Span(0, 64, "exact", 0, 0),
        Span(64, 464, "slid", 0, 158, after_change=True),
        Span(464, 488, "fresh"),
    )


def test_head_and_rest_are_reused_when_a_segment_grew() -> None:
    system, segment, more, rest, message = text(30), text(100), text(40), text(200), text(10)
    made = slide(joined(system, segment, more, rest, message), cached(0, joined(system, segment, rest)))
    assert [(len(span), span.treatment) for span in made.spans] == [
        (130, "exact"),
        (40, "fresh"),
        (200, "slid"),
        (10, "fresh"),
    ]


def test_the_prompt_is_exact_and_both_branches_serve_when_a_reply_is_generated_again() -> None:
    history, first, second, message = text(300), text(50), text(60), text(20)
    branches = (cached(0, joined(history, first)), cached(1, joined(history, second)))
    assert slide(history, *branches).spans == (Span(0, 299, "exact", 1, 0), Span(299, 300, "fresh"))
    assert slide(joined(history, first, message), *branches).spans[0] == Span(0, 350, "exact", 0, 0)
    assert slide(joined(history, second, message), *branches).spans[0] == Span(0, 360, "exact", 1, 0)


def test_unchanged_text_follows_a_change_when_a_range_before_it_is_reserved_now() -> None:
    system, update, suffix, message = text(48), text(20), text(200), text(10)
    tokens = joined(system, update, suffix, message)
    positions = joined(np.arange(68), np.arange(80, 290))
    donor = cached(0, joined(system, update, suffix), exact=48)
    made = slide(tokens, donor, reserved=positions)
    assert made.spans == (
        Span(0, 48, "exact", 0, 0),
        Span(48, 68, "slid", 0, 48),
        Span(68, 268, "slid", 0, 68, after_change=True),
        Span(268, 278, "fresh"),
    )


def test_what_follows_slides_in_place_when_an_early_message_is_edited_to_equal_length() -> None:
    head, old, new, rest, message = text(100), text(20), text(20), text(200), text(10)
    made = slide(joined(head, new, rest, message), cached(0, joined(head, old, rest), hops=3), max_hops=3)
    assert made.spans[2] == Span(120, 320, "slid", 0, 120, after_change=True)


def test_the_same_prefix_slides_when_it_is_tainted() -> None:
    tokens, message = text(300), text(20)
    made = slide(joined(tokens, message), cached(0, tokens, exact=100))
    assert made.spans == (
        Span(0, 100, "exact", 0, 0),
        Span(100, 300, "slid", 0, 100, after_change=False),
        Span(300, 320, "fresh"),
    )
    assert made.exact_tokens == 100


def test_worn_tokens_are_fresh_when_hops_run_out_inside_a_run() -> None:
    gone, rest = text(30), text(200)
    donor = cached(0, joined(gone, rest))
    donor.hops[30 + 40 : 30 + 60] = 20
    made = slide(joined(rest, text(5)), donor, max_hops=20)
    assert made.spans == (
        Span(0, 40, "slid", 0, 30, after_change=True),
        Span(40, 60, "fresh"),
        Span(60, 200, "slid", 0, 90, after_change=True),
        Span(200, 205, "fresh"),
    )


def test_worn_tokens_stay_when_they_do_not_move() -> None:
    tokens = text(100)
    made = slide(joined(tokens, text(5)), cached(0, tokens, exact=0, hops=20), max_hops=20)
    assert made.spans[0] == Span(0, 100, "slid", 0, 0)


@pytest.mark.parametrize(("length", "treatment"), [(15, "fresh"), (16, "slid")])
def test_a_run_is_computed_when_it_is_below_the_break_even_length(length: int, treatment: str) -> None:
    run = text(length)
    made = slide(joined(text(20), run, text(20)), cached(0, joined(text(40), run)), min_slide_tokens=16)
    assert treatment in [span.treatment for span in made.spans]
    assert ("slid" in [span.treatment for span in made.spans]) == (treatment == "slid")


@pytest.mark.parametrize(("length", "treatment"), [(40, "fresh"), (41, "slid")])
def test_a_run_is_computed_when_it_is_no_longer_than_the_text_between_it_and_the_next(
    length: int, treatment: str
) -> None:
    system, run, rest = text(60), text(length), text(300)
    made = slide(
        joined(system, text(20), run, text(40), rest, text(9)), cached(0, joined(system, text(25), run, text(30), rest))
    )
    treatments = [(len(span), span.treatment) for span in made.spans]
    between = [(60 + length, "fresh")] if treatment == "fresh" else [(20, "fresh"), (length, "slid"), (40, "fresh")]
    assert treatments == [(60, "exact"), *between, (300, "slid"), (9, "fresh")]


def test_runs_are_weighed_from_the_last_when_there_are_many() -> None:
    """What is computed with the text behind it makes that text longer for the run before it."""
    system, first, second, third, rest = text(60), text(70), text(30), text(90), text(200)
    new = joined(system, first, text(20), second, text(35), third, text(25), rest, text(9))
    old = joined(system, text(5), first, text(5), second, text(5), third, text(5), rest)
    made = slide(joined(system, text(5), new[60:]), cached(0, old))
    assert [(len(span), span.treatment) for span in made.spans] == [
        (60, "exact"),
        (5 + 70 + 20 + 30 + 35, "fresh"),
        (90, "slid"),
        (25, "fresh"),
        (200, "slid"),
        (9, "fresh"),
    ]
    kept = slide(joined(system, text(5), new[60:]), cached(0, old), correction_share=0.0)
    assert [len(span) for span in kept.spans if span.treatment == "slid"] == [70, 30, 90, 200], "nothing comes twice"


def test_a_tainted_run_of_the_same_prefix_is_computed_when_the_text_behind_it_is_longer() -> None:
    head, old, new, rest = text(60), text(90), text(80), text(300)
    made = slide(joined(head, new, rest, text(9)), cached(0, joined(head, old, rest), exact=0))
    assert [(len(span), span.treatment) for span in made.spans] == [(140, "fresh"), (300, "slid"), (9, "fresh")]


def test_the_donor_is_the_one_that_slides_most_after_all_when_runs_are_short() -> None:
    """One donor has more of the prompt, but only in runs that are better computed."""
    system, rest, query = text(60), text(200), text(9)
    lines, between = [text(30) for _ in range(4)], [text(30) for _ in range(5)]
    woven = joined(*(part for pair in zip(between, lines, strict=False) for part in pair), between[4])
    scattered = cached(0, joined(system, *(joined(text(5), line) for line in lines), text(5), rest[20:]))
    whole = cached(1, joined(system, text(12), rest))
    made = slide(joined(system, woven, rest, query), whole, scattered)
    assert [(span.source, len(span)) for span in made.spans if span.treatment == "slid"] == [(1, 200)]


def test_another_session_gives_exact_tokens_only_when_sharing_is_off() -> None:
    system, rest = text(100), text(200)
    foreign = cached(0, joined(system, text(30), rest), session="b")
    tokens = joined(system, rest, text(5))
    assert [span.treatment for span in slide(tokens, foreign).spans] == ["exact", "fresh"]
    assert [span.treatment for span in slide(tokens, foreign, share_slid=True).spans] == ["exact", "slid", "fresh"]
    nobodys = cached(1, foreign.token_ids, session=None)
    assert [span.treatment for span in slide(tokens, nobodys, session=None).spans] == ["exact", "fresh"]


def test_the_donor_and_the_exact_source_differ_when_another_session_has_the_longer_prefix() -> None:
    system, middle, rest = text(100), text(50), text(200)
    own = cached(0, joined(system, text(30), rest))
    foreign = cached(1, joined(system, middle, text(30)), session="b")
    made = slide(joined(system, middle, rest, text(5)), own, foreign)
    assert made.spans[:2] == (Span(0, 150, "exact", 1, 0), Span(150, 350, "slid", 0, 130, after_change=True))


def test_the_branch_with_most_in_common_gives_when_a_session_has_several() -> None:
    first, second, message = text(100), text(100), text(5)
    whole = cached(0, joined(text(30), first, second))
    later = cached(1, joined(text(30), first))
    made = slide(joined(first, second, message), whole, later)
    assert made.spans[0] == Span(0, 200, "slid", 0, 30, after_change=True)
    again = cached(2, joined(text(40), first, second))
    assert slide(joined(first, second, message), again, whole, later).spans[0].source == 2


def test_the_right_branch_is_found_when_there_are_very_many() -> None:
    wanted, message = text(400), text(5)
    branches = [cached(i, joined(text(20), wanted[: 100 + i])) for i in range(60)]
    branches.insert(7, cached(60, joined(text(20), wanted)))
    branches[7].last_used = -1
    assert slide(joined(wanted, message), *branches).spans[0].source == 60


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_correction_is_left_to_staleness_when_something_slides(share: float) -> None:
    rest = text(200)
    made = slide(joined(rest, text(5)), cached(0, joined(text(30), rest)), correction_share=share, staleness_bound=0.2)
    assert made.correction == (ByStaleness(0.2, share) if share else None)
    assert len(made.corrected) == 0
    assert not slide(text(40), cached(0, rest), correction_share=share).correction
