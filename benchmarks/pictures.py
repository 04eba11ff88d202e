"""Pictures of the benchmarks: heat maps of the sweeps, reuse shares of agents, similarity of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cacheslide_agents.files import image_bytes

INK = "#222222"
BLUE, ORANGE = "#0072B2", "#D55E00"
_SMALLEST_KL = 1e-7


def heat_maps(policy: str, grid: Mapping[str, Any]) -> bytes:
    """Mean KL by the grid's rows and columns, a panel for each family; PNG.

    Args:
        policy: What was swept.
        grid: Of `sweep.measure`.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    families = grid["families"]
    columns = min(len(families), 3)
    rows = -(-len(families) // columns)
    figure = Figure(figsize=(5.2 * columns + 0.8, 3.9 * rows + 0.6), layout="constrained", facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    everything = np.maximum([values["mean_kl"] for values in families.values()], _SMALLEST_KL)
    norm = LogNorm(everything.min(), max(everything.max(), everything.min() * 10))
    for panel in panels[len(families) :]:
        panel.set_axis_off()
    for panel, (family, values) in zip(panels, families.items(), strict=False):
        kls = np.maximum(values["mean_kl"], _SMALLEST_KL)
        image = panel.imshow(kls, norm=norm, cmap="cividis_r", aspect="auto", origin="lower")
        for (row, column), kl in np.ndenumerate(kls):
            dark = norm(kl) > 0.5
            text = f"{values['mean_kl'][row][column]:.1e}\n{values['computed'][row][column]:.0%}"
            panel.text(column, row, text, ha="center", va="center", fontsize=7.5, color="white" if dark else INK)
        panel.set_xticks(range(kls.shape[1]), [f"{value:g}" for value in grid["columns"]["values"]])
        panel.set_yticks(range(kls.shape[0]), [f"{value:.0%}" for value in grid["rows"]["values"]])
        panel.set_xlabel(grid["columns"]["what"], fontsize=9)
        panel.set_ylabel(grid["rows"]["what"], fontsize=9)
        panel.set_title(f"{family}: {values['prompts']} prompts", loc="left", fontsize=10, color=INK)
        panel.tick_params(labelsize=8, length=0)
    bar = figure.colorbar(image, ax=panels.tolist(), shrink=0.7, pad=0.02)
    bar.set_label("mean KL(full ‖ policy), nats", fontsize=9)
    figure.suptitle(
        f"{policy}: mean KL, and share of token-layers computed",
        x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK,
    )  # fmt: skip
    return image_bytes(figure, "png")


def reuse_picture(figures: Mapping[str, Any]) -> bytes:
    """Each agent's shares of its next prompts: mean as a bar, standard deviation as a line; PNG.

    Args:
        figures: Of `paper_figures.reuse_shares`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 0.85 * len(figures) + 1.6), layout="constrained", facecolor="white")
    axes = figure.subplots()
    kinds = (("repeats", "repeats anywhere", BLUE, ""), ("prefix", "common prefix", ORANGE, "//"))
    for idx, (name, label, colour, hatch) in enumerate(kinds):
        places = [row + (idx - 0.5) * 0.36 for row in range(len(figures))]
        means = [one[f"{name}_mean"] for one in figures.values()]
        deviations = [one[f"{name}_variance"] ** 0.5 for one in figures.values()]
        axes.barh(places, means, 0.33, color=colour, hatch=hatch, edgecolor="white", label=label)
        ends = np.clip([np.subtract(means, deviations), np.add(means, deviations)], 0, 1)
        axes.hlines(places, *ends, color=INK, linewidth=1.2)
        for place, value, end in zip(places, means, ends[1], strict=True):
            axes.text(max(value, end) + 0.01, place, f"{value:.2f}", va="center", fontsize=8.5, color=INK)
    names = [f"{agent}\n{one['transitions']} transitions" for agent, one in figures.items()]
    axes.set_yticks(range(len(figures)), names, fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlabel("share of the next prompt's tokens: mean, and one standard deviation either way", fontsize=9)
    axes.set_title("How much of an agent's next prompt was there before", loc="left", fontweight="bold", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2)
    _plain(axes)
    return image_bytes(figure, "png")


def similarity_picture(figures: Mapping[str, Any]) -> bytes:
    """CKSim of reused keys by shift, rotated along and not; PNG.

    Args:
        figures: Of `paper_figures.key_similarity`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    shifts = range(len(figures["shifts"]))
    lines: Sequence[tuple[str, str, str, str]] = (
        ("aligned", "rotated to the new position", BLUE, "o"),
        ("unaligned", "left as they were", ORANGE, "s"),
    )
    for name, label, colour, marker in lines:
        axes.plot(shifts, figures[name], color=colour, marker=marker, linewidth=1.8)
        above = 9 if name == "aligned" else -14
        end = (shifts[-1], figures[name][-1])
        axes.annotate(label, end, (0, above), textcoords="offset points", ha="right", color=colour)
    axes.set_xticks(shifts, [f"{shift:,}" for shift in figures["shifts"]])
    lowest = min(*figures["aligned"], *figures["unaligned"])
    axes.set_ylim(lowest - 0.12 * (1 - lowest), 1 + 0.12 * (1 - lowest))
    axes.set_xlabel("shift of the text, tokens", fontsize=9)
    axes.set_ylabel("CKSim of reused and recomputed keys", fontsize=9)
    axes.set_title("Keys that moved are alike once they are rotated", loc="left", fontweight="bold", color=INK)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    _plain(axes)
    return image_bytes(figure, "png")


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8.5)
