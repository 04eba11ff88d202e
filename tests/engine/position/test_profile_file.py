"""The profile file: what is refused stays as it is, writers add up, and a kill leaves the old file whole."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from cacheslide_agents.engine.model.identity import ModelIdentity
from cacheslide_agents.engine.position import profile_file
from cacheslide_agents.engine.position.ccpe import PositionProfile
from cacheslide_agents.engine.position.profile_file import (
    SAVE_OBSERVATIONS,
    ProfileBook,
    ProfileFileError,
    ProfileKey,
    Profiles,
    add_to_file,
    read_profiles,
)

MODEL = ModelIdentity("tiny", "llama 4x64, 384 ids", "0123456789abcdef")
PLAIN = ProfileKey("default", None)
CHAT = ProfileKey("tenant", "abc")


def observed(key: ProfileKey = PLAIN, *lengths: int) -> Profiles:
    profile = PositionProfile()
    for length in lengths:
        profile.observe([length])
    return {key: profile}


def lengths_in(path: Path, key: ProfileKey = PLAIN) -> dict[int, int]:
    return dict(read_profiles(path, MODEL)[key].slots[0].counts)


def written(path: Path, **changes: Any) -> str:
    """A good file with some of its keys changed; its text."""
    add_to_file(path, MODEL, observed(PLAIN, 10, 12))
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(content))
    return path.read_text()


def test_profiles_come_back_when_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "positions.json"
    add_to_file(path, MODEL, observed(PLAIN, 10, 12, 12))
    add_to_file(path, MODEL, observed(CHAT, 7))
    add_to_file(path, MODEL, observed(PLAIN, 12))
    assert lengths_in(path) == {10: 1, 12: 3} and lengths_in(path, CHAT) == {7: 1}


def test_nothing_is_known_when_there_is_no_file(tmp_path: Path) -> None:
    assert read_profiles(tmp_path / "none.json", MODEL) == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2, this release reads version 1: upgrade"),
        ({"format": "something"}, "no position profile"),
        ({"name": "other"}, "learned with name 'other', this engine has 'tiny'"),
        ({"tokenizer": "ff"}, "learned with tokenizer 'ff'"),
        ({"architecture": "llama 2x2, 9 ids"}, "learned with architecture"),
        ({"profiles": [{"namespace": "default"}]}, "broken"),
        ({"profiles": [{"namespace": "d", "template": None, "slots": [{"lengths": {"5": -1}}]}]}, "broken"),
        ({"profiles": [{"namespace": "d", "template": None, "slots": [{"lengths": {"x": 1}}]}]}, "broken"),
        ({"profiles": [{"namespace": 3, "template": None, "slots": []}]}, "broken"),
    ],
)
def test_file_is_refused_and_left_alone_when_it_is_not_ours(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "positions.json"
    text = written(path, **changes)
    for use in (lambda: ProfileBook(MODEL, path), lambda: add_to_file(path, MODEL, observed(PLAIN, 1))):
        with pytest.raises(ProfileFileError, match=words):
            use()
    assert path.read_text() == text


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"null"])
def test_file_is_refused_when_it_is_no_json_object(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "positions.json"
    path.write_bytes(content)
    with pytest.raises(ProfileFileError, match="move it away or name another"):
        read_profiles(path, MODEL)


def test_old_file_stays_whole_when_a_writer_is_killed_before_the_rename(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    add_to_file(path, MODEL, observed(PLAIN, 10))
    text = path.read_text()
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == 9 and path.read_text() == text
    assert list(tmp_path.glob(".positions.json.tmp-*")), "it died between writing and renaming"
    add_to_file(path, MODEL, observed(PLAIN, 11))
    assert lengths_in(path) == {10: 1, 11: 1}
    assert not list(tmp_path.glob(".positions.json.tmp-*"))


def _write_and_die(path: Path) -> None:
    os.replace = lambda *_: os._exit(9)
    add_to_file(path, MODEL, observed(PLAIN, 99))


def test_counts_add_up_when_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(path, length)) for length in (5, 6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert lengths_in(path) == {5: 10, 6: 10}


def _write_often(path: Path, length: int) -> None:
    book = ProfileBook(MODEL, path)
    for _ in range(10):
        book.observe(PLAIN, (length,))
        book.save()


def test_book_knows_what_others_learned_when_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    book = ProfileBook(MODEL, path)
    add_to_file(path, MODEL, observed(PLAIN, 40))
    book.observe(PLAIN, (8,))
    assert book.get(PLAIN).range_tokens(0, 1.0) == 16
    book.save()
    assert book.get(PLAIN).range_tokens(0, 1.0) == 48 and lengths_in(path) == {8: 1, 40: 1}
    book.save()
    assert lengths_in(path) == {8: 1, 40: 1}, "nothing is counted twice"


def test_book_is_saved_when_enough_was_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "positions.json"
    book = ProfileBook(MODEL, path)
    book.observe(PLAIN, (8,))
    book.save_if_due()
    assert not path.exists()
    for _ in range(SAVE_OBSERVATIONS - 1):
        book.observe(PLAIN, (8,))
    book.save_if_due()
    assert lengths_in(path) == {8: SAVE_OBSERVATIONS}
    monkeypatch.setattr(profile_file, "SAVE_SECONDS", 0.0)
    book.observe(PLAIN, (9,))
    book.save_if_due()
    assert lengths_in(path)[9] == 1


def test_book_goes_on_from_memory_when_the_file_cannot_be_written(tmp_path: Path) -> None:
    good = tmp_path / "sub" / "positions.json"
    book = ProfileBook(MODEL, good)
    (tmp_path / "sub").write_text("in the way")
    book.observe(PLAIN, (8,))
    with pytest.warns(RuntimeWarning, match="not saved"):
        book.save()
    book.save()  # said once
    assert book.get(PLAIN).range_tokens(0, 1.0) == 16
    (tmp_path / "sub").unlink()
    book.save()
    assert lengths_in(good) == {8: 1}, "nothing was lost"


def test_foreign_file_survives_when_it_appears_while_a_book_is_open(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    book = ProfileBook(MODEL, path)
    book.observe(PLAIN, (8,))
    text = written(path, version=2)
    with pytest.warns(RuntimeWarning, match="version 2"):
        book.save()
    assert path.read_text() == text


def test_namespaces_stay_apart_when_both_are_observed(tmp_path: Path) -> None:
    book = ProfileBook(MODEL)
    book.observe(ProfileKey("a", None), (100,))
    assert book.get(ProfileKey("b", None)).range_tokens(0, 1.0) is None
    assert book.get(ProfileKey("a", "chat")).range_tokens(0, 1.0) is None


def test_a_namespace_comes_back_when_it_holds_half_a_character(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    half = ProfileKey("tenant \ud83d", None)
    book = ProfileBook(MODEL, path)
    book.observe(half, (8,))
    book.observe(PLAIN, (9,))
    book.save()
    assert lengths_in(path, half) == {8: 1} and lengths_in(path) == {9: 1}


def test_path_is_refused_when_it_is_no_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(ProfileFileError, match="move it away or name another"):
            ProfileBook(MODEL, path)


def test_file_is_refused_when_it_is_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ProfileFileError, match="move it away or name another"):
        read_profiles(path, MODEL)
