"""Twenty turns of a session whose memory is edited every turn: divergence without and with repair, and its delay."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import chain, count, islice
from statistics import mean, median
from typing import Any

from cacheslide_agents.bench.comparison import measuring_config
from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.run.drift import kl_divergence

from .workload import records

NUM_TURNS = 20
END_TURNS = 5
MEMORY_LINES = 8
REPLACED_LINES = 2
FIRST_UTTERANCES = 28
UTTERANCES = 4
"""By so many the history grows each turn, besides the question and the answer of the turn before."""
CONVERSATIONS = 3
DELAYED_REQUESTS = 40
REPAIR_SECONDS = 600.0
ONE = SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class SessionTurn:
    """One turn of a session.

    Attributes:
        prompt: System, memory, all that was said so far, and a question.
        answer: The gold answer, over whose tokens divergence is measured; it is part of the next turn's history.
    """

    prompt: Prompt
    answer: str


def session_turns(number: int) -> list[SessionTurn]:
    """The turns of one real conversation: each replaces two of eight memory lines and appends to the history."""
    conversations = records("locomo")
    record = conversations[number % len(conversations)]
    facts = chain.from_iterable(chain.from_iterable(told.values()) for told in record["memory_facts"])
    utterances = (f"{said['speaker']}: {said['text']}\n" for talk in record["sessions"] for said in talk)
    system = f"You are the companion of {' and '.join(record['speakers'])}. You keep a memory block.\n"
    memory = list(islice(facts, MEMORY_LINES))
    history = "".join(islice(utterances, FIRST_UTTERANCES))
    turns = []
    for turn, asked in enumerate(record["qa"][:NUM_TURNS]):
        if turn:
            for line, fact in enumerate(islice(facts, REPLACED_LINES)):
                memory[(turn * REPLACED_LINES + line) % MEMORY_LINES] = fact
            history += "".join(islice(utterances, UTTERANCES))
        question, answer = f"Question: {asked['question']}\nThe answer is", f" {asked['answer']}."
        update = "<memory>\n" + "".join(f"- {fact}\n" for fact in memory) + "</memory>\n"
        segments = (Segment.system(system), Segment.update(update), Segment.suffix(history), Segment.suffix(question))
        turns.append(SessionTurn(Prompt(segments), answer))
        history += f"{question}{answer}\n"
    return turns


def divergence(conversations: int | None) -> dict[str, Any]:
    """KL(full ‖ slide) of each turn's answer, float32, nats, the mean over its tokens and over conversations.

    Each turn starts from what its session's own turn before left in the cache: as it is, or repaired to the end.
    """
    num_conversations = conversations or CONVERSATIONS
    figures: dict[str, Any] = {"conversations": num_conversations, "prompt_tokens": [[] for _ in range(NUM_TURNS)]}
    kls: dict[str, list[list[float]]] = {name: [[] for _ in range(NUM_TURNS)] for name in ("unrepaired", "repaired")}
    corrected: dict[str, list[float]] = {name: [] for name in kls}
    with Engine.load(measuring_config("float32")) as plain:
        config = plain.config.with_changes(repair=True, repair_seconds=REPAIR_SECONDS)
        with Engine.from_model(plain.model, plain.tokenizer, config) as repairing:
            engines = {"unrepaired": plain, "repaired": repairing}
            for number in range(num_conversations):
                for turn_idx, turn in enumerate(session_turns(number)):
                    full = plain.logits(turn.prompt, turn.answer, policy="recompute")
                    for name, engine in engines.items():
                        session = f"{number}"
                        slid = engine.logits(turn.prompt, turn.answer, session=session)
                        kls[name][turn_idx].append(kl_divergence(full, slid).mean().item())
                        receipt = engine.generate(turn.prompt, SamplingParams(max_tokens=8), session=session).receipt
                        if turn_idx:
                            corrected[name].append(receipt.corrected_tokens / max(1, receipt.slid_tokens))
                    assert repairing.wait_until_repaired(REPAIR_SECONDS), "the idle time did not suffice"
                    figures["prompt_tokens"][turn_idx].append(receipt.prompt_tokens)
            stats = repairing.stats()
    figures["prompt_tokens"] = [mean(tokens) for tokens in figures["prompt_tokens"]]
    figures["repair_tokens_per_second"] = stats.repaired_tokens / stats.repair_seconds
    for name, by_turn in kls.items():
        means = [mean(turn_kls) for turn_kls in by_turn]
        first, last = mean(means[1 : 1 + END_TURNS]), mean(means[-END_TURNS:])
        figures[name] = {
            "kl": means,
            "mean_kl": mean(means[1:]),
            "max_kl": max(chain.from_iterable(by_turn)),
            "first_mean_kl": first,
            "last_mean_kl": last,
            "growth": last / first,
            "corrected": mean(corrected[name]),
        }
    return figures


def delay(requests: int = DELAYED_REQUESTS) -> dict[str, Any]:
    """How long a request waits for the idle work that it interrupts, be it repair or a shadow run of the gate.

    Seconds from its submission to its turn; the requests come at random moments.
    """
    chance = random.Random(0)
    delays: list[float] = []
    question = Prompt([Segment.suffix("Hello?")])
    with Engine.load(EngineConfig(repair=True, repair_seconds=REPAIR_SECONDS, gate_share=1.0)) as engine:
        asked = ((number, turn) for number in count() for turn in session_turns(number))
        while len(delays) < requests:
            number, turn = next(asked)
            prompt_tokens = engine.generate(turn.prompt, ONE, session=f"{number}").receipt.prompt_tokens
            time.sleep(chance.uniform(0.06, 0.8))
            before = _interrupted(engine)
            receipt = engine.generate(question, ONE).receipt
            if _interrupted(engine) > before:
                delays.append(receipt.queue_seconds)
        return {
            "requests": len(delays),
            "prompt_tokens": prompt_tokens,
            "dtype": engine.stats().dtype,
            "median_seconds": median(delays),
            "max_seconds": max(delays),
        }


def _interrupted(engine: Engine) -> int:
    stats = engine.stats()
    return stats.interrupted_repairs + stats.dropped_shadow_runs
