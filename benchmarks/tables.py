"""Tables of the benchmarks: a target beside each figure that has one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from cacheslide_agents.bench.table import PIPE_WIDTH, cell


def standard_console() -> Console:
    """Standard output, wide enough for whole tables where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def show_table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints rows of values; None is an empty cell."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*("" if value is None else cell(value) for value in row))
    console.print(table)


def missed_targets(*targets: tuple[str, bool]) -> list[str]:
    """The names of those targets that were not reached."""
    return [name for name, reached in targets if not reached]
