"""Progress of long steps for a person at a terminal: a bar there, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Say = Callable[[str], None]
"""Takes one line for the person who waits."""


def say(line: str) -> None:
    """The default `Say`: one line on stderr."""
    print(f"cacheslide: {line}", file=sys.stderr, flush=True)


@contextmanager
def long_step(title: str, total: int, line: Say | None = None) -> Iterator[Callable[[int], None]]:
    """Show one long step; the block gets a function that takes how much more of `total` is done.

    Args:
        title: What happens, as in "converting SmolLM2 (once)".
        total: The step's size in any unit, above 0.
        line: Takes plain lines in place of stderr; None also allows a bar.
    """
    started = time.monotonic()
    if line is None and sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress, TextColumn
        except ImportError:
            pass
        else:
            columns = (TextColumn("{task.description}", markup=False), *Progress.get_default_columns()[1:])
            with Progress(*columns, console=Console(stderr=True)) as bar:
                task = bar.add_task(title, total=total)
                yield lambda amount: bar.advance(task, amount)
            return
    line = line or say
    line(f"{title}…")
    done = 0
    shown_quarters = 0

    def advance(amount: int) -> None:
        nonlocal done, shown_quarters
        done += amount
        quarters = 4 * done // total
        if shown_quarters < quarters < 4:
            shown_quarters = quarters
            line(f"{title}: {25 * quarters} %")

    yield advance
    line(f"{title}: done in {time.monotonic() - started:.1f} s")
