from __future__ import annotations

import numpy as np
import pytest

from cacheslide_agents.engine.reuse.index import SpaceKey
from cacheslide_agents.engine.reuse.replies import ReplyBook, ReplyBooks

SPACE, OTHER = SpaceKey("default", None), SpaceKey("default", "other")
HEADER, HEADER_IDS = "assistant\n", np.array([520, 9531, 198])


def note(book: ReplyBook, text: str, ids: list[int], canonical: list[int] | None = None) -> None:
    whole = None if canonical is None else np.array([*HEADER_IDS.tolist(), *canonical])
    book.remember(HEADER, HEADER_IDS, text, np.array(ids), whole)


def test_sampled_ids_come_back_when_the_text_does() -> None:
    book = ReplyBook()
    note(book, "Hello", [5, 6])
    ids = book.lookup("assistant\nHello")
    assert ids is not None and ids.tolist() == [520, 9531, 198, 5, 6]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


@pytest.mark.parametrize("piece", ["assistant\nHello!", "Hello", "user\nHello", "assistant\n", ""])
def test_nothing_comes_back_when_the_text_is_another(piece: str) -> None:
    book = ReplyBook()
    note(book, "Hello", [5, 6])
    note(book, "", [])
    assert book.lookup(piece) is None


def test_nothing_is_noted_when_the_sampled_ids_are_canonical() -> None:
    book = ReplyBook()
    note(book, "Hello", [5, 6], canonical=[7])
    assert len(book) == 1
    note(book, "Hello", [7], canonical=[7])
    assert len(book) == 0 and book.lookup("assistant\nHello") is None


def test_the_last_ids_win_when_one_text_was_sampled_twice() -> None:
    book = ReplyBook()
    note(book, "Hello", [5, 6])
    note(book, "Hello", [8])
    ids = book.lookup("assistant\nHello")
    assert ids is not None and ids[3:].tolist() == [8]


def test_the_least_recently_used_reply_goes_when_the_book_is_full() -> None:
    book = ReplyBook(max_replies=2)
    note(book, "one", [1])
    note(book, "two", [2])
    assert book.lookup("assistant\none") is not None
    note(book, "three", [3])
    assert book.lookup("assistant\ntwo") is None
    assert book.lookup("assistant\none") is not None


def test_books_are_apart_when_sessions_or_spaces_differ() -> None:
    books = ReplyBooks(max_sessions=2)
    note(books.book(SPACE, "a"), "Hello", [5])
    assert books.book(SPACE, "a").lookup("assistant\nHello") is not None
    assert books.book(SPACE, "b").lookup("assistant\nHello") is None
    assert books.book(OTHER, "a").lookup("assistant\nHello") is None
    assert len(books) == 2
    assert books.book(SPACE, "a").lookup("assistant\nHello") is None  # it was the least recently used


def test_nothing_is_kept_when_there_is_no_session_or_it_is_forgotten() -> None:
    books = ReplyBooks()
    note(books.book(SPACE, None), "Hello", [5])
    assert books.book(SPACE, None).lookup("assistant\nHello") is None
    note(books.book(SPACE, "a"), "Hello", [5])
    note(books.book(OTHER, "a"), "Hello", [5])
    note(books.book(SPACE, "b"), "Hello", [5])
    books.forget("default", "a")
    assert books.book(SPACE, "a").lookup("assistant\nHello") is None
    assert books.book(OTHER, "a").lookup("assistant\nHello") is None
    assert books.book(SPACE, "b").lookup("assistant\nHello") is not None
