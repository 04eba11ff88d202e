"""Consecutive prompts of real agents, rebuilt from the raw traces: what each agent sent to its model, turn by turn.

Instructions and examples that a log does not hold are left out, so that shares of what repeats are lower bounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from .workload import data_folder, records

Prompts = list[str]
"""One agent's prompts in order."""

KEPT_OBSERVATIONS = 5
FACTS = 24
"""Lines that the memory block holds at most; older ones go."""

_STUB = "Old environment output: omitted"


def reflexion_cot() -> Iterator[Prompts]:
    """Reflections, gold paragraphs, question; each trial starts again with one more reflection."""
    for record in records("reflexion_cot"):
        trials = [turn for turn in record["turns"] if turn["kind"] == "act"]
        yield [f"{_reflections(turn)}{record['context']}\nQuestion: {record['question']}\n" for turn in trials]


def reflexion_react() -> Iterator[Prompts]:
    """Reflections, question, scratchpad; the scratchpad restarts with each trial."""
    for record in records("reflexion_react"):
        prompts, trial, scratchpad = [], 0, ""
        for turn in record["turns"]:
            if turn["kind"] != "act":
                continue
            if turn["trial"] != trial:
                trial, scratchpad = turn["trial"], ""
            prompts.append(f"{_reflections(turn)}Question: {record['question']}\n{scratchpad}")
            scratchpad += f"Thought: {turn['thought']}\nAction: {turn['action']}\nObservation: {turn['observation']}\n"
        yield prompts


def swe_agent() -> Iterator[Prompts]:
    """The whole conversation, in which only the last five observations are kept and older ones become a stub."""
    for record in records("swe_agent"):
        messages = record["messages"]
        prompts = []
        for stop in _before_answers(messages):
            seen = messages[:stop]
            observed = [idx for idx, message in enumerate(seen) if message["role"] in ("user", "tool")][1:]
            stubs = set(observed[:-KEPT_OBSERVATIONS])
            prompts.append(
                "".join(
                    f"{message['role']}: {_STUB if idx in stubs else message['content']}\n"
                    for idx, message in enumerate(seen)
                )
            )
        yield prompts


def bfcl_tools() -> Iterator[Prompts]:
    """The tools' documents, then the conversation; a turn may bring new tools."""
    documents = json.loads((data_folder() / "bfcl_tool_docs.json").read_text(encoding="utf-8"))
    for record in records("bfcl_tools"):
        prompts, said = [], ""
        for turn in record["turns"]:
            tools = "".join(json.dumps(documents[name]) + "\n" for name in turn["tools"] if name in documents)
            said += f"User: {turn['user']}\n"
            prompts.append(f"You can call functions:\n{tools}{said}")
            said += "".join(f"Call: {call['call']}\nResult: {call['observation']}\n" for call in turn["calls"])
        yield prompts


def locomo_memory() -> Iterator[Prompts]:
    """A memory block that each session's facts are written into, then the sessions so far."""
    for record in records("locomo"):
        prompts: Prompts = []
        facts: list[str] = []
        said = ""
        for session, told in zip(record["sessions"], record["memory_facts"], strict=False):
            memory = "".join(f"- {fact}\n" for fact in facts[-FACTS:])
            said += "".join(f"{turn['speaker']}: {turn['text']}\n" for turn in session)
            prompts.append(f"<memory>\n{memory}</memory>\n{said}")
            facts += [fact for of_speaker in told.values() for fact in of_speaker]
        yield prompts


def tau_airline() -> Iterator[Prompts]:
    """The whole conversation, which only grows."""
    for record in records("tau_airline"):
        messages = record["messages"]
        yield [
            "".join(f"{message['role']}: {message['content']}\n" for message in messages[:stop])
            for stop in _before_answers(messages)
        ]


AGENTS: dict[str, Callable[[], Iterator[Prompts]]] = {
    "reflexion, CoT": reflexion_cot,
    "reflexion, ReAct": reflexion_react,
    "SWE-agent, last 5 observations": swe_agent,
    "BFCL, growing tools": bfcl_tools,
    "LoCoMo, memory block": locomo_memory,
    "tau-bench, append-only": tau_airline,
}


def _reflections(turn: dict[str, Any]) -> str:
    told = "".join(f"- {reflection}\n" for reflection in turn["reflections"])
    return f"Reflections on earlier attempts:\n{told}\n" if told else ""


def _before_answers(messages: list[dict[str, str]]) -> list[int]:
    """How many messages stand before each of the model's answers."""
    return [idx for idx, message in enumerate(messages) if message["role"] == "assistant" and idx]
