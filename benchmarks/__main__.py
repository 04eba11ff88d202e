"""`python -m benchmarks`: runs the benchmarks, prints one table each with the target beside it, writes JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.text import Text

from cacheslide_agents.bench.variants import all_policies
from cacheslide_agents.engine.config import DtypeName
from cacheslide_agents.environment import machine
from cacheslide_agents.files import replace_file
from cacheslide_agents.tables import show_table, standard_console

from . import paper_figures, positions, quality, session, speed, sweep
from .exactness import exactness
from .pictures import heat_maps, reuse_picture, similarity_picture
from .workload import FAMILIES, DataMissingError, data_folder

PARTS = ("speed", "ttft", "gather", "exactness", "quality", "session", "sweep", "figures", "positions")
LONG = ("sweep", "figures")
TTFT_LIMITS = {"slide, no correction": 0.30, "head, 10 % corrected": 0.42}


def main() -> int:
    """Runs what was asked for; exits with 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--pictures", type=Path, help="draw quality, sweep and figures into this folder")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions of which the median is taken")
    parser.add_argument("--quality-repeats", type=int, default=1, help="the same, of each prompt of quality")
    parser.add_argument("--limit", type=int, help="prompts of each family; all by default")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="of quality and sweep; all by default")
    parser.add_argument(
        "--policy",
        choices=all_policies(),
        action="append",
        help="of quality, besides recompute, prefix and slide; all by default",
    )
    parser.add_argument("--dtype", choices=get_args(DtypeName), default="float32", help="of quality and sweep")
    parser.add_argument("--only", choices=PARTS, action="append", help=f"all by default but {' and '.join(LONG)}")
    arguments = parser.parse_args()
    console = standard_console()
    try:
        data_folder()
    except DataMissingError as error:
        console.print(Text(str(error), "red"))
        return 2
    wanted = arguments.only or [part for part in PARTS if part not in LONG]
    families = arguments.family or FAMILIES
    figures: dict[str, Any] = {"machine": {**machine(), "capability": torch.backends.cpu.get_cpu_capability()}}
    pictures: dict[str, Callable[[], bytes]] = {}
    missed: list[str] = []
    left_out: list[str] = []
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
        figures["exactness"] = exactness(arguments.limit or 20)
        missed += _show_exactness(console, figures["exactness"])
    if "quality" in wanted:
        measured = quality.measure(
            arguments.limit, arguments.quality_repeats, arguments.dtype, families, arguments.policy or (), left_out
        )
        figures["quality"] = quality.figures(measured)
        missed += quality.show(console, measured)
        pictures["quality"] = partial(quality.picture, measured)
    if "session" in wanted:
        figures["session"] = {"divergence": session.divergence(arguments.limit), "delay": session.delay()}
        missed += _show_session(console, figures["session"])
    if "sweep" in wanted:
        figures["sweep"] = sweep.measure(arguments.limit, arguments.dtype, families, left_out)
        sweep.show(console, figures["sweep"])
        for policy, grid in figures["sweep"].items():
            pictures[f"sweep-{policy}"] = partial(heat_maps, policy, grid)
    if "figures" in wanted:
        figures["figures"] = paper_figures.measure(arguments.limit)
        paper_figures.show(console, figures["figures"])
        pictures["reuse"] = partial(reuse_picture, figures["figures"]["reuse"])
        pictures["similarity"] = partial(similarity_picture, figures["figures"]["similarity"])
    if "positions" in wanted:
        figures["positions"] = positions.measure(arguments.limit or 8, arguments.repeats)
        positions.show(console, figures["positions"])
    figures["machine"]["load_average_at_the_end"] = machine()["load_average"]
    if arguments.json:
        replace_file(arguments.json, (json.dumps(figures, indent=2) + "\n").encode())
    for name, content in pictures.items() if arguments.pictures else ():
        replace_file(arguments.pictures / f"{name}.png", content())
        console.print(Text(f"picture: {arguments.pictures / f'{name}.png'}"))
    for line in (*(f"missed: {target}" for target in missed), *(f"left out: {problem}" for problem in left_out)):
        console.print(Text(line, "red"))
    return 1 if missed or left_out else 0


def _missed(*targets: tuple[str, bool]) -> list[str]:
    """The names of those targets that were not reached."""
    return [name for name, reached in targets if not reached]


def _show_speed(console: Console, figures: dict[str, Any]) -> list[str]:
    prefill, decode = figures["prefill_seconds"], figures["decode_step_seconds"]
    title = f"Against transformers: {figures['prompt_tokens']} tokens, {figures['dtype']}, medians"
    show_table(
        console,
        title,
        ("", "engine", "transformers", "ratio", "target"),
        [
            ("cold prefill, s", prefill["engine"], prefill["transformers"], figures["prefill_ratio"], "<= 1"),
            ("decode step, s", decode["engine"], decode["transformers"], figures["decode_speedup"], ">= 1.5 x"),
        ],
    )
    return _missed(
        ("cold prefill not slower than transformers", figures["prefill_ratio"] <= 1.0),
        ("decode at least 1.5 times the speed of generate", figures["decode_speedup"] >= 1.5),
    )


def _show_ttft(console: Console, figures: dict[str, Any]) -> list[str]:
    shares = figures["share_of_prefix"]
    rows = [
        (
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
    show_table(console, title, ("policy", "seconds", "computed", "tokens", "share of prefix", "target"), rows)
    return _missed(*((f"{name}: {limit} of prefix", shares[name] <= limit) for name, limit in TTFT_LIMITS.items()))


def _show_gather(console: Console, figures: dict[str, Any]) -> list[str]:
    steps = figures["step_seconds"]
    show_table(
        console,
        f"A decode step at {figures['context_tokens']} tokens, by how its pages lie",
        ("", "contiguous", "scattered", "share of the gather", "target"),
        [("seconds", steps["contiguous"], steps["scattered"], figures["gather_share"], "<= 0.15")],
    )
    return _missed(("gather at most 15 % of a decode step", figures["gather_share"] <= 0.15))


def _show_exactness(console: Console, figures: dict[str, Any]) -> list[str]:
    show_table(console, "Exactness, float32", ("", "value"), list(figures.items()))
    return _missed(
        ("prefix logits within 1e-3 of recompute", figures["prefix_largest_logit_difference"] <= 1e-3),
        ("prefix text identical", figures["prefix_same_text"] == figures["prompts"]),
        ("100 % budget within 1e-4 of recompute", figures["whole_budget_largest_logit_difference"] <= 1e-4),
        ("nothing slides where nothing changed", figures["unchanged_slid_tokens"] == 0),
        ("append-only logits within 1e-3", figures["append_only_largest_logit_difference"] <= 1e-3),
        ("append-only text identical", figures["append_only_same_text"] == figures["append_only_turns"]),
    )


def _show_session(console: Console, figures: dict[str, Any]) -> list[str]:
    divergence, delay = figures["divergence"], figures["delay"]
    plain, repaired = divergence["unrepaired"], divergence["repaired"]
    show_table(
        console,
        f"KL of slide by turn, {divergence['conversations']} conversations, float32, nats",
        ("turn", "prompt tokens", "without repair", "with repair"),
        [
            (turn, f"{tokens:.0f}", *kls)
            for turn, (tokens, *kls) in enumerate(
                zip(divergence["prompt_tokens"], plain["kl"], repaired["kl"], strict=True)
            )
        ],
    )
    show_table(
        console,
        "Session: means from the second turn on, and how long idle work delays a request",
        ("", "without repair", "with repair", "target"),
        [
            ("mean KL", plain["mean_kl"], repaired["mean_kl"], "with repair < 5e-4"),
            ("mean KL of the first five", plain["first_mean_kl"], repaired["first_mean_kl"]),
            ("mean KL of the last five", plain["last_mean_kl"], repaired["last_mean_kl"]),
            ("last : first", plain["growth"], repaired["growth"], "without repair <= 1.5"),
            ("largest KL", plain["max_kl"], repaired["max_kl"]),
            ("corrected", plain["corrected"], repaired["corrected"]),
            ("repaired tokens a second", "", divergence["repair_tokens_per_second"]),
            (f"delay of {delay['requests']} requests, median s", "", delay["median_seconds"]),
            ("longest, s", "", delay["max_seconds"], "<= 0.05"),
        ],
    )
    return _missed(
        ("session with repair: mean KL 0.0005", repaired["mean_kl"] < 5e-4),
        ("session without repair: last five turns 1.5 times the first five", plain["growth"] <= 1.5),
        ("idle work delays a request by at most 50 ms", delay["max_seconds"] <= 0.05),
    )


if __name__ == "__main__":
    sys.exit(main())
