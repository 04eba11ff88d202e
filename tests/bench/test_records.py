"""Records of a person's own prompts: both shapes, and what is said about bad ones."""

from __future__ import annotations

import codecs
import json
import re
import sys
from pathlib import Path

import pytest

from cacheslide_agents.bench.records import read_inputs, read_turns
from cacheslide_agents.engine.errors import ConfigError

EDIT = {"system": "S. ", "old": "one ", "new": "two ", "suffix": "history ", "query": "which?"}


def _file(tmp_path: Path, *lines: object, name: str = "mine.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_turns_have_both_prompts_when_an_update_is_rewritten(tmp_path: Path) -> None:
    turn_set, problems = read_turns(_file(tmp_path, {**EDIT, "answer": " two", "old_value": "one", "id": "a"}))
    (turns,) = turn_set.turns
    assert (turn_set.name, problems) == ("mine", [])
    assert turns.first.text == "S. one history "
    assert turns.second.text == "S. two history which?"
    assert [segment.role for segment in turns.second.segments] == ["system", "update", "suffix", "suffix"]
    assert (turns.id, turns.answer, turns.old_value) == ("a", " two", "one")


def test_turns_have_the_given_segments_when_prompts_are_written_out(tmp_path: Path) -> None:
    record = {"first": [{"role": "update", "text": "a"}], "second": [{"role": "suffix", "text": "b"}]}
    (turns,) = read_turns(_file(tmp_path, record))[0].turns
    assert (turns.first.text, turns.second.text, turns.answer, turns.id) == ("a", "b", None, "mine-1")
    assert turns.second.segments[0].role == "suffix"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "no JSON, .* at column 2: write one object a line"),
        ('{"id": ' + "9" * 5000 + "}", "an integer of more than 4300 digits: write it as text, in quotes"),
        ("[" * 100_000, "lists or objects nested deeper than Python's JSON reader goes: a record has the texts system"),
        ("[1]", r"\[1\] is no JSON object: a record has the texts system"),
        ({**EDIT, "anwser": "x"}, "anwser is no key of a record: a record has .* may have answer"),
        ({"old": "x", "suffix": "y"}, "new is missing: a record has"),
        ({**EDIT, "old": 7}, "old = 7: Input should be a valid string; a record has"),
        ({**EDIT, "answer": ""}, "answer = '': String should have at least 1 character"),
        ({**EDIT, "answer": 5}, "answer = 5: Input should be a valid string"),
        ({"old": "", "new": "", "suffix": ""}, "the prompt is empty: give at least one segment"),
        ({"first": [{"role": "user", "text": "a"}], "second": [{"role": "update", "text": "a"}]}, "first.0.role = 'us"),
        ({"first": [], "second": [{"role": "update", "text": "a"}]}, r"first = \[\]: List should have at least 1 item"),
        ({"first": [{"role": "update", "text": "a"}]}, "second is missing"),
    ],
)
def test_bad_record_is_reported_and_the_others_kept_when_one_is_wrong(
    line: object, message: str, tmp_path: Path
) -> None:
    path = _file(tmp_path, EDIT, "", line, EDIT)
    turn_set, problems = read_turns(path)
    assert [turns.id for turns in turn_set.turns] == ["mine-1", "mine-4"]
    assert len(problems) == 1
    assert problems[0].startswith(f"{path}:3: ")
    assert re.search(message, problems[0]), problems[0]


def test_long_value_is_cut_when_it_is_shown(tmp_path: Path) -> None:
    _, problems = read_turns(_file(tmp_path, EDIT, {**EDIT, "old": ["x" * 500]}))
    assert len(problems[0]) < 400


def test_line_is_reported_when_it_is_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xff\n" + json.dumps(EDIT).encode())
    turn_set, problems = read_turns(path)
    assert len(turn_set.turns) == 1
    assert problems == [f"{path}:1: no UTF-8, byte 0xff at column 1: save the file as UTF-8"]


def test_record_is_read_when_an_editor_put_a_byte_order_mark_before_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + json.dumps(EDIT).encode() + b"\r\n")
    turn_set, problems = read_turns(path)
    assert (len(turn_set.turns), problems) == (1, [])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allow no such names")
def test_names_are_text_when_the_file_name_is_no_utf_8(tmp_path: Path) -> None:
    turn_set, _ = read_turns(_file(tmp_path, EDIT, name="caf\udce9.jsonl"))
    assert (turn_set.name, turn_set.turns[0].id) == ("caf\ufffd", "caf\ufffd-1")


def test_only_so_many_are_read_when_there_is_a_limit(tmp_path: Path) -> None:
    turn_set, problems = read_turns(_file(tmp_path, "{", *[EDIT] * 5, "{"), limit=3)
    assert [turns.id for turns in turn_set.turns] == ["mine-2", "mine-3", "mine-4"]
    assert len(problems) == 1


def test_file_is_refused_when_no_record_of_it_is_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no record of .*mine\.jsonl can be used.*mine\.jsonl:1: no JSON"):
        read_turns(_file(tmp_path, "{"))
    with pytest.raises(ConfigError, match="It is empty: a record has"):
        read_turns(_file(tmp_path))


def test_input_is_refused_when_it_is_no_file_and_no_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHESLIDE_DATA", raising=False)
    with pytest.raises(ConfigError, match="'tols' is no file and no family of prompts: name a JSONL file"):
        read_inputs(["tols"])
    (tmp_path / "prompts").mkdir()
    _file(tmp_path / "prompts", EDIT, name="tools.jsonl")
    monkeypatch.setenv("CACHESLIDE_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="one of tools"):
        read_inputs(["tols"])
    assert [one.name for one in read_inputs(["tools"])[0]] == ["tools"]
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_inputs([str(tmp_path)])


def test_inputs_are_refused_when_two_have_one_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [_file(tmp_path, EDIT), _file(tmp_path / "other", EDIT)]
    with pytest.raises(ConfigError, match="two inputs are called 'mine'"):
        read_inputs([str(path) for path in paths])
