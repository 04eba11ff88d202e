"""Shows the demo on a terminal in colours, or as plain text where there is none or colours are not wanted."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from textwrap import wrap
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cacheslide_agents.engine.receipt import Treatment

from ..tables import standard_console
from .figures import meaning, summarize
from .measure import TREATMENTS, Turn
from .script import ScriptedTurn
from .strip import MIN_CELLS, ruler, strip

MAX_WIDTH = 100
WIDE_TABLE = 72
"""Columns from which the table of turns fits."""

INDENT = 2
LABEL = 12
"""Columns of the labels before a turn's lines."""

SYMBOLS: dict[Treatment, str] = {"exact": "=", "slid": "~", "corrected": "+", "fresh": "#"}
COLOURS: dict[Treatment, str] = {"exact": "#2f5d9b", "slid": "#8fbbe8", "corrected": "#f0b429", "fresh": "#d1495b"}
"""Blues are reused, warm colours computed; told apart with any kind of colour vision."""

FEW_COLOURS: dict[Treatment, str] = {"exact": "blue", "slid": "cyan", "corrected": "yellow", "fresh": "red"}
"""Where a terminal has sixteen."""

EXPLANATIONS: dict[Treatment, str] = {
    "exact": "reused; everything before it is as it was",
    "slid": "reused and moved, though something before it changed",
    "corrected": "slid, then computed again against the new memory",
    "fresh": "computed",
}


class Screen:
    """Where the demo is shown.

    Args:
        console: Decides on colours and width; by default that of standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or standard_console(pipe_width=None)
        self.width = max(MIN_CELLS + INDENT, min(self._console.width, MAX_WIDTH))
        self._is_live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._colours = FEW_COLOURS if self._console.color_system == "standard" else COLOURS
        self.is_coloured = self._is_live and not self._console.no_color and self._console.color_system is not None

    def line(self, text: str = "", style: str = "") -> None:
        """A paragraph, wrapped."""
        for part in wrap(text, self.width) or [""]:
            self._print(Text(part, style))

    def progress(self, text: str) -> None:
        """What a long step is about; on stderr where standard output is a file or a pipe."""
        if self._is_live:
            self.line(text, "dim")
        else:
            print(f"cacheslide: {text}", file=sys.stderr, flush=True)  # noqa: T201

    @contextmanager
    def waiting(self) -> Iterator[Live | None]:
        """Room for a line that says what is done now and goes away; None where nothing can go away.

        Nothing turns while it waits: an animation would take time from what is measured.
        """
        if not self._is_live:
            yield None
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            yield live

    def legend(self) -> None:
        """What the strip's colours or symbols mean."""
        for treatment in TREATMENTS:
            sign = self._cells([treatment] * (2 if self.is_coloured else 1))
            explained = wrap(EXPLANATIONS[treatment], max(10, self.width - INDENT - 14))
            for idx, part in enumerate(explained):
                head = Text.assemble(sign, f" {treatment:<10} ") if idx == 0 else Text(" " * (len(sign) + 12))
                self._print(Text(" " * INDENT) + head + Text(part))

    def before_turn(self, number: int, num_turns: int, scripted: ScriptedTurn) -> None:
        """The turn's heading, the edits of the memory and what the user says."""
        heading = f"Turn {number} of {num_turns} "
        self._print(Text(""))
        self._print(Text(heading + "-" * max(0, self.width - len(heading)), "bold"))
        lines = [
            (sign, line, style)
            for edit in scripted.edits
            for sign, line, style in (("-", edit.old, "red"), ("+", edit.new, "green"))
            if line is not None
        ]
        for idx, (sign, line, style) in enumerate(lines):
            self._labelled("memory" if idx == 0 else "", f"{sign} {line}", style)
        if not lines:
            self._labelled("memory", "as it was", "dim")
        self._labelled("user", scripted.message)

    def after_turn(self, turn: Turn) -> None:
        """The answer, the strip, tokens, times, and whether recomputation answers the same."""
        self._labelled("agent", turn.slide.answer or "(nothing)", "bold")
        cells = self.width - INDENT
        self._print(Text(" " * INDENT) + self._cells(strip(turn.slide.treatments, cells)))
        self._print(Text(" " * INDENT + ruler(turn.parts, cells), "dim"))
        counts = ", ".join(f"{count:,} {treatment}" for treatment, count in turn.slide.tokens.items() if count)
        computed = f"{turn.slide.computed_tokens:,} of {turn.slide.prompt_tokens:,}"
        self._labelled("computed", f"{computed}: {counts}")
        times = {policy: f"{run.ttft_seconds:.2f} s" for policy, run in turn.runs.items()}
        self._labelled(
            "first token",
            f"{times['slide']}; with prefix caching {times['prefix']}, computing everything {times['recompute']}",
        )
        if fallback := turn.slide.receipt["fallback"]:
            self._labelled("fallback", str(fallback), "yellow")
        self._agreement(turn)

    def table(self, turns: Sequence[Turn]) -> None:
        """Every turn in a line, then the medians."""
        summary = summarize(turns)
        self._print(Text(""))
        self.line("Prompt tokens, seconds to the first token, and how many times as long the others took:")
        self._print(Text(""))
        rows = [
            (
                str(turn.number),
                f"{turn.slide.prompt_tokens:,}",
                f"{turn.slide.computed_tokens:,}",
                *(f"{turn.runs[policy].ttft_seconds:.2f} s" for policy in ("slide", "prefix", "recompute")),
                *(f"{turn.speedup(rival):.1f}x" for rival in ("prefix", "recompute")),
                "yes" if turn.agrees() else f"to word {turn.differs_at_word()}",
            )
            for turn in turns
        ]
        medians = (
            "median*",
            f"{summary.prompt_tokens:,.0f}",
            f"{summary.computed_tokens['slide']:,.0f}",
            *(f"{summary.ttft_seconds[policy]:.2f} s" for policy in ("slide", "prefix", "recompute")),
            *(f"{summary.speedup[rival]:.1f}x" for rival in ("prefix", "recompute")),
            f"{summary.num_agree} of {summary.num_turns}",
        )
        if self.width >= WIDE_TABLE:
            self._wide_table(rows, medians)
        else:
            self._narrow_table([*rows, medians])
        first = f"* of turn {summary.first_turn} and later: before it there is nothing to reuse"
        self.line(first if len(turns) > 1 else "* of the one turn, which had nothing to reuse", "dim")

    def meaning(self, turns: Sequence[Turn]) -> None:
        """What the numbers mean."""
        self._print(Text(""))
        self.line(meaning(turns))

    def failure(self, text: str) -> None:
        """What went wrong, one line on stderr."""
        print(f"cacheslide: {' '.join(text.split())}", file=sys.stderr, flush=True)  # noqa: T201

    def _agreement(self, turn: Turn) -> None:
        word = turn.differs_at_word()
        if word is None:
            self._labelled("agrees", "yes: computing everything gives the same answer", "green")
        else:
            theirs = turn.runs["recompute"].answer or "(nothing)"
            self._labelled("agrees", f"no, from word {word} on: computing everything gives “{theirs}”", "yellow")
        if not turn.agrees("prefix"):
            other = turn.runs["prefix"].answer or "(nothing)"
            self._labelled("", f"prefix caching, exact but for rounding, gives “{other}”", "yellow")

    def _wide_table(self, rows: Sequence[Sequence[str]], medians: Sequence[str]) -> None:
        table = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold")
        titles = ("", "prompt\ntokens", "com-\nputed", "Cache-\nSlide", "prefix\ncaching", "every-\nthing")
        for title in (*titles, "prefix\ncaching", "every-\nthing", "same\nanswer"):
            table.add_column(title, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        table.add_row(*medians, style="bold")
        self._print(table)

    def _narrow_table(self, rows: Sequence[Sequence[str]]) -> None:
        for number, prompt, computed, ours, prefix, everything, by_prefix, by_everything, same in rows:
            self.line(
                f"{'turn ' if number.isdigit() else ''}{number}: {computed} of {prompt} tokens computed; first token "
                f"{ours}, prefix caching {prefix} ({by_prefix}), everything {everything} ({by_everything}); "
                f"same answer: {same}"
            )

    def _labelled(self, label: str, text: str, style: str = "") -> None:
        room = self.width - INDENT - LABEL
        if room < 20:  # too narrow for a column of labels
            self.line(f"{label}: {text}" if label else text, style)
            return
        for idx, part in enumerate(wrap(_printable(text), room)):
            head = f"{'':{INDENT}}{label if idx == 0 else '':<{LABEL}}"
            self._print(Text.assemble((head, "dim"), (part, style)))

    def _cells(self, cells: Sequence[Treatment]) -> Text:
        text = Text()
        for treatment, run in groupby(cells):
            num_cells = len(list(run))
            if self.is_coloured:
                text.append(" " * num_cells, f"on {self._colours[treatment]}")
            else:
                text.append(SYMBOLS[treatment] * num_cells)
        return text

    def _print(self, what: Any) -> None:
        self._console.print(what, highlight=False, markup=False, soft_wrap=isinstance(what, Text))


def _printable(text: str) -> str:
    """The text on one line, without control characters."""
    return "".join(character if character.isprintable() else " " for character in text)
