"""Learned positions: what reserved ranges save when an update varies, and how far they are from contiguous positions.

Ranges are learned from the family's own prompts, all of them, as a long-lived agent would have. Both engines share the
model's weights. Distances are KL over the answer's tokens, in nats:

- `of the gap`: full prefill at contiguous positions ‖ full prefill at learned ones: another reference, not an error
- `slide, learned`: full prefill ‖ slide, both at learned positions
- `slide, contiguous`: full prefill ‖ slide, both at contiguous positions

Times are of the second turn, medians over prompts and repetitions, the settings by turns, with nothing stored, so that
each starts from the same cache. Without correction a slid token costs its move alone, which is what ranges save.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from cacheslide_agents.bench.comparison import measuring_config
from cacheslide_agents.bench.turns import Turns
from cacheslide_agents.engine import Engine, EngineConfig, SamplingParams
from cacheslide_agents.engine.model.identity import ModelIdentity
from cacheslide_agents.engine.position.ccpe import PositionProfile, updates_of
from cacheslide_agents.engine.position.profile_file import ProfileKey, add_to_file
from cacheslide_agents.engine.run.drift import kl_divergence
from cacheslide_agents.tables import show_table

from .workload import family_turns

FAMILIES = ("fact_edit", "memory", "tools")
POSITIONS = ("contiguous", "learned")
BUDGETS = {"no correction": 0.0, "slide": EngineConfig().correction_share}
DECODED_TOKENS = 9


@dataclass
class _Figures:
    """One family under one kind of positions, a value a prompt; times by budget and repetition."""

    ttft_seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BUDGETS})
    step_seconds: list[float] = field(default_factory=list)
    new_pages: list[int] = field(default_factory=list)
    unused: list[int] = field(default_factory=list)
    slide_kl: list[float] = field(default_factory=list)


def measure(limit: int, repeats: int) -> dict[str, Any]:
    """Time, pages and divergence with and without reserved ranges, by family."""
    results: dict[str, Any] = {}
    config = measuring_config("float32")
    with Engine.load(config) as plain, TemporaryDirectory() as folder:
        for family in FAMILIES:
            path = Path(folder) / f"{family}.json"
            _learn(plain, family, path)
            ranges = config.with_changes(learned_positions=True, positions_file=path)
            with Engine.from_model(plain.model, plain.tokenizer, ranges) as learned:
                engines = dict(zip(POSITIONS, (plain, learned), strict=True))
                figures = {kind: _Figures() for kind in POSITIONS}
                gap_kls = [
                    _measure(engines, figures, pair, f"{family}-{number}", repeats)
                    for number, pair in enumerate(family_turns(family, limit).turns)
                ]
            results[family] = {
                "prompts": len(gap_kls),
                "gap_kl": mean(gap_kls),
                "largest_gap_kl": max(gap_kls),
                **{kind: _summary(figures[kind]) for kind in POSITIONS},
            }
    return results


def _learn(engine: Engine, family: str, path: Path) -> None:
    profile = PositionProfile()
    for pair in family_turns(family).turns:
        for prompt in (pair.first, pair.second):
            profile.observe(update.num_tokens for update in updates_of(prompt.encode(engine.tokenizer)))
    identity = ModelIdentity.of(str(engine.model.config.name_or_path), engine.model.config, engine.tokenizer)
    add_to_file(path, identity, {ProfileKey(engine.config.namespace, None): profile})


def _measure(
    engines: dict[str, Engine], figures: dict[str, _Figures], pair: Turns, session: str, repeats: int
) -> float:
    """Measures one pair of turns; the KL between the two full prefills."""
    one, some = SamplingParams(max_tokens=1), SamplingParams(max_tokens=DECODED_TOKENS, ignore_eos=True)
    assert pair.answer is not None
    full = {}
    for kind, engine in engines.items():
        engine.generate(pair.first, one, session=session)
        full[kind] = engine.logits(pair.second, pair.answer, session=session, policy="recompute")
        slid = engine.logits(pair.second, pair.answer, session=session)
        figures[kind].slide_kl.append(_kl(full[kind], slid))
    for repeat in range(repeats + 1):
        for name, share in BUDGETS.items():
            for kind, engine in engines.items():
                engine.adjust(correction_share=share)
                receipt = engine.generate(pair.second, some, session=session, store=False).receipt
                engine.adjust(correction_share=EngineConfig().correction_share)
                if not repeat:  # the first round warms up
                    continue
                figures[kind].ttft_seconds[name].append(receipt.ttft_seconds)
                if name == "no correction":
                    steps = receipt.total_seconds - receipt.ttft_seconds
                    figures[kind].step_seconds.append(steps / (receipt.generated_tokens - 1))
    for kind, engine in engines.items():
        free = engine.stats().free_pages
        receipt = engine.generate(pair.second, one, session=session).receipt
        figures[kind].new_pages.append(free - engine.stats().free_pages)
        figures[kind].unused.append(receipt.unused_positions)
        engine.forget(session)
    return _kl(full["contiguous"], full["learned"])


def _kl(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(kl_divergence(first, second).mean())


def _summary(figures: _Figures) -> dict[str, Any]:
    return {
        "ttft_seconds": {name: median(seconds) for name, seconds in figures.ttft_seconds.items()},
        "step_seconds": median(figures.step_seconds),
        "new_pages": mean(figures.new_pages),
        "unused_positions": mean(figures.unused),
        "slide_kl": mean(figures.slide_kl),
    }


def show(console: Console, results: dict[str, Any]) -> None:
    """Two tables: time and pages, then divergence."""
    first_token = [f"first token, s: {name}" for name in BUDGETS]
    show_table(
        console,
        "Learned positions: the second turn, float32; medians, and means of pages taken besides shared ones",
        ("family", "positions", *first_token, "decode step, s", "new pages", "unused positions"),
        [
            (
                family,
                kind,
                *one["ttft_seconds"].values(),
                one["step_seconds"],
                one["new_pages"],
                one["unused_positions"],
            )
            for family, figures in results.items()
            for kind, one in ((kind, figures[kind]) for kind in POSITIONS)
        ],
    )
    show_table(
        console,
        "Learned positions: mean KL in nats, float32",
        ("family", "prompts", "of the gap", "its largest", "slide, learned", "slide, contiguous"),
        [
            (
                family,
                figures["prompts"],
                figures["gap_kl"],
                figures["largest_gap_kl"],
                *(figures[kind]["slide_kl"] for kind in POSITIONS[::-1]),
            )
            for family, figures in results.items()
        ],
    )
