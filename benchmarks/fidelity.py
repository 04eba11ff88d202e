"""Fidelity: how far reuse is from a full prefill, and that exact reuse is exact."""

from __future__ import annotations

from statistics import mean, median
from typing import Any

import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.config import PolicyName

from .workload import FAMILIES, turns

POLICIES: tuple[PolicyName, ...] = ("recompute", "prefix", "slide")


def divergence(limit: int | None) -> dict[str, Any]:
    """How far `slide` is from a full prefill, per family of prompts, in float32.

    KL(full ‖ slide) in nats over the answer's tokens; the share of the prompt's tokens computed and of the slid ones
    corrected; the mean change of the old value's log-probability where there is one (its leak).
    """
    results: dict[str, Any] = {}
    with Engine.load(EngineConfig(dtype="float32")) as engine:
        for family in FAMILIES:
            kls, shares, corrected, leaks = [], [], [], []
            pairs = turns(family, limit)
            for number, pair in enumerate(pairs):
                session = f"{family}-{number}"
                engine.generate(pair.first, SamplingParams(max_tokens=1), session=session)
                full = engine.logits(pair.second, pair.answer, session=session, policy="recompute").log_softmax(-1)
                slid = engine.logits(pair.second, pair.answer, session=session, policy="slide").log_softmax(-1)
                kls.append((full.exp() * (full - slid)).sum(-1).mean().item())
                if pair.old_value:
                    leaks.append(_leak(engine, pair.second, pair.old_value, session))
                receipt = engine.generate(pair.second, SamplingParams(max_tokens=1), session=session).receipt
                shares.append(receipt.computed_tokens / receipt.prompt_tokens)
                corrected.append(receipt.corrected_tokens / max(1, receipt.slid_tokens))
                engine.forget(session)
            results[family] = {
                "prompts": len(pairs),
                "mean_kl": mean(kls),
                "median_kl": median(kls),
                "max_kl": max(kls),
                "computed": mean(shares),
                "corrected": mean(corrected),
                "leak": mean(leaks) if leaks else None,
            }
    return results


def times(limit: int | None) -> dict[str, Any]:
    """Per family and policy: mean tokens computed and median time to the first token of the second turn."""
    results: dict[str, Any] = {}
    with Engine.load(EngineConfig()) as engine:
        for family in FAMILIES:
            computed: dict[str, list[int]] = {policy: [] for policy in POLICIES}
            seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
            for number, pair in enumerate(turns(family, limit)):
                for policy in POLICIES:
                    session, namespace = f"{family}-{number}", policy
                    for prompt in (pair.first, pair.second):
                        receipt = engine.generate(
                            prompt, SamplingParams(max_tokens=1), session=session, namespace=namespace, policy=policy
                        ).receipt
                    computed[policy].append(receipt.computed_tokens)
                    seconds[policy].append(receipt.ttft_seconds)
                    engine.forget(session, namespace=namespace)
            results[family] = {
                policy: {"computed_tokens": mean(computed[policy]), "ttft_seconds": median(seconds[policy])}
                for policy in POLICIES
            }
    return results


def exactness(limit: int) -> dict[str, Any]:
    """`prefix` against `recompute`, and an append-only conversation under `slide`: logits and greedy text."""
    params = SamplingParams(max_tokens=16)
    largest = 0.0
    same_text = 0
    with Engine.load(EngineConfig(dtype="float32")) as engine:
        pairs = [pair for family in FAMILIES for pair in turns(family, -(-limit // len(FAMILIES)))][:limit]
        for number, pair in enumerate(pairs):
            session = f"prefix-{number}"
            engine.generate(pair.first, SamplingParams(max_tokens=1), session=session)
            largest = max(largest, _difference(engine, pair.second, pair.answer, session, "prefix"))
            reused = engine.generate(pair.second, params, session=session, policy="prefix").text
            full = engine.generate(pair.second, params, session=session, policy="recompute").text
            same_text += reused == full
            engine.forget(session)
        appended, appended_text, slid = _append_only(engine, turns("memory", 1)[0].first, params)
    return {
        "prompts": len(pairs),
        "prefix_largest_logit_difference": largest,
        "prefix_same_text": same_text,
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


def _leak(engine: Engine, prompt: Prompt, old_value: str, session: str) -> float:
    """How much more likely the old value is under `slide` than under a full prefill, in nats."""
    ids = torch.tensor(engine.tokenizer.encode(" " + old_value, add_special_tokens=False)).unsqueeze(-1)

    def likelihood(policy: PolicyName) -> float:
        logits = engine.logits(prompt, ids.flatten().tolist(), session=session, policy=policy)
        return logits.log_softmax(-1).gather(-1, ids).sum().item()

    return likelihood("slide") - likelihood("recompute")
