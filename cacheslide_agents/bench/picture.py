"""Time to the first token against divergence, as a picture: a panel for each set of turns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ..files import image_bytes
from .labels import Label, place_labels
from .summary import Summary
from .variants import Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXACT_KL = 1e-6
"""Nats up to which a divergence is rounding; it has no place on a logarithmic axis and is drawn at its foot."""

# Okabe and Ito's colours, which people with any colour vision tell apart; shapes and labels say the same again.
COLOURS = ("#000000", "#7A7A7A", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#8B6914", "#0072B2", "#009E73")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")

_INK = "#222222"
_PANEL = (7.2, 4.8)
"""Inches."""


def draw(summaries: Sequence[Summary], variants: Sequence[Variant], model: str, kind: str) -> bytes:
    """Draws each variant as a point: further left is faster, further down is closer to a full prefill.

    Args:
        summaries: Of at least one set of turns.
        variants: What the summaries' variants are; those of one policy are joined by a line.
        model: The model's name, for the title.
        kind: The image format, such as `png` or `svg`.

    Returns:
        The image file's bytes.

    Raises:
        ImportError: Matplotlib is absent.
        PictureError: It does not know the format.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    sets = [list(of_set) for _, of_set in groupby(summaries, lambda summary: summary.turn_set)]
    columns = min(len(sets), 2)
    rows = -(-len(sets) // columns)
    figure = Figure(
        figsize=(_PANEL[0] * columns, _PANEL[1] * rows + 0.5),
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
        facecolor="white",
    )
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel in panels[len(sets) :]:
        panel.set_axis_off()
    figure.suptitle(
        f"What reuse saves and what it costs ({model})",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
        parse_math=False,
    )
    by_name = {variant.name: variant for variant in variants}
    labels = [_draw_panel(panel, of_set, by_name) for panel, of_set in zip(panels, sets, strict=False)]
    figure.draw_without_rendering()  # fixes the panels' places, which labels are put into
    figure.set_layout_engine("none")
    for panel, wanted in zip(panels, labels, strict=False):
        place_labels(panel, wanted)
    return image_bytes(figure, kind)


def _draw_panel(axes: Axes, summaries: Sequence[Summary], variants: Mapping[str, Variant]) -> list[Label]:
    """Draws one set of turns and returns the labels that its points want."""
    policies = list(dict.fromkeys(variants[summary.variant].policy for summary in summaries))
    floor = _floor(summaries)
    labels = []
    for number, policy in enumerate(policies):
        own = [summary for summary in summaries if variants[summary.variant].policy == policy]
        colour = COLOURS[number % len(COLOURS)]
        marker = MARKERS[number % len(MARKERS)]
        budgets = sorted(own[1:], key=lambda summary: summary.ttft_seconds)
        axes.plot(
            [summary.ttft_seconds for summary in budgets],
            [_height(summary, floor) for summary in budgets],
            color=colour,
            marker=marker,
            markersize=4,
            linewidth=1,
            alpha=0.8,
        )
        axes.plot(
            own[0].ttft_seconds,
            _height(own[0], floor),
            color=colour,
            marker=marker,
            markersize=9,
            markeredgecolor="white",
            linestyle="none",
            zorder=3,
        )
        for summary in own:
            name = summary.variant.removeprefix(f"{policy} ")
            size = 9.5 if summary is own[0] else 7.0
            labels.append(Label(name, summary.ttft_seconds, _height(summary, floor), _darker(colour), size))
    _scale(axes, summaries, floor)
    prompts = "prompt" if summaries[0].prompts == 1 else "prompts"
    title = f"{summaries[0].turn_set}: {summaries[0].prompts} {prompts}"
    axes.set_title(title, loc="left", fontsize=10, color=_INK, parse_math=False)
    return labels


def _darker(colour: str) -> str:
    """The colour as text can have it on white."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (0.7 * part for part in to_rgb(colour))
    return str(to_hex((red, green, blue)))


def _floor(summaries: Sequence[Summary]) -> float:
    """The height at which exact variants are drawn: two powers of ten below the smallest divergence."""
    above = [summary.mean_kl for summary in summaries if summary.mean_kl > EXACT_KL]
    return 10.0 ** (math.floor(math.log10(min(above))) - 1) if above else EXACT_KL


def _height(summary: Summary, floor: float) -> float:
    return summary.mean_kl if summary.mean_kl > EXACT_KL else floor


def _scale(axes: Axes, summaries: Sequence[Summary], floor: float) -> None:
    highest = max(_height(summary, floor) for summary in summaries)
    powers = range(round(math.log10(floor)) + 1, math.ceil(math.log10(highest)) + 1)
    axes.set_yscale("log")
    axes.set_ylim(floor / 3, 10.0 ** (powers[-1] if powers else 0) * 2)
    axes.set_yticks(
        [floor, *(10.0**power for power in powers)], ["< $10^{-6}$", *(f"$10^{{{power}}}$" for power in powers)]
    )
    axes.minorticks_off()
    axes.axhspan(floor / 3, floor * 3, color="#F3F3F3", zorder=0)
    axes.set_xlim(0, max(summary.ttft_seconds for summary in summaries) * 1.18)
    axes.set_xlabel("seconds to the first token, median", fontsize=9, color=_INK)
    axes.set_ylabel("mean KL(full ‖ policy), nats", fontsize=9, color=_INK)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.tick_params(colors=_INK, labelsize=8.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
