"""A prompt as a strip of cells, one treatment each. Knows no colours and no terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cacheslide_agents.engine.receipt import Treatment

from .measure import Part

MIN_CELLS = 4
"""Cells in which every treatment can be seen."""

Runs = Sequence[tuple[int, int, Treatment]]
"""(start, stop, treatment) of contiguous tokens, partitioning a prompt."""


def strip(runs: Runs, width: int) -> list[Treatment]:
    """Scales a prompt to a width.

    Each cell shows a treatment of the tokens that it stands for. What a cell leaves out is owed and shown by the next
    one that can, so that treatments have about their share of the strip, scattered tokens too. Every treatment that
    occurs is shown, and so is every fresh run while there are few: the edited line of a memory is what people look
    for, and is seldom as long as a cell.

    Args:
        runs: The prompt's treatments.
        width: Cells, at least `MIN_CELLS`.

    Returns:
        `width` treatments.
    """
    assert width >= MIN_CELLS
    overlaps = _overlaps(runs, width)
    owed: Counter[Treatment] = Counter()
    cells: list[Treatment] = []
    for overlap in overlaps:
        owed.update(overlap)
        shown = max(overlap, key=lambda treatment: owed[treatment])
        owed[shown] -= overlap.total()
        cells.append(shown)
    _show_fresh(runs, cells)
    _show_all(overlaps, cells)
    return cells


def ruler(parts: Sequence[Part], width: int) -> str:
    """The names of a prompt's parts, each under cells of its part.

    The last name ends with the strip, since the last part is often narrower than its name. Names without room are
    left out, the first before all others: what stands at the beginning needs saying least.
    """
    total = parts[-1].stop
    last = parts[-1].name
    line = " " * (width - len(last)) + last if len(last) <= width else " " * width
    free = 0
    for part in (*parts[1:-1], parts[0]):
        start, name = part.start * width // total, part.name
        start = max(start, free) if part is not parts[0] else start
        stop = start + len(name)
        if start * total < part.stop * width and not line[start : stop + 1].strip() and stop < width:
            line = line[:start] + name + line[stop:]
            free = stop + 1
    return line.rstrip()


def _overlaps(runs: Runs, width: int) -> list[Counter[Treatment]]:
    """For each cell, how much of it each treatment covers. In units of 1/width token, so that they are whole."""
    total = runs[-1][1]
    overlaps: list[Counter[Treatment]] = [Counter() for _ in range(width)]
    for start, stop, treatment in runs:
        for cell in range(start * width // total, -(-stop * width // total)):
            covered = min(stop * width, (cell + 1) * total) - max(start * width, cell * total)
            overlaps[cell][treatment] += covered
    return overlaps


def _show_fresh(runs: Runs, cells: list[Treatment]) -> None:
    """Gives every fresh run a cell in which it lies, unless there are many."""
    total, width = runs[-1][1], len(cells)
    fresh = [(start, stop) for start, stop, treatment in runs if treatment == "fresh"]
    if len(fresh) > width // MIN_CELLS:
        return
    for start, stop in fresh:
        if "fresh" not in cells[start * width // total : -(-stop * width // total)]:
            cells[(start + stop) * width // (2 * total)] = "fresh"


def _show_all(overlaps: list[Counter[Treatment]], cells: list[Treatment]) -> None:
    """Gives every treatment that occurs a cell, at the cost of one that has several."""
    for treatment in {treatment for overlap in overlaps for treatment in overlap}.difference(cells):
        shown = Counter(cells)
        spare = [idx for idx, owner in enumerate(cells) if shown[owner] > 1]
        cells[max(spare, key=lambda idx: overlaps[idx][treatment])] = treatment
