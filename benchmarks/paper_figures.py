"""The paper's Figures 3 and 4a on our data: `--only figures`.

Figure 3: how much of an agent's next prompt is the common prefix and how much repeats anywhere, with its variance.
Figure 4a: how alike reused and recomputed keys are, by how far the text moved, with and without rotating them along.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median, pvariance
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from cacheslide_agents.bench.comparison import measuring_config
from cacheslide_agents.engine import Engine, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.reuse.diff import common_prefix_tokens, matching_runs
from cacheslide_agents.engine.run.drift import cksim_by_layer
from cacheslide_agents.tables import show_table

from .traces import AGENTS
from .workload import records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_RUN_TOKENS = 16
SHIFTS = (0, 1, 4, 16, 64, 256, 1024)
SUFFIX_WORDS = 300
SHIFTED_PROMPTS = 3


def reuse_shares(tokenizer: PreTrainedTokenizerBase, limit: int | None) -> dict[str, Any]:
    """For each agent: shares of the next prompt that are its prefix and that repeat, over all its transitions.

    A transition is a prompt and the one after it; runs of `MIN_RUN_TOKENS` and more count as repeating.

    Args:
        tokenizer: What tokens are.
        limit: Traces of each agent; None takes all.
    """
    figures = {}
    for agent, traces in AGENTS.items():
        prefixes, repeats, tokens = [], [], []
        for _, prompts in zip(range(limit or 10**9), traces(), strict=False):
            encoded = [
                np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in prompts
            ]
            for before, after in pairwise(encoded):
                prefix = common_prefix_tokens(after, before)
                runs = matching_runs(after[prefix:], before[prefix:], MIN_RUN_TOKENS)
                tokens.append(len(after))
                prefixes.append(prefix / len(after))
                repeats.append((prefix + sum(length for _, _, length in runs)) / len(after))
        figures[agent] = {
            "transitions": len(tokens),
            "median_tokens": median(tokens),
            "prefix_mean": mean(prefixes),
            "prefix_variance": pvariance(prefixes),
            "repeats_mean": mean(repeats),
            "repeats_variance": pvariance(repeats),
            "prefix": prefixes,
            "repeats": repeats,
        }
    return figures


def key_similarity(engine: Engine) -> dict[str, Any]:
    """Mean CKSim of a suffix's reused keys by shift: rotated to their new place, and left as they were.

    The update before the suffix grows by so many tokens of real text; keys are compared with a full prefill's.

    Args:
        engine: In float32; nothing stays cached.
    """
    similar: dict[str, list[list[float]]] = {"aligned": [], "unaligned": []}
    share = engine.config.correction_share
    engine.adjust(correction_share=0.0)
    for number in range(SHIFTED_PROMPTS):
        rows: dict[str, list[float]] = {name: [] for name in similar}
        for shift in SHIFTS:
            first, second, suffix_tokens = _shifted(engine, number, shift)
            session = f"{number} {shift}"
            engine.generate(first, SamplingParams(max_tokens=1), session=session)
            full = engine.trace(second, policy="recompute").keys_values[:, -suffix_tokens:-1]
            aligned = engine.trace(second, session=session, policy="slide").keys_values[:, -suffix_tokens:-1]
            unaligned = engine.trace(first, policy="recompute").keys_values[:, -suffix_tokens:-1]
            rows["aligned"].append(mean(cksim_by_layer(aligned, full)[0]))
            rows["unaligned"].append(mean(cksim_by_layer(unaligned, full)[0]))
            engine.forget(session)
        for name, values in rows.items():
            similar[name].append(values)
    engine.adjust(correction_share=share)
    means = {name: [mean(values) for values in zip(*rows, strict=True)] for name, rows in similar.items()}
    return {"shifts": list(SHIFTS), "prompts": SHIFTED_PROMPTS, **means}


def measure(limit: int | None) -> dict[str, Any]:
    """Both figures' numbers."""
    with Engine.load(measuring_config("float32")) as engine:
        return {"reuse": reuse_shares(engine.tokenizer, limit), "similarity": key_similarity(engine)}


def show(console: Console, figures: dict[str, Any]) -> None:
    """Prints both as tables."""
    show_table(
        console,
        "Share of an agent's next prompt that is the common prefix, and that repeats anywhere (paper, Figure 3)",
        ("agent", "transitions", "median tokens", "prefix", "variance", "repeats", "variance"),
        [
            (
                agent,
                one["transitions"],
                f"{one['median_tokens']:.0f}",
                one["prefix_mean"],
                one["prefix_variance"],
                one["repeats_mean"],
                one["repeats_variance"],
            )
            for agent, one in figures["reuse"].items()
        ],
    )
    similarity = figures["similarity"]
    show_table(
        console,
        f"CKSim of reused keys by shift in tokens, {similarity['prompts']} prompts (paper, Figure 4a)",
        ("keys", *map(str, similarity["shifts"])),
        [(name, *similarity[name]) for name in ("aligned", "unaligned")],
    )


def _shifted(engine: Engine, number: int, shift: int) -> tuple[Prompt, Prompt, int]:
    """Two prompts whose suffix lies `shift` tokens further on in the second, and the suffix's number of tokens."""
    conversation = records("locomo")[number]
    words = " ".join(turn["text"] for session in conversation["sessions"] for turn in session).split()
    suffix = "\n" + " ".join(words[:SUFFIX_WORDS]) + "\nWhat"
    ids = engine.tokenizer.encode(" ".join(words[SUFFIX_WORDS : 10 * SUFFIX_WORDS]), add_special_tokens=False)
    start = Segment.system("You keep notes.\n")
    update, grown = (str(engine.tokenizer.decode(ids[:tokens])) for tokens in (64, 64 + shift))
    first = Prompt([start, Segment.update(update), Segment.suffix(suffix)])
    second = Prompt([start, Segment.update(grown), Segment.suffix(suffix)])
    return first, second, engine.count_tokens(suffix)
