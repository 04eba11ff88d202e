"""The demo: its strips, its figures, and what it shows with and without a terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, HumanMessage
from rich.console import Console

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.demo import run
from cacheslide_agents.demo.agent import Edit
from cacheslide_agents.demo.figures import meaning, summarize
from cacheslide_agents.demo.measure import POLICIES, TREATMENTS, Measurement, Part, Run, Turn
from cacheslide_agents.demo.picture import draw
from cacheslide_agents.demo.screen import SYMBOLS, Screen
from cacheslide_agents.demo.script import WORKSHOP, Script, ScriptedTurn
from cacheslide_agents.demo.strip import MIN_CELLS, Runs, ruler, strip
from cacheslide_agents.engine import ConfigError
from cacheslide_agents.engine.receipt import Receipt, Treatment
from tests.tiny import tiny_checkpoint

SHORT = Script(
    instructions="You are a helpful assistant with a memory of what the user told you.",
    memory=("The user lives in Paris.", "The user likes tea."),
    history=(
        HumanMessage("Yesterday we walked to the market, bought some bread, and talked about the weather." * 3),
        AIMessage("You bought some bread."),
    ),
    turns=(
        ScriptedTurn("What did we buy?"),
        ScriptedTurn("Where do I live?", (Edit("The user lives in Paris.", "The user lives in Rome."),)),
        ScriptedTurn("What do I like?"),
        ScriptedTurn("Who is Alice?", (Edit(old="The user likes tea."), Edit(new="Alice is the user's sister."))),
    ),
)
"""A conversation for a random model whose tokens are a few characters long."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models gain nothing from two threads, and lose much where both must wait for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def outcome(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """One run without a terminal: what it printed, its figures, its picture."""
    folder = tmp_path_factory.mktemp("outcome")
    printed = io.StringIO()
    run(
        model=str(checkpoint),
        json_file=folder / "new" / "turns.json",
        picture_file=folder / "new" / "turns.png",
        script=SHORT,
        screen=Screen(Console(file=printed, width=80, force_terminal=False)),
    )
    figures = json.loads((folder / "new" / "turns.json").read_text(encoding="utf-8"))
    return printed.getvalue(), figures, folder / "new" / "turns.png"


# The strip.


@st.composite
def partitions(draw: st.DrawFn) -> Runs:
    lengths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=40))
    kinds = draw(st.lists(st.sampled_from(TREATMENTS), min_size=len(lengths), max_size=len(lengths)))
    runs: list[tuple[int, int, Treatment]] = []
    for length, kind in zip(lengths, kinds, strict=True):
        start = runs[-1][1] if runs else 0
        runs.append((start, start + length, kind))
    return runs


@given(partitions(), st.integers(MIN_CELLS, 200))
def test_strip_is_as_wide_as_asked_when_scaled(runs: Runs, width: int) -> None:
    cells = strip(runs, width)
    assert len(cells) == width
    assert set(cells) == {treatment for _, _, treatment in runs}


@given(partitions())
def test_strip_shows_each_token_when_it_has_a_cell_for_each(runs: Runs) -> None:
    assert strip(runs, runs[-1][1] if runs[-1][1] >= MIN_CELLS else 4 * runs[-1][1]) == [
        treatment
        for start, stop, treatment in runs
        for _ in range((stop - start) * (1 if runs[-1][1] >= MIN_CELLS else 4))
    ]


def test_strip_shows_one_token_when_it_is_an_edited_word() -> None:
    cells = strip([(0, 500, "exact"), (500, 501, "fresh"), (501, 990, "slid"), (990, 1000, "fresh")], 40)
    assert cells == [*["exact"] * 20, "fresh", *["slid"] * 18, "fresh"]


def test_strip_shows_scattered_tokens_in_their_share_when_no_cell_is_mostly_theirs() -> None:
    runs: list[tuple[int, int, Treatment]] = []
    for start in range(0, 1000, 10):
        runs += [(start, start + 8, "slid"), (start + 8, start + 10, "corrected")]
    assert strip(runs, 50).count("corrected") == pytest.approx(10, abs=1)


def test_ruler_names_the_parts_when_there_is_room() -> None:
    parts = [
        Part("instructions", 0, 20),
        Part("memory", 20, 30),
        Part("earlier messages", 30, 95),
        Part("question", 95, 100),
    ]
    assert ruler(parts, 100) == "instructions        memory    earlier messages" + " " * 46 + "question"
    assert ruler(parts, 50) == "          memory earlier messages         question"
    assert ruler(parts, 20) == "    memory  question"
    assert ruler(parts, 4) == ""


# Turns and figures.


def _turn(number: int = 1, ours: str = "yes", theirs: str = "yes", prefix: str = "yes", fresh_tokens: int = 10) -> Turn:
    """A turn of 100 tokens; the rivals take two and four times as long as slide's half second."""
    receipt = Receipt("slide", None, 100, 20, 80 - fresh_tokens, 5, fresh_tokens + 0)
    runs: tuple[tuple[int, int, Treatment], ...] = (
        (0, 20, "exact"),
        (20, 25, "corrected"),
        (25, 100 - fresh_tokens, "slid"),
        (100 - fresh_tokens, 100, "fresh"),
    )
    slide = replace(receipt, slid_tokens=80 - fresh_tokens, ttft_seconds=0.5, treatments=runs)
    whole = Receipt("recompute", None, 100, 0, 0, 0, 100, ttft_seconds=2.0, treatments=((0, 100, "fresh"),))
    before = replace(whole, policy="prefix", exact_tokens=20, fresh_tokens=80, ttft_seconds=1.0)
    parts = (
        Part("instructions", 0, 10),
        Part("memory", 10, 30),
        Part("earlier messages", 30, 90),
        Part("question", 90, 100),
    )
    answers = {
        "slide": Run(ours, slide.to_dict()),
        "prefix": Run(prefix, before.to_dict()),
        "recompute": Run(theirs, whole.to_dict()),
    }
    return Turn(number, "Is it?", (), parts, {policy: answers[policy] for policy in POLICIES})


@pytest.mark.parametrize(
    ("ours", "theirs", "word"),
    [
        ("It is red.", "It is red.", None),
        ("It is red.", "It is blue.", 3),
        ("It is", "It is red.", 3),
        ("", "It", 1),
        ("It  is", "It is", 3),
    ],
)
def test_first_differing_word_is_counted_when_answers_are_compared(ours: str, theirs: str, word: int | None) -> None:
    turn = _turn(ours=ours, theirs=theirs)
    assert turn.differs_at_word() == word
    assert turn.agrees() == (word is None)


def test_summary_leaves_the_first_turn_out_when_there_are_more() -> None:
    summary = summarize([_turn(1, fresh_tokens=70), _turn(2), _turn(3, ours="no")])
    assert summary.first_turn == 2
    assert summary.computed_tokens == {"slide": 15, "prefix": 80, "recompute": 100}
    assert summary.speedup == {"prefix": 2.0, "recompute": 4.0}
    assert (summary.num_agree, summary.num_turns) == (2, 3)


def test_closing_sentence_has_the_numbers_when_turns_are_told() -> None:
    said = meaning([_turn(1), _turn(2)])
    for number in ("100 prompt tokens", "computed 15", "80", "0.50 s", "1.00 s", "2.00 s", "2.0 times", "4.0 times"):
        assert number in said
    assert "2 of 2 answers" in said


# What a run shows and writes.


def test_text_is_plain_when_there_is_no_terminal(outcome: tuple[str, dict[str, Any], Path]) -> None:
    printed, figures, _ = outcome
    assert all(character == "\n" or character.isprintable() for character in printed)
    assert all(len(line) <= 80 for line in printed.splitlines() if "tmp" not in line)
    for turn in figures["turns"]:
        assert f"Turn {turn['number']} of 4 " in printed
        assert turn["message"] in printed
        symbols = {SYMBOLS[treatment] for treatment, count in turn["tokens"].items() if count}
        assert any(set(line.strip()) == symbols and len(line) == 80 for line in printed.splitlines())
    assert "- The user lives in Paris." in printed
    assert "+ The user lives in Rome." in printed
    assert "median" in printed


def test_figures_add_up_when_written_as_json(outcome: tuple[str, dict[str, Any], Path]) -> None:
    _, figures, _ = outcome
    assert set(figures) == {"schema", "environment", "settings", "turns", "summary"}
    assert len(figures["turns"]) == 4
    for turn in figures["turns"]:
        assert set(turn["runs"]) == set(POLICIES)
        receipts = {policy: turn["runs"][policy]["receipt"] for policy in POLICIES}
        for policy, receipt in receipts.items():
            assert receipt["policy"] == policy
            assert receipt["fallback"] is None
            assert receipt["ttft_seconds"] > 0
        total = receipts["slide"]["prompt_tokens"]
        assert sum(turn["tokens"].values()) == total
        assert turn["tokens"]["slid"] == receipts["slide"]["slid_tokens"] - receipts["slide"]["corrected_tokens"]
        assert [part["start"] for part in turn["parts"][1:]] == [part["stop"] for part in turn["parts"][:-1]]
        assert (turn["parts"][0]["start"], turn["parts"][-1]["stop"]) == (0, total)
        assert turn["agrees"] == (turn["runs"]["slide"]["answer"] == turn["runs"]["recompute"]["answer"])
    kinds = [[edit["kind"] for edit in turn["edits"]] for turn in figures["turns"]]
    assert kinds == [[], ["edit"], [], ["delete", "insert"]]


def test_no_run_feeds_another_when_policies_are_measured(outcome: tuple[str, dict[str, Any], Path]) -> None:
    first, *later = outcome[1]["turns"]
    for policy in POLICIES:
        assert first["runs"][policy]["receipt"]["cache_read_tokens"] == 0
    for turn in later:
        receipts = {policy: turn["runs"][policy]["receipt"] for policy in POLICIES}
        assert receipts["recompute"]["cache_read_tokens"] == 0
        assert receipts["prefix"]["slid_tokens"] == 0
        assert receipts["slide"]["slid_tokens"] > 0
        memory_stop = next(part["stop"] for part in turn["parts"] if part["name"] == "memory")
        if turn["edits"]:
            assert receipts["prefix"]["exact_tokens"] < memory_stop


def test_picture_is_drawn_when_a_png_is_wanted(outcome: tuple[str, dict[str, Any], Path]) -> None:
    content = outcome[2].read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 20_000
    assert sorted(path.name for path in outcome[2].parent.iterdir()) == ["turns.json", "turns.png"]


def test_model_name_is_shown_as_it_is_when_it_looks_like_a_formula() -> None:
    assert draw([_turn(1), _turn(2)], r"tiny $\x$", "png").startswith(b"\x89PNG")


def _hold(model: Path, **settings: Any) -> None:
    run(model=str(model), turns=2, script=SHORT, **settings)


def test_figures_are_shown_when_a_file_cannot_be_written(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(typer.Exit) as stopped:
        _hold(checkpoint, json_file=tmp_path / "file" / "a.json", picture_file=tmp_path / "turns.svg")
    assert stopped.value.exit_code == 1
    shown = capsys.readouterr()
    assert "Medians from turn 2 on" in shown.out
    complaints = [line for line in shown.err.splitlines() if "cannot be written" in line]
    assert len(complaints) == 1
    assert str(tmp_path / "file" / "a.json") in complaints[0]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "turns.svg"]


def test_picture_format_is_named_when_it_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"turns\.xyz cannot be drawn as xyz: end it in one of .*png"):
        _hold(tmp_path / "no model", picture_file=tmp_path / "turns.xyz")
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_extra_is_named_when_matplotlib_is_absent(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _hold(checkpoint, picture_file=tmp_path / "turns.png")
    assert "pip install 'cacheslide-agents[demo]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_turns_are_limited_when_the_script_has_not_as_many(turns: int) -> None:
    with pytest.raises(ConfigError, match=f"--turns {turns}: .* 4 turns"):
        run(turns=turns, script=SHORT)


def test_run_ends_with_one_line_when_interrupted(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "turn", interrupt)
    with pytest.raises(typer.Exit) as stopped:
        _hold(checkpoint, json_file=tmp_path / "a.json")
    assert stopped.value.exit_code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "cacheslide: stopped after 0 of 2 turns; nothing was written"


# The screen.


def _shown(turn: Turn, **console: Any) -> str:
    printed = io.StringIO()
    screen = Screen(Console(file=printed, **{"force_terminal": False, **console}))
    screen.legend()
    screen.after_turn(turn)
    screen.table([turn, replace(turn, number=2)])
    return printed.getvalue()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("terminal")
def test_strip_has_colours_when_there_is_a_terminal() -> None:
    shown = _shown(_turn(), force_terminal=True, color_system="truecolor", width=80)
    assert "\x1b[48;2;" in shown
    assert not any(symbol * 3 in shown for symbol in SYMBOLS.values())


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_strip_has_symbols_when_colours_are_not_wanted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "dumb")
    shown = _shown(_turn(), force_terminal=True, width=80)
    assert "\x1b[4" not in shown
    assert "~~~" in shown


@pytest.mark.parametrize("width", [4, 20, 30, 40, 60, 71, 72, 80, 200])
def test_lines_fit_when_the_terminal_is_narrow(width: int) -> None:
    shown = _shown(_turn(ours="It is red.", theirs="It is blue."), width=width)
    assert all(len(line) <= max(width, 26) for line in shown.splitlines())


def test_difference_is_told_when_answers_differ() -> None:
    shown = _shown(_turn(ours="It is red.", theirs="It is blue.", prefix="It is grey."), width=100)
    assert "no, from word 3 on: computing everything gives “It is blue.”" in shown
    assert "prefix caching, exact but for rounding, gives “It is grey.”" in shown


def test_answer_stays_on_its_line_when_it_has_control_characters() -> None:
    shown = _shown(_turn(ours="a\x1b[31mb\rc\td", theirs=""), width=100)
    assert "a [31mb c d" in shown
    assert "(nothing)" in shown


# The real model.


@pytest.mark.real_model
@pytest.mark.slow
def test_every_turn_reuses_its_history_when_the_memory_was_edited() -> None:
    with closing(CacheSlideChat(max_tokens=8)) as chat:
        measurement = Measurement(chat, WORKSHOP)
        for number, scripted in enumerate(WORKSHOP.turns, 1):
            measurement.prepare(scripted)
            turn = measurement.turn(number, scripted)
            tokens = turn.slide.prompt_tokens
            assert 1000 <= tokens <= 2000
            assert turn.runs["recompute"].computed_tokens == pytest.approx(tokens, abs=4)
            if number > 1:
                assert turn.slide.computed_tokens < 0.2 * tokens
            if number > 1 and scripted.edits:
                assert turn.slide.computed_tokens < 0.25 * turn.runs["prefix"].computed_tokens
