"""Tables that commands and benchmarks print, and the console that they print them on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 200
"""Columns where standard output is no terminal: whole tables, whatever the width that rich would assume."""


def standard_console(pipe_width: int | None = PIPE_WIDTH) -> Console:
    """The console of standard output; characters that its encoding lacks become question marks.

    Args:
        pipe_width: Columns where it is no terminal; None leaves that to rich.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    return Console(width=None if sys.stdout.isatty() else pipe_width)


def show_table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows of values as `cell` writes them; the first column names them. No text is read as markup."""
    table = Table(title=Text(title, "bold"), title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number else "left", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    console.print(table)


def cell(value: object) -> str:
    """A value as it stands in a table: small figures by their power of ten, nothing as a dash."""
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
    return "–" if value is None else str(value)
