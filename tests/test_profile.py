"""`cacheslide profile`: lengths out of prompt files, and a file that the engine takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cacheslide_agents import cli, profile
from cacheslide_agents.engine import ConfigError, Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.model import loading
from cacheslide_agents.engine.model.identity import ModelIdentity
from cacheslide_agents.profile import run
from tests.tiny import tiny_checkpoint, tiny_tokenizer

UPDATES = ("the dog sleeps", "the dog sleeps on and on", "tea")
ROLES = ("system", "update", "suffix")
SEGMENTS = [
    {"segments": [{"role": role, "text": text} for role, text in zip(ROLES, ("You ", new, "?"), strict=True)]}
    for new in UPDATES
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


def written(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def learn(model: Path, file: Path, output: Path | None = None, quantile: float = 1.0) -> None:
    run([file], model=str(model), quantile=quantile, namespace="default", output=output)


def slots_of(path: Path) -> dict[str | None, list[dict[str, dict[str, int]]]]:
    return {entry["template"]: entry["slots"] for entry in json.loads(path.read_text())["profiles"]}


def lengths(*texts: str) -> dict[str, int]:
    """How often updates of these texts have which length in the prompts above, as the file writes it."""
    tokenizer = tiny_tokenizer()
    counts: dict[str, int] = {}
    for text in texts:
        prompt = Prompt([Segment.system("You "), Segment.update(text), Segment.suffix("?")]).encode(tokenizer)
        length = str(prompt.segment_starts[2] - prompt.segment_starts[1])
        counts[length] = counts.get(length, 0) + 1
    return counts


def test_engine_uses_what_was_learned_when_it_is_given_the_file(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "positions.json"
    learn(model, written(tmp_path / "prompts.jsonl", SEGMENTS), output)
    assert slots_of(output) == {None: [{"lengths": lengths(*UPDATES)}]}
    config = EngineConfig(model=model, learned_positions=True, positions_file=output, pool_tokens=1024)
    with Engine.load(config) as engine:
        prompt = Prompt([Segment.update(UPDATES[0]), Segment.suffix("? and then?")])
        receipt = engine.generate(prompt, SamplingParams(max_tokens=1), session="s").receipt
    assert receipt.positions == "learned"


def test_every_shape_of_record_is_read_when_files_mix_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [("You know:\n", "system"), (UPDATES[0], "update")]
    content = [{"type": "text", "text": text, "cacheslide": role} for text, role in blocks]
    records: list[object] = [
        SEGMENTS[0],
        {"first": SEGMENTS[1]["segments"], "second": SEGMENTS[2]["segments"], "answer": "yes"},
        {"system": "You ", "old": UPDATES[0], "new": UPDATES[1], "suffix": "?", "query": "!", "id": 3},
        {"messages": [{"role": "system", "content": content}, {"role": "user", "content": "Hello?"}]},
    ]
    output = tmp_path / "[red].json"
    file = written(tmp_path / "prompts.jsonl", records)
    learn(model, file, output)
    by_template = slots_of(output)
    assert by_template.pop(None) == [{"lengths": lengths(*UPDATES[:2], UPDATES[2], *UPDATES[:2])}]
    ((template, (slot,)),) = by_template.items()
    assert template and sum(slot["lengths"].values()) == 1
    shown = capsys.readouterr().out
    assert "plain text: 5 prompts" in shown and "chat template" in shown and "context per prompt" in shown
    assert f"{output}: for EngineConfig" in shown, "no text is read as markup"
    learn(model, file, output)
    assert sum(slots_of(output)[None][0]["lengths"].values()) == 10, "a second run adds to the first"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "no JSON"),
        ('{"messages": ' + "9" * 5000 + "}", "an integer of more than 4300 digits: write it as text, in quotes"),
        ("[" * 100_000, "lists or objects nested deeper than Python's JSON reader goes: a single prompt is"),
        ("[]", "[] is no JSON object: a single prompt is"),
        ("{}", "old is missing: a record has the texts system, old, new, suffix and query"),
        (
            '{"segments": [{"role": "none", "text": "x"}]}',
            "segments.0.role = 'none': Input should be 'system', 'update'",
        ),
        ('{"segments": [{"role": "update"}]}', "segments.0.text is missing: a single prompt is"),
        (
            '{"segments": [{"role": "update", "text": "x"}], "more": 1}',
            "more is no key of a record: a single prompt is",
        ),
        ('{"segments": []}', "the prompt is empty"),
        ('{"messages": 3}', "messages = 3: Input should be a valid list; a single prompt is"),
        ('{"messages": [{"content": "x"}]}', "messages cannot be read"),
        ('{"messages": [3]}', "messages cannot be read"),
    ],
)
def test_line_is_named_when_it_is_no_record(
    model: Path,
    tmp_path: Path,
    line: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(SEGMENTS[0]) + "\n\n" + line + "\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["cacheslide", "profile", str(file), "--model", str(model)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"{file.name}:3 holds no prompt: {problem}" in error


def test_file_of_another_model_is_left_alone_when_it_is_the_output(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "positions.json"
    file = written(tmp_path / "prompts.jsonl", SEGMENTS)
    learn(model, file, output)
    before = output.read_text()
    with pytest.raises(ConfigError, match="learned with"):
        learn(tiny_checkpoint(tmp_path / "other", "qwen2"), file, output)
    assert output.read_text() == before


def test_no_weight_is_read_when_a_profile_is_learned(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_from_pretrained", lambda *_, **__: pytest.fail("weights were read"))
    learn(model, written(tmp_path / "prompts.jsonl", SEGMENTS))


def test_profile_is_written_when_it_cannot_be_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(profile, "standard_console", refuse)
    output = tmp_path / "positions.json"
    with pytest.raises(OSError, match="No space left"):
        learn(model, written(tmp_path / "prompts.jsonl", SEGMENTS), output)
    assert slots_of(output)


@pytest.mark.real_model
def test_bundled_model_is_the_same_when_only_its_tokenizer_is_read() -> None:
    loaded = loading.load_model(EngineConfig())
    _, identity = loading.load_tokenizer(EngineConfig())
    assert identity == ModelIdentity.of(loaded.name, loaded.model.config, loaded.tokenizer)
