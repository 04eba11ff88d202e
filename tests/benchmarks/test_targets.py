"""What the benchmark of quality says must be reached, on measurements of a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import quality, sweep
from benchmarks.pictures import heat_maps
from cacheslide_agents.bench.comparison import Comparison
from cacheslide_agents.bench.turns import Turns
from tests.engine.turns import ANSWER, first_turn, second_turn, tiny_engine

TURNS = Turns("t", first_turn(), second_turn(), answer=ANSWER, old_value="Paris")


@pytest.fixture(scope="module")
def measured():
    with tiny_engine() as engine:
        return {"fact_edit": [Comparison(engine, quality.compared()).measure(TURNS)]}


def _with(measured, variant, **changes):
    """Two pairs of turns, of which the second has other figures for a variant."""
    (ones,) = measured["fact_edit"]
    changed = [replace(one, **changes) if one.variant == variant else one for one in ones]
    return {"fact_edit": [ones, changed]}


def _target(measured, what):
    return next(target for target in quality.targets(measured) if target.what == what)


def test_target_is_missed_when_the_mean_is_above_its_limit(measured):
    before = _target(measured, "mean KL, slide")
    kl = measured["fact_edit"][0][[v.name for v in quality.compared()].index("slide")].kl
    assert before.value == kl and before.reached == (kl <= 0.001)
    after = _target(_with(measured, "slide", kl=0.5), "mean KL, slide")
    assert after.value == pytest.approx((kl + 0.5) / 2) and not after.reached
    assert after.quantiles.startswith(f"{kl:.2g} / ") and after.quantiles.endswith(" / 0.5")


def test_target_is_a_lower_limit_when_agreement_is_meant(measured):
    missing = _with(measured, quality.CAP, agreeing_tokens=0, clear_tokens=10**6)
    assert not _target(missing, f"agreement, {quality.CAP}").reached
    assert _target(measured, f"agreement, {quality.CAP}").at_least


def test_target_is_reached_when_there_was_nothing_to_measure(measured):
    assert _target(
        {"fact_edit": [[replace(one, leak=None) for one in measured["fact_edit"][0]]]}, "leak, slide"
    ).reached


def test_rivals_are_compared_at_their_own_cost_when_they_exist(measured):
    ones = {one.variant: one for one in measured["fact_edit"][0]}
    target = _target(measured, "mean KL at equal cost, slide : head")
    assert target.value == pytest.approx(ones["slide as head"].kl / ones["head"].kl)
    assert ones["slide as head"].receipt.computed_tokens == pytest.approx(ones["head"].receipt.computed_tokens, abs=1)


def test_rivals_at_equal_cost_are_only_those_asked_for_when_policies_are_named():
    names = [variant.name for variant in quality.compared(["head"])]
    assert names == ["recompute", "prefix", "head", "slide", quality.CAP, quality.UNCORRECTED, "slide as head"]


def test_figures_are_plain_json_when_written(measured):
    figures = json.loads(json.dumps(quality.figures(measured)))
    assert len(figures["measurements"]) == len(quality.compared())
    assert {target["family"] for target in figures["targets"]} == {"fact_edit"}


def test_pictures_are_drawn_when_all_is_measured(measured):
    assert quality.picture(measured).startswith(b"\x89PNG")
    grid = {
        "rows": {"what": "budget", "values": [0.1, 0.2]},
        "columns": {"what": "bound", "values": [0.0, 0.01, 0.1]},
        "families": {
            name: {"prompts": 2, "mean_kl": [[0.0, 1e-3, 1e-2]] * 2, "computed": [[0.1, 0.2, 0.3]] * 2}
            for name in ("tools", "swe")
        },
    }
    assert heat_maps("slide", grid).startswith(b"\x89PNG")


def test_sweep_has_a_variant_for_every_place_of_its_grid():
    for grid in sweep.grids():
        assert [len(row) for row in grid.variants] == [len(grid.columns[1])] * len(grid.rows[1])
        names = [variant.name for row in grid.variants for variant in row]
        assert len(set(names)) == len(names)
