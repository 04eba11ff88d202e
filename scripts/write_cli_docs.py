"""Writes docs/cli.md from the command's own help: `make docs`. A test fails when the file is stale."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from cacheslide_agents.cli import app

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"


def _paths(commands: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The ways to a command and its subcommands, depth first."""
    found = [path]
    for name, command in commands.items():
        found += _paths(getattr(command, "commands", {}), (*path, name))
    return found


def cli_docs() -> str:
    """The page's text."""
    commands = getattr(typer.main.get_command(app), "commands", {})
    parts = ["# The command `cacheslide`\n\nWritten by `make docs` from the command's own help.\n"]
    for path in _paths(commands):
        done = CliRunner().invoke(app, [*path, "--help"], prog_name="cacheslide", terminal_width=100)
        assert done.exit_code == 0, done.output
        parts.append(f"## `{' '.join(('cacheslide', *path))}`\n\n```text\n{done.output.strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(cli_docs(), encoding="utf-8")
