"""All policies on all families of the agent data, and what `slide` must reach there: `--only quality`.

Measured like `cacheslide bench quality`, with the same code. Besides each policy under its own settings there is
`slide` with its budget spent up to the cap, `slide` without correction, and `slide` given as many computed tokens as
each rival, prompt by prompt, so that they are compared at equal cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from cacheslide_agents.bench.answers import require_metrics
from cacheslide_agents.bench.comparison import Comparison, Measurement, measuring_config
from cacheslide_agents.bench.figures import measurement_as_json
from cacheslide_agents.bench.picture import draw
from cacheslide_agents.bench.quality import Measured, measure_sets
from cacheslide_agents.bench.summary import Summary, summarize
from cacheslide_agents.bench.table import show_summaries
from cacheslide_agents.bench.variants import Variant, all_policies, variants
from cacheslide_agents.engine import Engine
from cacheslide_agents.engine.config import DtypeName
from cacheslide_agents.tables import show_table

from .workload import FAMILIES, family_turns

MODEL = "SmolLM2-135M-Instruct"
CAP_SHARE = 0.26
CAP = "slide at the cap"
UNCORRECTED = "slide uncorrected"
RIVALS = ("deviation", "head", "cacheblend", "epic")

MEAN_CORRECTED = 0.15
MEAN_KL = {
    "fact_edit": (0.001, 0.0005),
    "fact_delete": (0.006, 0.005),
    "fact_insert": (0.008, 0.002),
    "memory": (0.003, 0.0015),
    "reflexion": (0.005, 0.004),
    "tools": (0.006, 0.004),
    "swe": (0.02, 0.01),
}
"""Nats, with the default budget and at the cap."""

LEAK = {"fact_edit": (0.07, 0.04), "fact_delete": (0.07, 0.04)}
AGREEMENT = 0.95
OF_PREFIX = {"reflexion": 0.45, "memory": 0.6}
FACTS = ("fact_edit", "fact_delete", "fact_insert")
SHARE_OF_RIVAL = {
    **{("deviation", family): 0.5 if family in FACTS else 1.0 for family in FAMILIES},
    **{("head", family): 1.0 for family in FACTS},
    **{(rival, family): 1 / 3 for rival in ("cacheblend", "epic") for family in ("fact_edit", "memory", "tools")},
}
"""Mean KL of `slide` over the rival's at equal computed tokens, at most."""


@dataclass(frozen=True)
class Target:
    """One thing that must be reached.

    Attributes:
        family: On which prompts.
        what: What is measured.
        value: What it is; None if there was nothing to measure.
        limit: What it may be at most, or at least.
        at_least: Whether the limit is a lower one.
        by_prompt: The values that `value` sums up, for their distribution.
    """

    family: str
    what: str
    value: float | None
    limit: float
    at_least: bool = False
    by_prompt: tuple[float, ...] = ()

    @property
    def reached(self) -> bool:
        """Whether it was; true if there was nothing to measure."""
        if self.value is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def quantiles(self) -> str:
        """Least, quartiles and most of `by_prompt`."""
        if len(self.by_prompt) < 2:
            return ""
        quartiles = statistics.quantiles(self.by_prompt, n=4, method="inclusive")
        return " / ".join(f"{value:.2g}" for value in (min(self.by_prompt), *quartiles, max(self.by_prompt)))


def compared(policies: Sequence[str] = ()) -> list[Variant]:
    """The variants: policies, `slide` at its cap and without correction, and `slide` at each rival's cost.

    Args:
        policies: Names; none takes all. `slide` is always there.
    """
    wanted = variants([*policies, "slide"] if policies else all_policies())
    names = [variant.name for variant in wanted]
    whole = {"staleness_bound": 0.0}
    return [
        *wanted,
        Variant(CAP, "slide", {**whole, "correction_share": CAP_SHARE}),
        Variant(UNCORRECTED, "slide", {"correction_share": 0.0}),
        *(Variant(_as(rival), "slide", whole, computes_like=rival) for rival in RIVALS if rival in names),
    ]


def measure(
    limit: int | None,
    repeats: int,
    dtype: DtypeName,
    families: Sequence[str],
    policies: Sequence[str],
    left_out: list[str],
) -> Measured:
    """Measures the families, all prompts of each or the first `limit`, under some policies or all (none named).

    Prompts that cannot be measured are added to `left_out`, with the reason.
    """
    require_metrics()
    measured: Measured = {}
    with Engine.load(measuring_config(dtype)) as engine:
        comparison = Comparison(engine, compared(policies), repeats=repeats)
        measure_sets(comparison, [family_turns(family, limit) for family in families], measured, left_out, print)
    return measured


def targets(measured: Measured) -> Iterator[Target]:
    """Everything that must be reached, family by family."""
    for family, turns in measured.items():
        by_variant = {ones[0].variant: list(ones) for ones in zip(*turns, strict=True)}
        summaries = {summary.variant: summary for summary in summarize(family, turns)}
        for column, name in enumerate(("slide", CAP)):
            ones, summary = by_variant[name], summaries[name]
            kls = tuple(one.kl for one in ones)
            yield Target(family, f"mean KL, {name}", summary.mean_kl, MEAN_KL[family][column], by_prompt=kls)
            if family in LEAK:
                leaks = tuple(one.leak for one in ones if one.leak is not None)
                yield Target(family, f"leak, {name}", summary.leak, LEAK[family][column], by_prompt=leaks)
            agreed = tuple(one.agreeing_tokens / one.clear_tokens for one in ones if one.clear_tokens)
            yield Target(family, f"agreement, {name}", summary.agreement, AGREEMENT, at_least=True, by_prompt=agreed)
        corrected = tuple(one.corrected_share for one in by_variant["slide"])
        yield Target(
            family, "share corrected, slide", summaries["slide"].corrected, MEAN_CORRECTED, by_prompt=corrected
        )
        if family in OF_PREFIX:
            ratios = tuple(_of_prefix(by_variant))
            yield Target(
                family, "first token, slide : prefix", summaries["slide"].of_prefix, OF_PREFIX[family], by_prompt=ratios
            )
        yield from _against_rivals(family, summaries)


def figures(measured: Measured) -> dict[str, Any]:
    """What is measured and what must be reached, as plain JSON values."""
    return {
        "summaries": [asdict(summary) for summary in _summaries(measured)],
        "targets": [
            {**asdict(target), "reached": target.reached, "quantiles": target.quantiles} for target in targets(measured)
        ],
        "measurements": [
            measurement_as_json(name, one) for name, turns in measured.items() for ones in turns for one in ones
        ],
    }


def show(console: Console, measured: Measured) -> list[str]:
    """Prints the tables and returns the targets that were missed."""
    show_summaries(console, _summaries(measured))
    found = list(targets(measured))
    show_table(
        console,
        "What slide must reach (where it was missed: least, quartiles and most over the prompts)",
        ("family", "what", "measured", "limit", "", "distribution"),
        [
            (
                target.family,
                target.what,
                target.value,
                f"{'>=' if target.at_least else '<='} {target.limit:.4g}",
                "reached" if target.reached else "missed",
                "" if target.reached else target.quantiles,
            )
            for target in found
        ],
    )
    return [f"{target.family}: {target.what} {target.limit:.4g}" for target in found if not target.reached]


def picture(measured: Measured) -> bytes:
    """Time to the first token against divergence, a panel a family; PNG. Variants at a rival's cost are left out."""
    rivals = [_as(rival) for rival in RIVALS]
    shown = [summary for summary in _summaries(measured) if summary.variant not in rivals]
    return draw(shown, compared(), MODEL, "png")


def _summaries(measured: Measured) -> list[Summary]:
    return [summary for family, turns in measured.items() if turns for summary in summarize(family, turns)]


def _of_prefix(by_variant: dict[str, list[Measurement]]) -> Iterator[float]:
    for ours, theirs in zip(by_variant["slide"], by_variant["prefix"], strict=True):
        yield ours.ttft_seconds / theirs.ttft_seconds


def _against_rivals(family: str, summaries: dict[str, Summary]) -> Iterator[Target]:
    """Mean KL of `slide` at a rival's cost over the rival's."""
    for (rival, on), limit in SHARE_OF_RIVAL.items():
        if on == family and rival in summaries:
            ours, theirs = summaries[_as(rival)].mean_kl, summaries[rival].mean_kl
            yield Target(family, f"mean KL at equal cost, slide : {rival}", ours / theirs if theirs else None, limit)


def _as(rival: str) -> str:
    return f"slide as {rival}"
