"""Exactness: where reuse must give what a full prefill gives, it does."""

from __future__ import annotations

from typing import Any

from cacheslide_agents.bench.comparison import measuring_config
from cacheslide_agents.engine import Engine, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.config import PolicyName

from .workload import FAMILIES, family_turns


def exactness(limit: int) -> dict[str, Any]:
    """`prefix`, the whole budget and an append-only conversation against `recompute`: logits and greedy text."""
    params = SamplingParams(max_tokens=16)
    largest, largest_whole = 0.0, 0.0
    same_text = 0
    unchanged_slid = 0
    defaults = measuring_config("float32")
    with Engine.load(defaults) as engine:
        pairs = [pair for family in FAMILIES for pair in family_turns(family, -(-limit // len(FAMILIES))).turns][:limit]
        for number, pair in enumerate(pairs):
            session = f"prefix-{number}"
            engine.generate(pair.first, SamplingParams(max_tokens=1), session=session)
            answer = pair.answer or " The answer"
            largest = max(largest, _difference(engine, pair.second, answer, session, "prefix"))
            engine.adjust(correction_share=1.0, staleness_bound=0.0)
            largest_whole = max(largest_whole, _difference(engine, pair.second, answer, session, "slide"))
            engine.adjust(correction_share=defaults.correction_share, staleness_bound=defaults.staleness_bound)
            unchanged = engine.generate(pair.first, SamplingParams(max_tokens=1), session=session, store=False).receipt
            unchanged_slid += unchanged.slid_tokens
            reused = engine.generate(pair.second, params, session=session, policy="prefix").text
            full = engine.generate(pair.second, params, session=session, policy="recompute").text
            same_text += reused == full
            engine.forget(session)
        appended, appended_text, slid = _append_only(engine, family_turns("memory", 1).turns[0].first, params)
    return {
        "prompts": len(pairs),
        "prefix_largest_logit_difference": largest,
        "prefix_same_text": same_text,
        "whole_budget_largest_logit_difference": largest_whole,
        "unchanged_slid_tokens": unchanged_slid,
        "append_only_turns": len(appended_text),
        "append_only_largest_logit_difference": appended,
        "append_only_same_text": sum(appended_text),
        "append_only_slid_tokens": slid,
    }


def _append_only(engine: Engine, start: Prompt, params: SamplingParams) -> tuple[float, list[bool], int]:
    segments = list(start.segments)
    largest, same, slid = 0.0, [], 0
    for question in ("Who speaks here?", "What do they plan?", "Who is happy?", "What comes next?"):
        segments.append(Segment.suffix(f"Question: {question}\nAnswer:"))
        prompt = Prompt(segments)
        largest = max(largest, _difference(engine, prompt, " They", "appended", "slide"))
        full = engine.generate(prompt, params, namespace="full", policy="recompute")
        output = engine.generate(prompt, params, session="appended", policy="slide")
        same.append(output.text == full.text)
        slid += output.receipt.slid_tokens
        segments.append(Segment.suffix(output.text + "\n"))
    return largest, same, slid


def _difference(engine: Engine, prompt: Prompt, answer: str, session: str, policy: PolicyName) -> float:
    full = engine.logits(prompt, answer, session=session, policy="recompute")
    reused = engine.logits(prompt, answer, session=session, policy=policy)
    return (full - reused).abs().max().item()
