"""The picture of time against divergence: it is drawn, and its labels keep apart."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import combinations

import pytest

from cacheslide_agents.bench.labels import Label, place_labels
from cacheslide_agents.bench.picture import draw
from cacheslide_agents.bench.summary import Summary
from cacheslide_agents.bench.variants import Variant
from cacheslide_agents.files import PictureError

ONE = Summary(
    turn_set="mine",
    variant="slide",
    prompts=2,
    fallbacks=0,
    sliding=1,
    ttft_seconds=0.3,
    of_prefix=0.3,
    of_recompute=0.2,
    computed=0.2,
    computed_layers=0.2,
    corrected=0.1,
    mean_kl=1e-3,
    median_kl=1e-3,
    max_kl=2e-3,
    agreement=1.0,
    clear_tokens=8,
    leak=None,
    key_cksim=0.99,
    value_cksim=0.98,
    gold_f1=None,
    gold_exact_match=None,
    gold_rouge_l_recall=None,
    full_f1=1.0,
    full_exact_match=1.0,
    full_rouge_l_recall=1.0,
)
VARIANTS = [Variant(name, name) for name in ("recompute", "prefix", "slide")] + [Variant("slide 5 %", "slide")]
SUMMARIES = [
    replace(ONE, turn_set=name, variant=variant.name, ttft_seconds=1.0 - idx / 8, mean_kl=idx * 1e-3)
    for name in ("mine", "others", "third")
    for idx, variant in enumerate(VARIANTS)
]


def test_picture_is_written_when_there_are_several_sets() -> None:
    drawn = draw(SUMMARIES, VARIANTS, "tiny", "png")
    assert drawn.startswith(b"\x89PNG") and len(drawn) > 10_000


def test_picture_is_written_when_all_are_exact() -> None:
    exact = [replace(one, mean_kl=0.0) for one in SUMMARIES[:2]]
    assert draw(exact, VARIANTS, "tiny", "svg").startswith(b"<?xml")


def test_format_is_refused_when_it_does_not_exist() -> None:
    with pytest.raises(PictureError, match="cannot be drawn as docx"):
        draw(SUMMARIES, VARIANTS, "tiny", "docx")


def test_nothing_is_drawn_when_matplotlib_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        draw(SUMMARIES, VARIANTS, "tiny", "png")


def test_labels_keep_apart_when_points_lie_close() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    figure = Figure(figsize=(7, 5))
    axes = figure.subplots()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    at = random.Random(0)
    points = [(at.uniform(0.4, 0.6), at.uniform(0.4, 0.6)) for _ in range(12)]
    place_labels(axes, [Label(f"policy {idx}", x, y, "black", 9) for idx, (x, y) in enumerate(points)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    # An annotation's own extent takes the line to its point along: look at the words alone.
    boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in axes.texts]
    assert len(boxes) == 12
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
    inside = axes.get_window_extent()
    assert all(inside.contains(*box.min) and inside.contains(*box.max) for box in boxes)
