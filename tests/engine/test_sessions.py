"""Whole sessions on tiny random models: any edits in any order, and every token's K and V is what the receipt says.

Prompts are made of few repetitive phrases, so that matches are ambiguous, and pools are small, so that turns evict
each other and fall back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import ContextLengthError
from cacheslide_agents.engine.run import repair
from cacheslide_agents.engine.segments import Role
from tests.reference.session_check import WatchedEngine
from tests.tiny import FAMILIES, tiny_model, tiny_tokenizer

PHRASES = (
    "the quick brown fox jumps over the lazy dog\n",
    "user: what is the name of the sister?\nassistant: her name is Alice.\n",
    "the memory says that the user lives in Paris, likes tea and works at a library.\n",
    "ab ab ab ab ab ab ab ab ab ab ab ab\n",
    "yes\n",
    "x",
    "question 12? answer 84.\n",
    "<|im_end|>\n<|im_start|>user\n",
)
CONTINUATION = " her name is Alice"

phrases = st.lists(st.integers(0, len(PHRASES) - 1), min_size=1, max_size=3)


@dataclass(frozen=True)
class Edit:
    """A change of a session's segments; indices count modulo what is there."""

    kind: str
    place: int
    phrases: list[int]


@dataclass(frozen=True)
class Turn:
    """A prompt made of a session's segments after some edits, and how it is asked."""

    session: int
    namespace: str
    edits: list[Edit]
    policy: str | None
    max_tokens: int
    compare: bool
    forget: bool
    repair_steps: int
    stop_after_layers: int | None


EDITS = st.builds(
    Edit,
    st.sampled_from(["append", "insert", "replace", "delete", "move", "truncate", "branch", "reply"]),
    st.integers(0, 7),
    phrases,
)
TURNS = st.builds(
    Turn,
    session=st.sampled_from([0, 0, 0, 0, 0, 1, 2]),
    namespace=st.sampled_from(["a"] * 6 + ["b"]),
    edits=st.lists(EDITS, min_size=1, max_size=3),
    policy=st.sampled_from([None, None, None, None, "head", "prefix", "recompute"]),
    max_tokens=st.integers(1, 18),
    compare=st.booleans(),
    forget=st.sampled_from([False] * 9 + [True]),
    repair_steps=st.sampled_from([0, 0, 0, 1, 2, 40]),
    stop_after_layers=st.sampled_from([None, None, None, 0, 1, 3]),
)
SETTINGS = st.fixed_dictionaries(
    {
        "correction_share": st.sampled_from([0.0, 0.1, 0.4, 1.0]),
        "staleness_bound": st.sampled_from([0.0, 0.0003, 0.02]),
        "min_slide_tokens": st.sampled_from([5, 2, 1, 5, 16, 64]),
        "max_hops": st.sampled_from([20, 2, 1, 0]),
        "share_slid": st.booleans(),
        "prefill_chunk_tokens": st.sampled_from([7, 16, 33, 64, 2048]),
        "pool_tokens": st.sampled_from([2048, 1024, 640, 480, 320, 160]),
        "max_context_tokens": st.sampled_from([None, None, 256]),
        "learned_positions": st.booleans(),
        "positions_quantile": st.sampled_from([0.95, 0.5]),
    }
)


@lru_cache(maxsize=8)
def family_model(family: str, window: int | None) -> Any:
    return tiny_model(family, sliding_window=window) if family == "mistral" else tiny_model(family)


class Script:
    """The sessions' segments, and one engine that answers them."""

    def __init__(self, family: str, config: dict[str, Any]) -> None:
        name, _, window = family.partition("+")
        model = family_model(name, int(window) if window else None)
        self.engine = Engine.from_model(model, tiny_tokenizer(None), EngineConfig(**config))
        self.watched = WatchedEngine(self.engine)
        start: list[tuple[Role, str]] = [("system", PHRASES[2]), ("update", PHRASES[0]), ("suffix", PHRASES[1] * 2)]
        self.segments: dict[int, list[tuple[Role, str]]] = {number: list(start) for number in (0, 1, 2)}
        self.replies = {0: "ok", 1: "ok", 2: "ok"}

    def take(self, turn: Turn) -> None:
        segments = self.segments[turn.session]
        for edit in turn.edits:
            self._edit(turn.session, segments, edit)
        prompt = Prompt(Segment(role, text) for role, text in segments)
        # Session 2 is nobody's: the engine is told no session.
        call: dict[str, Any] = {
            "session": f"s{turn.session}" if turn.session < 2 else None,
            "namespace": turn.namespace,
        }
        try:
            output = self.watched.turn(
                prompt, SamplingParams(max_tokens=turn.max_tokens, ignore_eos=True), policy=turn.policy, **call
            )
        except ContextLengthError:
            assert len(prompt.token_ids(self.engine.tokenizer)) + 40 > self.engine.context_tokens
            self.segments[turn.session] = segments[:2]
            self.watched.check_pages()
            return
        self.replies[turn.session] = output.text
        self.watched.repair(turn.repair_steps, turn.stop_after_layers)
        if turn.compare:
            self._compare(prompt, call)
        if turn.forget and call["session"]:
            self.engine.forget(call["session"], namespace=turn.namespace)
            self.watched.check_pages()

    def _edit(self, session: int, segments: list[tuple[Role, str]], edit: Edit) -> None:
        text = "".join(PHRASES[number] for number in edit.phrases)
        place = edit.place % len(segments)
        match edit.kind:
            case "append":
                segments.append(("suffix", text))
            case "insert":
                segments.insert(place, (("system", "update", "suffix")[edit.place % 3], text))
            case "replace":
                segments[place] = (segments[place][0], text)
            case "delete" if len(segments) > 1:
                del segments[place]
            case "move":
                segments.insert(edit.place * 3 % len(segments), segments.pop(place))
            case "truncate":
                role, old = segments[place]
                segments[place] = (role, old[: len(old) // 2] or "x")
            case "branch":
                self.segments[(session + 1) % 3] = list(segments)
            case "reply":
                segments.append(("suffix", self.replies[session] or "x"))

    def _compare(self, prompt: Prompt, call: dict[str, Any]) -> None:
        try:
            full = self.watched.logits(prompt, CONTINUATION, policy="recompute", **call)
        except ContextLengthError:
            return
        prefix = self.watched.logits(prompt, CONTINUATION, policy="prefix", **call)
        torch.testing.assert_close(prefix, full, atol=1e-3, rtol=0)
        config = self.engine.config
        for policy, corrects_all in (("head", True), ("slide", config.staleness_bound == 0.0)):
            slid = self.watched.logits(prompt, CONTINUATION, policy=policy, **call)
            if self.watched.corrected_all:
                torch.testing.assert_close(slid, full, atol=1e-3, rtol=0)
            else:
                assert not (corrects_all and config.correction_share == 1.0 and self.watched.had_room)

    def finish(self) -> None:
        for session in ("s0", "s1", None):
            for namespace in "ab":
                self.engine.forget(session, namespace=namespace)
                self.watched.check_pages()
        stats = self.engine.stats()
        assert (stats.free_pages, stats.cached_sequences) == (stats.pool_pages, 0)
        self.engine.close()


def run_script(family: str, config: dict[str, Any], turns: list[Turn]) -> None:
    script = Script(family, config)
    with script.engine:
        for turn in turns:
            script.take(turn)
        script.finish()


@pytest.mark.parametrize("family", [*FAMILIES, "mistral+24"])
def test_every_token_is_what_its_receipt_says_when_sessions_are_edited(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "STEP_TOKENS", 48)  # so that these short prompts take several steps

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(SETTINGS, st.lists(TURNS, min_size=4, max_size=9))
    def check(config: dict[str, Any], turns: list[Turn]) -> None:
        run_script(family, config, turns)

    check()


def test_slid_tokens_move_in_when_they_share_a_page_with_a_continued_sequence() -> None:
    model, config = (
        family_model("llama", None),
        EngineConfig(pool_tokens=2048, min_slide_tokens=4, correction_share=0.0),
    )
    with Engine.from_model(model, tiny_tokenizer(None), config) as engine:
        watched, one = WatchedEngine(engine), SamplingParams(max_tokens=1)
        head, history = "You are a helpful assistant with a memory", PHRASES[1] * 3
        watched.turn(Prompt([Segment.system(head)]), one, session="other")
        watched.turn(Prompt([Segment.update("ab ab. " + history)]), one, session="s")
        output = watched.turn(Prompt([Segment.system(head), Segment.suffix(history + "and?")]), one, session="s")
        assert output.receipt.exact_tokens % 16 and output.receipt.slid_tokens
        borders = [start for start, _, treatment in output.receipt.treatments if treatment == "slid"]
        assert borders[0] // 16 == (output.receipt.exact_tokens - 1) // 16, "both lie in one page"
