"""`python -m benchmarks`: runs the benchmarks, prints one table each with the target beside it, writes JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from . import fidelity, session, speed
from .workload import FAMILIES, DataMissingError, data_folder

PARTS = ("speed", "ttft", "gather", "exactness", "times", "divergence", "session")
KL_LIMITS = {"memory": 0.01, "reflexion": 0.01, "tools": 0.01}
TTFT_LIMITS = {"slide, no correction": 0.30, "head, 10 % corrected": 0.42}


def main() -> int:
    """Runs what was asked for; exits with 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions of which the median is taken")
    parser.add_argument("--limit", type=int, help="prompts of each family; all by default")
    parser.add_argument("--only", choices=PARTS, action="append")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        data_folder()
    except DataMissingError as error:
        console.print(f"[red]{error}")
        return 2
    wanted = arguments.only or PARTS
    figures: dict[str, Any] = {"machine": _machine()}
    missed: list[str] = []
    console.print(f"{figures['machine']}")
    if "speed" in wanted:
        figures["speed"] = speed.against_transformers(arguments.repeats)
        missed += _show_speed(console, figures["speed"])
    if "ttft" in wanted:
        figures["ttft"] = speed.time_to_first_token(arguments.repeats)
        missed += _show_ttft(console, figures["ttft"])
    if "gather" in wanted:
        figures["gather"] = speed.scattered_pages(arguments.repeats)
        missed += _show_gather(console, figures["gather"])
    if "exactness" in wanted:
        figures["exactness"] = fidelity.exactness(arguments.limit or 20)
        missed += _show_exactness(console, figures["exactness"])
    if "times" in wanted:
        figures["times"] = fidelity.times(arguments.limit)
        _show_times(console, figures["times"])
    if "divergence" in wanted:
        figures["divergence"] = fidelity.divergence(arguments.limit)
        missed += _show_divergence(console, figures["divergence"])
    if "session" in wanted:
        figures["session"] = {"divergence": session.divergence(arguments.limit), "delay": session.delay()}
        missed += _show_session(console, figures["session"])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for target in missed:
        console.print(f"[red]missed: {target}")
    return 1 if missed else 0


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "load_average": round(os.getloadavg()[0], 2),
    }


def _show_speed(console: Console, figures: dict[str, Any]) -> list[str]:
    prefill, decode = figures["prefill_seconds"], figures["decode_step_seconds"]
    title = f"Against transformers: {figures['prompt_tokens']} tokens, {figures['dtype']}, medians"
    _table(
        console,
        title,
        ("", "engine", "transformers", "ratio", "target"),
        [
            _row("cold prefill, s", prefill["engine"], prefill["transformers"], figures["prefill_ratio"], "<= 1"),
            _row("decode step, s", decode["engine"], decode["transformers"], figures["decode_speedup"], ">= 1.5 x"),
        ],
    )
    return _missed(
        ("cold prefill not slower than transformers", figures["prefill_ratio"] <= 1.0),
        ("decode at least 1.5 times the speed of generate", figures["decode_speedup"] >= 1.5),
    )


def _show_ttft(console: Console, figures: dict[str, Any]) -> list[str]:
    shares = figures["share_of_prefix"]
    rows = [
        _row(
            name,
            seconds,
            figures["tokens"][name]["computed"],
            figures["tokens"][name]["tokens"],
            shares[name],
            f"<= {TTFT_LIMITS[name]}" if name in TTFT_LIMITS else "",
        )
        for name, seconds in figures["seconds"].items()
    ]
    title = f"Time to the first token after an update: {figures['sizes']}"
    _table(console, title, ("policy", "seconds", "computed", "tokens", "share of prefix", "target"), rows)
    return _missed(*((f"{name}: {limit} of prefix", shares[name] <= limit) for name, limit in TTFT_LIMITS.items()))


def _show_gather(console: Console, figures: dict[str, Any]) -> list[str]:
    steps = figures["step_seconds"]
    _table(
        console,
        f"A decode step at {figures['context_tokens']} tokens, by how its pages lie",
        ("", "contiguous", "scattered", "share of the gather", "target"),
        [_row("seconds", steps["contiguous"], steps["scattered"], figures["gather_share"], "<= 0.15")],
    )
    return _missed(("gather at most 15 % of a decode step", figures["gather_share"] <= 0.15))


def _show_exactness(console: Console, figures: dict[str, Any]) -> list[str]:
    _table(console, "Exactness, float32", ("", "value"), [_row(name, value) for name, value in figures.items()])
    return _missed(
        ("prefix logits within 1e-3 of recompute", figures["prefix_largest_logit_difference"] <= 1e-3),
        ("prefix text identical", figures["prefix_same_text"] == figures["prompts"]),
        ("append-only logits within 1e-3", figures["append_only_largest_logit_difference"] <= 1e-3),
        ("append-only text identical", figures["append_only_same_text"] == figures["append_only_turns"]),
    )


def _show_times(console: Console, figures: dict[str, Any]) -> None:
    rows = []
    for family in FAMILIES:
        policies = figures[family]
        cells = [
            f"{policies[policy]['computed_tokens']:.0f} / {policies[policy]['ttft_seconds']:.3f}"
            for policy in fidelity.POLICIES
        ]
        ratio = policies["slide"]["ttft_seconds"] / policies["prefix"]["ttft_seconds"]
        rows.append(_row(family, *cells, ratio))
    _table(
        console,
        "Second turn: tokens computed / median seconds to the first token",
        ("family", *fidelity.POLICIES, "slide : prefix"),
        rows,
    )


def _show_divergence(console: Console, figures: dict[str, Any]) -> list[str]:
    columns = ("prompts", "mean_kl", "median_kl", "max_kl", "computed", "corrected", "leak")
    targets = {family: f"<= {limit}" for family, limit in KL_LIMITS.items()}
    rows = [
        _row(family, *(figures[family][column] for column in columns), targets.get(family, "")) for family in FAMILIES
    ]
    _table(console, "Divergence of slide from a full prefill, float32, nats", ("family", *columns, "target mean"), rows)
    return _missed(
        *((f"{family}: mean KL {limit}", figures[family]["mean_kl"] <= limit) for family, limit in KL_LIMITS.items())
    )


def _show_session(console: Console, figures: dict[str, Any]) -> list[str]:
    divergence, delay = figures["divergence"], figures["delay"]
    plain, repaired = divergence["unrepaired"], divergence["repaired"]
    _table(
        console,
        f"KL of slide by turn, {divergence['conversations']} conversations, float32, nats",
        ("turn", "prompt tokens", "without repair", "with repair"),
        [
            _row(turn, f"{tokens:.0f}", *kls)
            for turn, (tokens, *kls) in enumerate(
                zip(divergence["prompt_tokens"], plain["kl"], repaired["kl"], strict=True)
            )
        ],
    )
    _table(
        console,
        "Session: means from the second turn on, and how long idle work delays a request",
        ("", "without repair", "with repair", "target"),
        [
            _row("mean KL", plain["mean_kl"], repaired["mean_kl"], "with repair < 5e-4"),
            _row("mean KL of the first five", plain["first_mean_kl"], repaired["first_mean_kl"]),
            _row("mean KL of the last five", plain["last_mean_kl"], repaired["last_mean_kl"]),
            _row("last : first", plain["growth"], repaired["growth"], "without repair <= 1.5"),
            _row("largest KL", plain["max_kl"], repaired["max_kl"]),
            _row("corrected", plain["corrected"], repaired["corrected"]),
            _row("repaired tokens a second", "", divergence["repair_tokens_per_second"]),
            _row(f"delay of {delay['requests']} requests, median s", "", delay["median_seconds"]),
            _row("longest, s", "", delay["max_seconds"], "<= 0.05"),
        ],
    )
    return _missed(
        ("session with repair: mean KL 0.0005", repaired["mean_kl"] < 5e-4),
        ("session without repair: last five turns 1.5 times the first five", plain["growth"] <= 1.5),
        ("idle work delays a request by at most 50 ms", delay["max_seconds"] <= 0.05),
    )


def _table(console: Console, title: str, columns: Iterable[str], rows: list[list[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _row(*cells: object) -> list[str]:
    return [_cell(cell) for cell in cells]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
    return "" if value is None else str(value)


def _missed(*targets: tuple[str, bool]) -> list[str]:
    return [name for name, reached in targets if not reached]


if __name__ == "__main__":
    sys.exit(main())
