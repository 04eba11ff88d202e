"""Names beside points, so that none lies over another or over a point."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DISTANCES = (7, 13, 20, 28, 38, 50, 64)
"""Points from a point to its label, tried in this order."""

_DIRECTIONS = 16
_MARKER = 5
"""Half of a marker's width in points; labels keep off it."""


@dataclass(frozen=True)
class Label:
    """A name for a point.

    Attributes:
        text: What it says.
        x: Of the point, in data coordinates.
        y: The same.
        colour: Of the text.
        size: Of the text, in points.
    """

    text: str
    x: float
    y: float
    colour: str
    size: float


def place_labels(axes: Axes, labels: Sequence[Label]) -> None:
    """Writes each label at the nearest free place; far ones get a line to their point.

    The axes' limits and place in the figure must be final.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    figure: Any = axes.figure
    canvas: Any = FigureCanvasAgg(figure)
    renderer = canvas.get_renderer()
    scale = figure.dpi / 72
    points = axes.transData.transform([(label.x, label.y) for label in labels])
    reach = _MARKER * scale
    taken = [Bbox([(x - reach, y - reach), (x + reach, y + reach)]) for x, y in points]
    inside = axes.get_window_extent(renderer)
    # Large ones first: small ones find a place between them.
    for idx in sorted(range(len(labels)), key=lambda idx: -labels[idx].size):
        label = labels[idx]
        text = axes.annotate(
            label.text,
            (label.x, label.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=label.size,
            color=label.colour,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],  # legible over a line or a grid
            zorder=4,
            arrowprops={"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3},
        )
        size = text.get_window_extent(renderer)
        best: tuple[float, tuple[float, float], Any] | None = None
        for dx, dy in _offsets(size.width / scale, size.height / scale):
            box = size.translated(dx * scale, dy * scale).padded(scale)
            overlap = sum(_overlap(box, other) for other in taken)
            outside = box.width * box.height - _overlap(box, inside)
            if best is None or overlap + outside < best[0]:
                best = (overlap + outside, (dx, dy), box)
            if overlap + outside <= 0:
                break
        assert best is not None
        _, (dx, dy), box = best
        text.xyann = (dx, dy)
        taken.append(box)
        if math.hypot(max(0.0, abs(dx) - size.width / scale / 2), dy) <= _DISTANCES[1]:
            assert text.arrow_patch is not None
            text.arrow_patch.set_visible(False)


def _offsets(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Places of a label's middle, in points from its point: to the right first, nearer ones before farther ones."""
    for distance in _DISTANCES:
        for step in range(_DIRECTIONS):
            turn = (step + 1) // 2 * (1 if step % 2 else -1)
            angle = 2 * math.pi * turn / _DIRECTIONS
            x, y = math.cos(angle), math.sin(angle)
            yield x * (distance + width / 2), y * (distance + height / 2)


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share, in square pixels."""
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    height = min(one.y1, other.y1) - max(one.y0, other.y0)
    return float(max(0.0, width) * max(0.0, height))
