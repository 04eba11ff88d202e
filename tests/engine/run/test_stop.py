"""Stop strings against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheslide_agents.engine.run.stop import StopStrings

ALPHABET = st.text("ab\n", max_size=30)


def _run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    stops = StopStrings(stop)
    shown = ""
    for piece in pieces:
        text, stopped = stops.feed(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + stops.flush(), False


def _expected(stop: list[str], text: str) -> tuple[str, bool]:
    """The shortest head of the text that ends with a stop string, without the longest of those."""
    for end in range(len(text) + 1):
        found = [string for string in stop if text[:end].endswith(string)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(text=ALPHABET, stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4), data=st.data())
def test_text_ends_where_the_first_stop_string_is_complete(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _run(stop, pieces) == _expected(stop, text)


@given(text=ALPHABET, stop=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4))
def test_only_a_possible_beginning_is_held_back(text: str, stop: list[str]) -> None:
    stops = StopStrings(stop)
    shown = seen = ""
    for char in text:
        piece, stopped = stops.feed(char)
        if stopped:
            return
        shown, seen = shown + piece, seen + char
        held = seen[len(shown) :]
        longest = max(
            (size for string in stop for size in range(len(string)) if seen.endswith(string[:size])), default=0
        )
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        (["</s>"], ["hello <", "/s", "> more"], "hello "),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo"),
        (["aab"], ["aaa", "ab"], "aa"),
        (["abc", "b"], ["ab"], "a"),
        (["bc", "abc"], ["abc"], ""),
        (["🦊"], ["a🦊b"], "a"),
    ],
)
def test_stop_string_is_found_when_it_spans_pieces(stop: list[str], pieces: list[str], shown: str) -> None:
    assert _run(stop, pieces) == (shown, True)


def test_text_passes_at_once_when_there_is_no_stop_string() -> None:
    stops = StopStrings(())
    assert stops.feed("abc") == ("abc", False)
    assert stops.flush() == ""


def test_flush_gives_what_was_held_once() -> None:
    stops = StopStrings(["abc"])
    assert stops.feed("xab") == ("x", False)
    assert stops.flush() == "ab"
    assert stops.flush() == ""
    assert stops.feed("c") == ("c", False)
