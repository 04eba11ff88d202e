"""The command line: help, version, and errors as one line."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer.testing

from cacheslide_agents import __version__, cli
from cacheslide_agents.engine import CacheFolderError, CacheSlideError, ConfigError, ModelNotInstalledError

ROOT = Path(__file__).parents[1]


def _run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["cacheslide", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


def _raising(error: Exception) -> ModuleType:
    """A module whose `run` raises the error."""
    module = ModuleType("cacheslide_agents.demo")

    def run(**_settings: object) -> None:
        raise error

    module.__dict__["run"] = run
    return module


def test_version_is_printed_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"cacheslide {__version__}\n"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotInstalledError("the bundled model is absent:\n  run cacheslide model install"), 1),
        (CacheSlideError("something"), 1),
        (ConfigError("EngineConfig has no setting 'x'"), 2),
    ],
)
def test_error_is_one_line_when_a_command_fails(
    error: CacheSlideError, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cacheslide_agents.demo", _raising(error))
    assert _run(monkeypatch, "demo") == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: {' '.join(str(error).split())}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
@pytest.mark.parametrize("text", ["short", "longer than any buffer" * 10_000])
def test_error_is_one_line_when_standard_output_is_full(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__version__", text)
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert _run(monkeypatch, "--version") == 1
    assert capsys.readouterr().err == "error: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(("error", "lines"), [(OSError("something"), "\n"), (OSError(2, "something", "a file"), "")])
def test_traceback_is_kept_when_an_error_is_not_about_standard_output(
    error: OSError, lines: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cacheslide_agents.demo", _raising(error))
    monkeypatch.setattr(sys, "argv", ["cacheslide", "demo"])
    with pytest.raises(OSError, match="something"):
        cli.main()
    assert capsys.readouterr().out == lines


def test_usage_is_explained_when_an_option_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, "demo", "--tunrs", "3") == 2
    assert "--tunrs" in capsys.readouterr().err


def test_help_names_the_commands_when_asked_for() -> None:
    shown = typer.testing.CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    for command in ("demo", "chat", "model"):
        assert command in shown.output


def test_docs_page_is_current_when_compared_with_the_help() -> None:
    spec = importlib.util.spec_from_file_location("write_cli_docs", ROOT / "scripts" / "write_cli_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == module.cli_docs(), "run `make docs`"


def test_install_warns_when_the_cache_folder_is_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bundled = ModuleType("cacheslide_agents.engine.model.bundled")
    bundled.__dict__["install_bundled_model"] = lambda: tmp_path / "model.gguf"
    monkeypatch.setitem(sys.modules, bundled.__name__, bundled)

    def refuse() -> Path:
        raise CacheFolderError("the cache folder cannot be written")

    monkeypatch.setattr(cli, "_bundled_checkpoint", refuse)
    assert _run(monkeypatch, "model", "install") == 0
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / 'model.gguf'}\n"
    assert shown.err == "warning: not converted: the cache folder cannot be written\n"


@pytest.mark.real_model
@pytest.mark.slow
def test_chat_answers_every_line_when_lines_are_piped_in() -> None:
    shown = typer.testing.CliRunner().invoke(cli.app, ["chat", "--max-tokens", "4"], input="Hello.\n\nAnd you?\n")
    assert shown.exit_code == 0, shown.output
    first, second = (line for line in shown.output.splitlines() if line.startswith("["))
    assert first.startswith("[") and " 0 exact" in first
    assert " 0 exact" not in second
