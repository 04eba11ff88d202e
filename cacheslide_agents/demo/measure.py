"""Holds the demo's conversation and gives every turn's prompt to each policy, apart from the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.adapters.messages import from_langchain
from cacheslide_agents.engine.config import PolicyName
from cacheslide_agents.engine.receipt import Treatment
from cacheslide_agents.templates import ChatRenderer, MemoryTemplate

from .agent import Edit, MemoryAgent
from .script import Script, ScriptedTurn

POLICIES: tuple[PolicyName, ...] = ("slide", "prefix", "recompute")
TREATMENTS: tuple[Treatment, ...] = ("exact", "slid", "corrected", "fresh")

_WARM_UP_TOKENS = 2


class Part(NamedTuple):
    """A part of a prompt, for people: tokens `start` to `stop` are `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Run:
    """What one policy made of a turn's prompt.

    Attributes:
        answer: The text.
        receipt: `Receipt.to_dict()`.
    """

    answer: str
    receipt: Mapping[str, Any]

    @property
    def ttft_seconds(self) -> float:
        """From the start of the request's turn on the engine to its first token: tokens, plan and prefill."""
        return float(self.receipt["ttft_seconds"])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.receipt["prompt_tokens"])

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return int(self.receipt["computed_tokens"])

    @property
    def treatments(self) -> list[tuple[int, int, Treatment]]:
        """The prompt as runs (start, stop, treatment); here `slid` leaves corrected tokens out."""
        return [(start, stop, treatment) for start, stop, treatment in self.receipt["treatments"]]

    @property
    def tokens(self) -> dict[Treatment, int]:
        """Prompt tokens by treatment; together they are the prompt."""
        counts = dict.fromkeys(TREATMENTS, 0)
        for start, stop, treatment in self.treatments:
            counts[treatment] += stop - start
        return counts


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation under every policy.

    Attributes:
        number: Counted from 1.
        message: What the user said.
        edits: What changed in the memory before.
        parts: The prompt's parts, in order.
        runs: What each policy made of the same prompt; the conversation goes on with the answer of `slide`.
    """

    number: int
    message: str
    edits: tuple[Edit, ...]
    parts: tuple[Part, ...]
    runs: Mapping[PolicyName, Run]

    @property
    def slide(self) -> Run:
        """The conversation's own run."""
        return self.runs["slide"]

    def speedup(self, rival: PolicyName) -> float:
        """How many times longer the rival took to its first token."""
        return self.runs[rival].ttft_seconds / max(self.slide.ttft_seconds, 1e-9)

    def agrees(self, policy: PolicyName = "slide") -> bool:
        """Whether a policy's answer is the text that full recomputation gives."""
        return self.runs[policy].answer == self.runs["recompute"].answer

    def differs_at_word(self) -> int | None:
        """The first word, counted from 1, at which the answer leaves that of full recomputation, or None."""
        if self.agrees():
            return None
        ours, theirs = self.slide.answer.split(), self.runs["recompute"].answer.split()
        same = next((idx for idx, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        return 1 + (min(len(ours), len(theirs)) if same is None else same)


class Measurement:
    """An agent in conversation, and its rivals reading over its shoulder.

    Each policy has a namespace of its own, so that no run finds what another computed, and sees every turn from the
    first, so that it finds what it computed itself. Which policy goes first changes from turn to turn.

    Args:
        chat: The model; a request's own settings are added to its.
        script: What is said.
    """

    def __init__(self, chat: CacheSlideChat, script: Script) -> None:
        self._chat = chat
        self._script = script
        self._conversation = uuid4().hex[:8]
        self._config: RunnableConfig = {"configurable": {"thread_id": "demo"}}
        self._chats = {policy: self._under(policy, "turns") for policy in POLICIES}
        self.agent = self._agent(self._chats["slide"])

    def warm_up(self, waiting: Callable[[PolicyName], None] = lambda _: None) -> None:
        """Answers two short turns under each policy, so that what a first call costs falls to none of them."""
        first, second = self._script.turns[:2]
        for policy in POLICIES:
            waiting(policy)
            agent = self._agent(self._under(policy, "warm-up", max_tokens=_WARM_UP_TOKENS))
            agent.history = agent.history[:2]
            agent.ask(first.message)
            agent.memory.set([*agent.memory.lines, "This line is new."])
            agent.ask(second.message)
            self._chat.engine.forget("demo", namespace=self._namespace(policy, "warm-up"))

    def prepare(self, scripted: ScriptedTurn) -> None:
        """Edits the memory as the turn asks."""
        for edit in scripted.edits:
            self.agent.remember(edit)

    def turn(self, number: int, scripted: ScriptedTurn, waiting: Callable[[PolicyName], None] = lambda _: None) -> Turn:
        """Gives a turn's prompt to every policy; `prepare` comes before.

        Args:
            number: Of the turn, from 1.
            scripted: What is said.
            waiting: Is told which policy runs now.
        """
        messages = self.agent.prompt(scripted.message)
        answers: dict[PolicyName, AIMessage] = {}
        for policy in rotated(POLICIES, number - 1):
            waiting(policy)
            if policy == "slide":
                answers[policy] = self.agent.ask(scripted.message)
            else:
                answers[policy] = self._chats[policy].invoke(messages, self._config)
        runs = {
            policy: Run(answers[policy].text, answers[policy].response_metadata["cacheslide"]) for policy in POLICIES
        }
        parts = self._parts(messages, runs["slide"].prompt_tokens)
        return Turn(number, scripted.message, scripted.edits, parts, runs)

    def _agent(self, chat: Runnable[LanguageModelInput, AIMessage]) -> MemoryAgent:
        memory = MemoryTemplate(self._script.instructions, self._script.memory)
        return MemoryAgent(chat, memory, "demo", self._script.history)

    def _under(self, policy: PolicyName, purpose: str, **settings: Any) -> Runnable[LanguageModelInput, AIMessage]:
        return self._chat.bind(policy=policy, namespace=self._namespace(policy, purpose), **settings)

    def _namespace(self, policy: PolicyName, purpose: str) -> str:
        return f"demo-{self._conversation}-{policy}-{purpose}"

    def _parts(self, messages: list[BaseMessage], prompt_tokens: int) -> tuple[Part, ...]:
        """Where instructions, memory, earlier messages and the question lie."""
        tokenizer = self._chat.engine.tokenizer
        prompt = ChatRenderer(tokenizer).render(from_langchain(messages))
        encoded = prompt.encode(tokenizer)
        said = messages[-1].text
        memory_idx = encoded.roles.index("update")
        question_idx = max(idx for idx, segment in enumerate(prompt.segments) if segment.text == said)
        starts = [
            0,
            encoded.segment_starts[memory_idx],
            encoded.segment_starts[memory_idx + 1],
            # Replies may have come back with other ids, as they were sampled: what stands behind them is counted
            # from the prompt's end.
            encoded.segment_starts[question_idx] - len(encoded) + prompt_tokens,
            prompt_tokens,
        ]
        names = ("instructions", "memory", "earlier messages", "question")
        return tuple(Part(*part) for part in zip(names, starts, starts[1:], strict=False))


def rotated(policies: tuple[PolicyName, ...], shift: int) -> tuple[PolicyName, ...]:
    """The policies, beginning with another one for each `shift`."""
    shift %= len(policies)
    return policies[shift:] + policies[:shift]
