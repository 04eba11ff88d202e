"""Sweeps of what a budget buys: `slide` by budget and staleness bound, `paper` by budget and gate.

`--only sweep`; the latter is the paper's heat map.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.console import Console

from cacheslide_agents.bench.comparison import Comparison, measuring_config
from cacheslide_agents.bench.quality import Measured, measure_sets
from cacheslide_agents.bench.variants import Variant, variants
from cacheslide_agents.engine import Engine
from cacheslide_agents.engine.config import DtypeName, PaperSettings
from cacheslide_agents.tables import show_table

from .workload import family_turns

BUDGETS = (0.05, 0.10, 0.15, 0.20, 0.26)
GATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.12)
BOUNDS = (0.0, 0.00003, 0.0001, 0.0003, 0.001, 0.003)


@dataclass(frozen=True)
class Grid:
    """A policy over two settings.

    Attributes:
        policy: How reuse is decided.
        rows: What the rows are, and their values: the budget.
        columns: What the columns are, and their values.
        variants: By row, then column.
    """

    policy: str
    rows: tuple[str, Sequence[float]]
    columns: tuple[str, Sequence[float]]
    variants: list[list[Variant]]


def grids() -> list[Grid]:
    """Both sweeps."""
    budgets = ("budget", BUDGETS)
    slide = [
        [
            Variant(f"slide {budget:g} {bound:g}", "slide", {"correction_share": budget, "staleness_bound": bound})
            for bound in BOUNDS
        ]
        for budget in BUDGETS
    ]
    paper = [
        [
            Variant(f"paper {budget:g} {gate:g}", "paper", {"paper": PaperSettings(share=budget, tau=gate)})
            for gate in GATES
        ]
        for budget in BUDGETS
    ]
    return [
        Grid("slide", budgets, ("staleness bound", BOUNDS), slide),
        Grid("paper", budgets, ("gate threshold", GATES), paper),
    ]


def measure(limit: int | None, dtype: DtypeName, families: Sequence[str], left_out: list[str]) -> dict[str, Any]:
    """Mean KL and share of token-layers computed of every grid's variants, by family.

    Prompts that cannot be measured are added to `left_out`, with the reason.
    """
    wanted = grids()
    compared = [*variants([]), *(variant for grid in wanted for row in grid.variants for variant in row)]
    measured: Measured = {}
    with Engine.load(measuring_config(dtype)) as engine:
        comparison = Comparison(engine, compared, brief=True)
        measure_sets(comparison, [family_turns(family, limit) for family in families], measured, left_out, print)
    figures: dict[str, Any] = {}
    for grid in wanted:
        figures[grid.policy] = {
            "rows": {"what": grid.rows[0], "values": list(grid.rows[1])},
            "columns": {"what": grid.columns[0], "values": list(grid.columns[1])},
            "families": {},
        }
        for family, turns in measured.items():
            ones = {(one.turns, one.variant): one for by_variant in turns for one in by_variant}
            names = [by_variant[0].turns for by_variant in turns]
            figures[grid.policy]["families"][family] = {
                "prompts": len(names),
                "mean_kl": [
                    [mean(ones[name, variant.name].kl for name in names) for variant in row] for row in grid.variants
                ],
                "computed": [
                    [mean(ones[name, variant.name].receipt.computed_share for name in names) for variant in row]
                    for row in grid.variants
                ],
            }
    return figures


def show(console: Console, figures: dict[str, Any]) -> None:
    """Prints each grid: mean KL, and the computed share in brackets."""
    for policy, grid in figures.items():
        for family, values in grid["families"].items():
            show_table(
                console,
                f"{policy}, {values['prompts']} prompts of {family}: mean KL in nats (share of token-layers computed)",
                (f"{grid['rows']['what']} \\ {grid['columns']['what']}", *map(str, grid["columns"]["values"])),
                [
                    (f"{budget:g}", *(f"{kl:.1e} ({share:.0%})" for kl, share in zip(kls, shares, strict=True)))
                    for budget, kls, shares in zip(
                        grid["rows"]["values"], values["mean_kl"], values["computed"], strict=True
                    )
                ],
            )
