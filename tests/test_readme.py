"""README's snippets run, and the commands that it names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cacheslide_agents.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md")


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _commands(text: str) -> list[str]:
    """Shell lines of `bash` blocks and of inline code that starts with one of our two commands."""
    lines = [line.partition(" #")[0].strip() for block in _blocks(text, "bash") for line in block.splitlines()]
    return [*filter(None, lines), *re.findall(r"`((?:make|cacheslide) [^`]+)`", text)]


def _cli_commands() -> set[str]:
    groups = {group.name: group.typer_instance for group in app.registered_groups if group.typer_instance}
    names = {f"{group} {command.name}" for group, sub in groups.items() for command in sub.registered_commands}
    return names | {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(_blocks(README, "python"))))
def test_snippet_runs_when_pasted(number: int) -> None:
    snippet = _blocks(README, "python")[number]
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_first_snippet_is_short_when_read() -> None:
    lines = [line for line in _blocks(README, "python")[0].splitlines() if line.strip()]
    assert len(lines) <= 10


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_when_a_page_names_them(page: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    commands = _cli_commands()
    for line in _commands((ROOT / page).read_text(encoding="utf-8")):
        program, *words = (word for word in shlex.split(line) if "=" not in word)
        if program == "make":
            named = {word for word in words if re.fullmatch(r"[a-z]+", word)}
            assert named and named <= targets, line
        elif program == "cacheslide":
            assert " ".join(word for word in words[:2] if word.islower() and word.isalpha()) in commands, line


@pytest.mark.parametrize("page", PAGES)
def test_linked_files_exist_when_a_page_names_them(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert missing == []
