"""The demo's figures: medians, the closing sentence and the JSON file.

The file holds one object:

    schema        1
    environment   where it ran: package, Python, torch and transformers versions, platform, processor, cores,
                  torch threads, load average at the end, device, dtype, model, context_tokens, date (UTC)
    settings      of every request: max_tokens, stop; and the order in which policies are measured
    turns         one object a turn:
        number, message
        edits     [{kind: insert | edit | delete, old, new}], made to the memory before the turn
        parts     [{name, start, stop}], token ranges of the prompt: instructions, memory, earlier messages, question
        tokens    {exact, slid, corrected, fresh} of the slide run, partitioning its prompt: here `slid` leaves out
                  corrected tokens, which the receipts' `slid_tokens` count in
        runs      {slide, prefix, recompute}, each {answer, receipt}; a receipt is `Receipt.to_dict()`
        speedup   {prefix, recompute}: the rival's ttft_seconds over slide's
        agrees    whether the slide run's answer is the recompute run's text
        differs_at_word   the first word at which it is not, counted from 1, or null
        prefix_agrees     the same for the prefix run, whose reuse is exact: false shows what rounding alone does
    summary       over the turns from the second on (the first has nothing to reuse), all medians:
                  ttft_seconds {policy}, computed_tokens {policy}, speedup {prefix, recompute}; and over all turns
                  num_agree, num_turns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from cacheslide_agents.engine.config import PolicyName

from .measure import POLICIES, Turn

RIVALS: tuple[PolicyName, ...] = ("prefix", "recompute")


@dataclass(frozen=True)
class Summary:
    """Medians over the turns that could reuse something.

    Attributes:
        first_turn: The first of those turns.
        ttft_seconds: By policy.
        computed_tokens: By policy.
        prompt_tokens: Of the prompts.
        speedup: By rival; the median of the turns' ratios, not the ratio of the medians.
        num_agree: Of all turns, those whose answer is the text that recomputation gives.
        num_turns: All turns.
    """

    first_turn: int
    ttft_seconds: dict[PolicyName, float]
    computed_tokens: dict[PolicyName, float]
    prompt_tokens: float
    speedup: dict[PolicyName, float]
    num_agree: int
    num_turns: int


def summarize(turns: Sequence[Turn]) -> Summary:
    """The medians of at least one turn; a lone first turn stands for itself."""
    counted = turns[1:] or turns
    return Summary(
        first_turn=counted[0].number,
        ttft_seconds={policy: median(turn.runs[policy].ttft_seconds for turn in counted) for policy in POLICIES},
        computed_tokens={policy: median(turn.runs[policy].computed_tokens for turn in counted) for policy in POLICIES},
        prompt_tokens=median(turn.slide.prompt_tokens for turn in counted),
        speedup={rival: median(turn.speedup(rival) for turn in counted) for rival in RIVALS},
        num_agree=sum(turn.agrees() for turn in turns),
        num_turns=len(turns),
    )


def meaning(turns: Sequence[Turn]) -> str:
    """What the numbers mean, in a few sentences."""
    summary = summarize(turns)
    computed, ttft = summary.computed_tokens, summary.ttft_seconds
    sentences = [
        f"Medians from turn {summary.first_turn} on: of {summary.prompt_tokens:,.0f} prompt tokens CacheSlide computed "
        f"{computed['slide']:,.0f}; prefix caching, which stops at the first changed word, {computed['prefix']:,.0f}.",
        f"The first token took {ttft['slide']:.2f} s with CacheSlide, {ttft['prefix']:.2f} s with prefix caching "
        f"({summary.speedup['prefix']:.1f} times as long) and {ttft['recompute']:.2f} s when everything was computed "
        f"({summary.speedup['recompute']:.1f} times).",
    ]
    for turn in turns[1:]:
        if not turn.edits:
            sentences.append(
                f"Nothing was edited before turn {turn.number}: there prefix caching computed "
                f"{turn.runs['prefix'].computed_tokens:,} tokens and CacheSlide {turn.slide.computed_tokens:,}."
            )
    sentences.append(
        f"{summary.num_agree} of {summary.num_turns} answers are, word for word, those of full recomputation; slid "
        "tokens are an approximation, so other conversations may differ."
    )
    return " ".join(sentences)


def as_json(turns: Sequence[Turn], environment: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The figures as plain JSON values; the module's docstring describes them."""
    summary = summarize(turns)
    return {
        "schema": 1,
        "environment": environment,
        "settings": settings,
        "turns": [_turn_as_json(turn) for turn in turns],
        "summary": {
            "first_turn": summary.first_turn,
            "prompt_tokens": summary.prompt_tokens,
            "ttft_seconds": summary.ttft_seconds,
            "computed_tokens": summary.computed_tokens,
            "speedup": summary.speedup,
            "num_agree": summary.num_agree,
            "num_turns": summary.num_turns,
        },
    }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    return {
        "number": turn.number,
        "message": turn.message,
        "edits": [{"kind": edit.kind, "old": edit.old, "new": edit.new} for edit in turn.edits],
        "parts": [part._asdict() for part in turn.parts],
        "tokens": turn.slide.tokens,
        "runs": {
            policy: {"answer": turn.runs[policy].answer, "receipt": dict(turn.runs[policy].receipt)}
            for policy in POLICIES
        },
        "speedup": {rival: turn.speedup(rival) for rival in RIVALS},
        "agrees": turn.agrees(),
        "differs_at_word": turn.differs_at_word(),
        "prefix_agrees": turn.agrees("prefix"),
    }
