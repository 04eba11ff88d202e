"""The demo's picture: every turn's prompt as a strip, and the time to the first token under each policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cacheslide_agents.engine.config import PolicyName

from ..files import image_bytes
from .figures import summarize
from .measure import POLICIES, TREATMENTS, Turn
from .screen import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POLICY_COLOURS: dict[PolicyName, str] = {"slide": "#1b7f5c", "prefix": "#9a9a9a", "recompute": "#d0d0d0"}
POLICY_NAMES: dict[PolicyName, str] = {
    "slide": "CacheSlide",
    "prefix": "prefix caching",
    "recompute": "computing everything",
}

_INK = "#222222"
_BAR = 0.26
"""Height of a time bar; a turn is 1 high."""


def draw(turns: Sequence[Turn], model: str, kind: str) -> bytes:
    """Draws the turns.

    Args:
        turns: At least one.
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

    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
    figure = Figure(figsize=(13, 2.2 + 0.78 * len(turns)), layout=layout, facecolor="white")
    strips, times = figure.subplots(1, 2, sharey=True, width_ratios=(2.1, 1))
    _draw_strips(strips, turns)
    _draw_times(times, turns)
    title = f"What {len(turns)} turns of an agent reused while its memory was edited ({model})"
    figure.suptitle(title, x=0.008, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    strips.set_title(_subtitle(turns), loc="left", x=-0.055, fontsize=10, color=_INK, linespacing=1.4, pad=10)
    return image_bytes(figure, kind)


def _subtitle(turns: Sequence[Turn]) -> str:
    summary = summarize(turns)
    computed, ttft = summary.computed_tokens, summary.ttft_seconds
    return (
        f"Medians from turn {summary.first_turn} on: {computed['slide']:,.0f} of {summary.prompt_tokens:,.0f} prompt "
        f"tokens computed, {computed['prefix']:,.0f} with prefix caching. First token after {ttft['slide']:.2f} s; "
        f"{ttft['prefix']:.2f} s with prefix caching, {ttft['recompute']:.2f} s when everything is computed."
    )


def _draw_strips(axes: Axes, turns: Sequence[Turn]) -> None:
    from matplotlib.patches import Patch

    for row, turn in enumerate(turns):
        for treatment in TREATMENTS:
            ranges = [(start, stop - start) for start, stop, what in turn.slide.treatments if what == treatment]
            # The edge keeps a single token visible.
            colour = COLOURS[treatment]
            axes.broken_barh(ranges, (row - 0.08, 0.34), facecolors=colour, edgecolors=colour, linewidth=1.2)
        memory = next(part for part in turn.parts if part.name == "memory")
        for token in (memory.start, memory.stop):
            axes.plot([token, token], [row - 0.13, row + 0.31], color=_INK, linewidth=1.1)
        middle = (memory.start + memory.stop) / 2
        axes.text(middle, row + 0.34, "memory", ha="center", va="top", fontsize=7, color=_INK)
        caption = axes.text(0, row - 0.16, _caption(turn), ha="left", va="bottom", fontsize=8.5, color=_INK)
        caption.set_in_layout(False)  # a long one may reach past its strip without narrowing it
    axes.set_xlim(0, max(turn.slide.prompt_tokens for turn in turns) * 1.005)
    axes.set_ylim(len(turns) - 0.4, -0.55)
    axes.set_yticks([row + 0.09 for row in range(len(turns))], [f"turn {turn.number}" for turn in turns])
    axes.set_xlabel("tokens of the prompt")
    _plain(axes)
    signs = [Patch(color=COLOURS[treatment], label=treatment) for treatment in TREATMENTS]
    axes.legend(handles=signs, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.07), frameon=False, fontsize=9)


def _draw_times(axes: Axes, turns: Sequence[Turn]) -> None:
    longest = max(turn.runs[policy].ttft_seconds for turn in turns for policy in POLICIES)
    for idx, policy in enumerate(POLICIES):
        rows = [row + (idx - 1) * _BAR + 0.06 for row in range(len(turns))]
        seconds = [turn.runs[policy].ttft_seconds for turn in turns]
        axes.barh(rows, seconds, _BAR * 0.92, color=POLICY_COLOURS[policy], label=POLICY_NAMES[policy])
        for row, value in zip(rows, seconds, strict=True):
            axes.text(value + longest * 0.012, row, f"{value:.2f}", va="center", fontsize=7.5, color=_INK)
    axes.set_xlim(0, longest * 1.12)
    axes.set_xlabel("seconds to the first token")
    axes.tick_params(axis="y", left=False, labelleft=False)
    _plain(axes)
    axes.legend(ncols=3, loc="upper left", bbox_to_anchor=(0, -0.07), frameon=False, fontsize=9, columnspacing=1)


def _caption(turn: Turn) -> str:
    """What was edited and asked."""
    changes = []
    for edit in turn.edits:
        old, new = (f"“{(line or '').rstrip('.')}”" for line in (edit.old, edit.new))
        changes.append({"insert": f"{new} added", "delete": f"{old} removed", "edit": f"{old} became {new}"}[edit.kind])
    return f"memory: {'; '.join(changes) or 'as it was'}. Asked: “{turn.message}”"


def _plain(axes: Axes) -> None:
    """Leaves only the axis of the quantity."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(colors=_INK, labelsize=9)
