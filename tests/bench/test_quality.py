"""`cacheslide bench quality`: table, files and picture of the same figures, and what goes wrong."""

from __future__ import annotations

import csv
import errno
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.testing
from rich.console import Console

from cacheslide_agents import cli
from cacheslide_agents.bench import quality
from cacheslide_agents.bench.comparison import Comparison
from cacheslide_agents.bench.quality import run
from cacheslide_agents.bench.samples import samples
from cacheslide_agents.engine import Engine, EngineConfig
from cacheslide_agents.engine.errors import ConfigError
from tests.engine.turns import ANSWER, HISTORY, NEW, OLD, QUERY, SYSTEM, tiny_engine
from tests.tiny import tiny_model, tiny_tokenizer

RECORD = {"system": SYSTEM, "old": OLD, "new": NEW, "suffix": HISTORY, "query": QUERY, "answer": ANSWER}


@pytest.fixture
def engine():
    with tiny_engine() as engine:
        yield engine


def _file(tmp_path: Path, *records: object) -> str:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_so_when_nothing_slid_in_a_prompt(engine, tmp_path):
    console = _console()
    records = [{**RECORD, "id": "long"}, {**RECORD, "id": "short", "suffix": "Ann: Hello.\n"}]
    policies = ["slide", "promptcache"]
    run([_file(tmp_path, *records)], policies=policies, repeats=1, answer_tokens=2, console=console, engine=engine)
    assert "slide: no text slid in 1 of 2: " in _shown(console) and "prefix: no text slid" not in _shown(console)
    assert "promptcache: no text slid in 2 of 2: " in _shown(console), "it never moves a segment"


def test_files_agree_with_the_table_when_two_prompts_are_measured(engine, tmp_path):
    console = _console()
    files: dict[str, Any] = {
        "json_file": tmp_path / "q.json",
        "csv_file": tmp_path / "q.csv",
        "picture_file": tmp_path / "q.png",
    }
    records = ({**RECORD, "id": "a", "old_value": "Paris"}, {**RECORD, "id": "b", "answer": None})
    asked: dict[str, Any] = {"policies": ["slide"], "budgets": [0.5], "repeats": 1, "answer_tokens": 4}
    run([_file(tmp_path, *records)], console=console, engine=engine, **asked, **files)
    figures = json.loads(files["json_file"].read_text(encoding="utf-8"))
    with files["csv_file"].open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["variant"] for line in lines] == ["recompute", "prefix", "slide", "slide 50 %"]
    assert len(figures["measurements"]) == 2 * len(lines)
    table = _shown(console).splitlines()
    for line, summary in zip(lines, figures["summaries"], strict=True):
        assert {name: "" if value is None else str(value) for name, value in summary.items()} == line
        own = [one for one in figures["measurements"] if one["variant"] == line["variant"]]
        assert float(line["mean_kl"]) == pytest.approx(sum(one["kl"] for one in own) / 2)
        rows = [[cell.strip() for cell in text.split("│")[1:-1]] for text in table if text.startswith("│")]
        cells, answers = (row for row in rows if row[0] == line["variant"])
        assert cells[1] == f"{summary['ttft_seconds']:.3f}"
        assert float(cells[6]) == pytest.approx(summary["mean_kl"], abs=5e-5)
        assert float(answers[1]) == pytest.approx(summary["full_f1"], abs=5e-5)
    assert figures["left_out"] == []
    assert figures["environment"]["dtype"] == "float32"
    assert files["picture_file"].read_bytes().startswith(b"\x89PNG")


def test_others_are_measured_when_a_record_is_bad_or_too_long(engine, tmp_path, capsys):
    console = _console()
    long = {**RECORD, "id": "long", "suffix": HISTORY * 40}
    with pytest.raises(typer.Exit) as stopped:
        run([_file(tmp_path, {"old": 3}, long, RECORD)], policies=["prefix"], repeats=1, console=console, engine=engine)
    assert stopped.value.exit_code == 1
    assert "mine: 1 prompt," in _shown(console)
    errors = capsys.readouterr().err
    assert "mine.jsonl:1: " in errors
    assert "mine: long: the prompt has" in errors and "shorten the prompt" in errors
    assert "2 records were left out" in errors


@pytest.mark.parametrize("where", ["query", "answer", "old_value"])
def test_others_are_measured_when_the_model_gives_no_numbers_for_one(where, tmp_path, capsys):
    model, tokenizer = tiny_model(), tiny_tokenizer(None)
    (broken,) = tokenizer.encode("Q", add_special_tokens=False)
    model.state_dict()["model.embed_tokens.weight"][broken] = float("nan")
    console, records = _console(), [{**RECORD, "id": "broken", where: "QQ"}, RECORD]
    settings = EngineConfig(pool_tokens=8192, dtype="float32")
    with Engine.from_model(model, tokenizer, settings) as engine, pytest.raises(typer.Exit) as stopped:
        run([_file(tmp_path, *records)], policies=["prefix"], repeats=1, console=console, engine=engine)
    assert stopped.value.exit_code == 1
    assert "mine: 1 prompt," in _shown(console)
    errors = capsys.readouterr().err
    assert "mine: broken: the " in errors and "finite number" in errors
    assert "1 record was left out" in errors


def test_file_is_refused_before_the_model_is_loaded_when_it_is_an_input(tmp_path):
    mine = Path(_file(tmp_path, RECORD))
    before = mine.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--csv .*mine\.jsonl is an input too"):
        run([str(mine)], csv_file=mine, model=str(tmp_path / "no model"), console=_console())
    assert mine.read_text(encoding="utf-8") == before


def test_error_is_raised_when_no_prompt_can_be_measured(engine, tmp_path):
    with pytest.raises(ConfigError, match=r"no prompt could be measured\. mine: mine-1: the prompt has"):
        run([_file(tmp_path, {**RECORD, "suffix": HISTORY * 40})], console=_console(), engine=engine)


def test_what_was_measured_is_shown_when_it_is_interrupted(engine, tmp_path, monkeypatch, capsys):
    measure = Comparison.measure
    calls = []

    def once(comparison, turns):
        calls.append(turns)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return measure(comparison, turns)

    monkeypatch.setattr(Comparison, "measure", once)
    console = _console()
    with pytest.raises(typer.Exit) as stopped:
        run([_file(tmp_path, RECORD, RECORD)], policies=["prefix"], repeats=1, console=console, engine=engine)
    assert stopped.value.exit_code == 130
    assert "mine: 1 prompt," in _shown(console)
    assert "stopped after 1 of 2 prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "raised"),
    [("summarize", typer.Exit), ("show_summaries", KeyboardInterrupt), ("draw", KeyboardInterrupt)],
)
def test_figures_are_written_when_it_is_interrupted_after_measuring(part, raised, engine, tmp_path, monkeypatch):
    def interrupt(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, part, interrupt)
    files = {"json_file": tmp_path / "q.json", "csv_file": tmp_path / "q.csv", "picture_file": tmp_path / "q.png"}
    asked: dict[str, Any] = {"policies": ["prefix"], "repeats": 1, "console": _console(), "engine": engine}
    with pytest.raises(raised):
        run([_file(tmp_path, RECORD)], **asked, **files)
    assert len(json.loads(files["json_file"].read_text(encoding="utf-8"))["measurements"]) == 2


def test_files_are_written_when_standard_output_fails(engine, tmp_path):
    class Full(io.StringIO):
        def write(self, _text):
            raise OSError(errno.ENOSPC, "No space left on device")

    files = {"json_file": tmp_path / "q.json", "csv_file": tmp_path / "q.csv", "picture_file": tmp_path / "q.png"}
    asked: dict[str, Any] = {"policies": ["prefix"], "repeats": 1, "console": Console(file=Full()), "engine": engine}
    with pytest.raises(OSError, match="No space left"):
        run([_file(tmp_path, RECORD)], **asked, **files)
    assert all(path.exists() for path in files.values())


def test_names_are_shown_as_they_are_when_they_look_like_markup(engine, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    console = _console()
    mine = Path(_file(tmp_path, {**RECORD, "id": "turn [/0] :dog:"})).rename(tmp_path / r"[bold] :cat: $\x$.jsonl")
    files = {"json_file": tmp_path / "[red].json", "picture_file": tmp_path / "q.png"}
    run([str(mine)], policies=["prefix"], repeats=1, answer_tokens=2, console=console, engine=engine, **files)
    assert r"[bold] :cat: $\x$: 1 prompt, time and divergence" in _shown(console)
    assert f"figures: {tmp_path}/[red].json\n" in _shown(console)
    assert r"[bold] :cat: $\x$: turn [/0] :dog:" in capsys.readouterr().err


def test_samples_differ_from_turn_to_turn_when_read():
    for turns in samples().turns:
        assert turns.first.segments[1] != turns.second.segments[1], turns.id
        assert turns.second.text.startswith(turns.first.segments[0].text)
        assert turns.answer
        if turns.old_value:
            assert turns.old_value in turns.first.segments[1].text
            assert turns.old_value not in turns.second.segments[1].text


@pytest.mark.real_model
@pytest.mark.slow
def test_command_measures_every_policy_when_two_prompts_are_given(tmp_path):
    records = [{**RECORD, "suffix": "A short history. " * 8, "answer": answer} for answer in (" tea", " coffee")]
    words = ["bench", "quality", _file(tmp_path, *records), "--repeats", "1", "--answer-tokens", "2"]
    done = typer.testing.CliRunner().invoke(cli.app, [*words, "--picture", str(tmp_path / "q.png")])
    assert done.exit_code == 0, done.output
    assert "mine: 2 prompts, time and divergence" in done.output
    for policy in ("recompute", "prefix", "head", "slide"):
        assert f"│ {policy} " in done.output
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")
