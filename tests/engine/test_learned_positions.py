"""Learned positions in whole turns: against transformers at the same position ids, and what a session keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import ConfigError, Engine, EngineConfig, Prompt, Receipt, SamplingParams, Segment
from cacheslide_agents.engine.config import PolicyName
from cacheslide_agents.engine.position.profile_file import ProfileKey
from cacheslide_agents.engine.run import preparation
from cacheslide_agents.engine.slide.assembly import WHOLLY_STALE
from tests.engine.turns import ANSWER, HISTORY, NEW, OLD, QUERY, SYSTEM, latest, tiny_engine
from tests.reference.session_check import WatchedEngine
from tests.tiny import tiny_model, tiny_tokenizer

ONE = SamplingParams(max_tokens=1)
LONGER = "memory: " + "the user has a very long list of things to do. " * 4 + "\n"


def turn(update: str, query: str = QUERY) -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(update), Segment.suffix(HISTORY), Segment.suffix(query)])


def learned_engine(*updates: str, **settings: Any) -> Engine:
    """An engine that has seen updates of these lengths, in a session of its own."""
    engine = tiny_engine(learned_positions=True, **settings)
    observe(engine, *updates)
    return engine


def observe(engine: Engine, *updates: str) -> None:
    book: Any = engine._runner.preparation.positions._book
    for update in updates:
        prompt = turn(update).encode(engine.tokenizer)
        book.observe(ProfileKey("default", None), (prompt.segment_starts[2] - prompt.segment_starts[1],))


def layout_of(engine: Engine, update: str) -> tuple[int, int]:
    """Tokens of system and of update in a turn."""
    starts = turn(update).encode(engine.tokenizer).segment_starts
    return starts[1], starts[2] - starts[1]


def reference_logits(prompt: Prompt, positions: np.ndarray, continuation: list[int]) -> torch.Tensor:
    """Transformers' own forward at explicit position ids; a fresh model, since the engine fuses the one it is given."""
    ids = torch.tensor([prompt.token_ids(tiny_tokenizer(None)) + continuation])
    more = np.arange(positions[-1] + 1, positions[-1] + 1 + len(continuation))
    with torch.inference_mode():
        model: Any = tiny_model("llama")
        logits = model(ids, position_ids=torch.from_numpy(np.concatenate([positions, more]))[None]).logits
    wanted: torch.Tensor = logits[0, -len(continuation) - 1 : -1]
    return wanted


@pytest.mark.parametrize("policy", ["recompute", "slide"])
def test_logits_are_transformers_own_when_positions_leave_a_gap(policy) -> None:
    with learned_engine(NEW, correction_share=1.0, staleness_bound=0.0) as engine:
        engine.generate(turn(OLD), ONE, session="s")
        shorter = OLD.replace(" and likes tea", "")
        system, update = layout_of(engine, shorter)
        reserved = -(-layout_of(engine, NEW)[1] // 16) * 16
        count = len(turn(shorter).token_ids(engine.tokenizer))
        positions = np.concatenate(
            [np.arange(system + update), np.arange(system + reserved, count + reserved - update)]
        )
        continuation = engine.tokenizer.encode(ANSWER, add_special_tokens=False)
        got = engine.logits(turn(shorter), continuation, session="s", policy=policy)
        torch.testing.assert_close(got, reference_logits(turn(shorter), positions, continuation), atol=1e-4, rtol=0)


def test_pages_are_shared_and_nothing_rotated_when_updates_fit_their_range() -> None:
    with learned_engine(NEW, correction_share=0.0) as engine:
        watched = WatchedEngine(engine)
        watched.turn(turn(OLD), ONE, session="s")
        watched.turn(turn(NEW), ONE, session="s")
        third = OLD.replace("tea", "cold black tea")
        output = watched.turn(turn(third), ONE, session="s")
        assert output.receipt.positions == "learned" and output.receipt.positions_reason is None
        assert output.receipt.unused_positions > 0 and output.receipt.slid_tokens > 100
        *_, before, last = watched._sequences()
        assert not last.hops[sum(layout_of(engine, third)) :].any()
        history = len(engine.tokenizer.encode(HISTORY))
        prefix = layout_of(engine, OLD)[0] // 16
        assert len(set(before.table.pages) & set(last.table.pages)) >= history // 16 - 1 + prefix


def test_suffix_moves_once_when_an_update_outgrows_its_range() -> None:
    with learned_engine(OLD) as engine:
        watched = WatchedEngine(engine)
        starts = []
        for update in (OLD, LONGER, LONGER.replace("very ", ""), OLD):
            watched.turn(turn(update), ONE, session="s")
            sequence = watched._sequences()[-1]
            starts.append(int(sequence.positions[sum(layout_of(engine, update))]))
        assert starts[0] < starts[1] == starts[2] == starts[3], "the new range stays"
        assert starts[1] - layout_of(engine, LONGER)[0] >= layout_of(engine, LONGER)[1]


def test_ranges_stay_in_a_session_when_the_profile_grows() -> None:
    with learned_engine(OLD) as engine:
        first = engine.generate(turn(OLD), ONE, session="s").receipt
        observe(engine, *[LONGER] * 20)
        second = engine.generate(turn(OLD, "user: and now?\n"), ONE, session="s").receipt
        other = engine.generate(turn(OLD), ONE, session="other").receipt
        assert first.unused_positions == second.unused_positions < other.unused_positions
        engine.forget("s")
        assert engine.generate(turn(OLD), ONE, session="s").receipt.unused_positions == other.unused_positions


def test_positions_are_contiguous_when_nothing_was_learned_or_nobody_asks() -> None:
    with tiny_engine(learned_positions=True) as engine, tiny_engine() as plain:
        receipt = engine.generate(turn(OLD), ONE, session="s").receipt
        assert receipt.positions == "contiguous" and "observed when" in (receipt.positions_reason or "")
        assert engine.generate(turn(NEW), ONE, session="s").receipt.positions == "learned"
        receipt = engine.generate(turn(OLD), ONE).receipt
        assert receipt.positions == "contiguous" and "without a session" in (receipt.positions_reason or "")
        receipt = plain.generate(turn(OLD), ONE, session="s").receipt
        assert (receipt.positions, receipt.positions_reason, receipt.unused_positions) == ("contiguous", None, 0)


def test_a_first_conversation_stays_exact_when_it_only_grows() -> None:
    with tiny_engine(learned_positions=True) as engine:
        first = engine.generate(turn(OLD), ONE, session="s").receipt
        second = engine.generate(turn(OLD, QUERY + " and now?\n"), ONE, session="s").receipt
        assert second.is_exact and second.positions == "contiguous"
        assert second.exact_tokens >= first.prompt_tokens - 2, "all but the end, which may join what follows it"


def moved_only(policy: PolicyName) -> tuple[Receipt, float]:
    """What a turn without a range takes from a session with one, whose text is the same; and its largest staleness."""
    with learned_engine(OLD, LONGER, share_slid=True, policy=policy) as engine:
        engine.generate(turn(OLD), ONE, session="s")
        receipt = engine.generate(turn(OLD), ONE).receipt
        assert receipt.positions == "contiguous" and receipt.slid_tokens
        return receipt, float(latest(engine).staleness.max())


def test_head_corrects_and_leaves_stale_what_only_moved() -> None:
    receipt, staleness = moved_only("head")
    assert receipt.corrected_tokens and staleness == WHOLLY_STALE


def test_slide_finds_nothing_stale_in_what_only_moved() -> None:
    receipt, staleness = moved_only("slide")
    assert not receipt.corrected_tokens and staleness == 0.0


def test_first_conversation_stays_exact_when_a_prompt_without_its_update_comes_between() -> None:
    with tiny_engine(learned_positions=True) as engine:
        engine.generate(turn(OLD), ONE, session="s")
        receipt = engine.generate(Prompt([Segment.suffix("user: something else\n")]), ONE, session="s").receipt
        assert receipt.positions_reason == "the prompt has no update that anything follows"
        assert engine.generate(turn(OLD, QUERY + " and now?\n"), ONE, session="s").receipt.is_exact


def test_ranges_are_dropped_for_the_session_when_they_no_longer_fit() -> None:
    count = len(turn(OLD).token_ids(tiny_tokenizer(None)))
    with learned_engine(LONGER, max_context_tokens=count + 60) as engine:
        watched = WatchedEngine(engine)
        few = SamplingParams(max_tokens=20, ignore_eos=True)
        output = watched.turn(turn(OLD), few, session="s")
        assert output.receipt.positions == "contiguous" and len(output.token_ids) == 20
        reason = output.receipt.positions_reason or ""
        assert str(count + 60) in reason and "max_context_tokens" in reason and output.receipt.fallback is None
        # Shorter prompts, which would fit, keep contiguous positions; another session has ranges.
        short = Prompt([Segment.system(SYSTEM), Segment.update(OLD), Segment.suffix(HISTORY[:200])])
        assert watched.turn(short, ONE, session="s").receipt.positions_reason == reason
        assert watched.turn(short, ONE, session="t").receipt.positions == "learned"
        assert engine.stats().fallbacks == 0
        full = watched.logits(turn(OLD), ANSWER, session="s", policy="recompute")
        prefix = watched.logits(turn(OLD), ANSWER, session="s", policy="prefix")
        torch.testing.assert_close(prefix, full, atol=1e-4, rtol=0)


def test_answer_has_all_its_room_when_ranges_take_some_of_the_context() -> None:
    count = len(turn(OLD).token_ids(tiny_tokenizer(None)))
    with learned_engine(NEW, max_context_tokens=count + 60) as engine:
        unused = engine.generate(turn(OLD), ONE, session="first").receipt.unused_positions
        assert 0 < unused < 59
        for max_tokens in (1, 60 - unused, 61 - unused, 60, None):
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            receipt = engine.generate(turn(OLD), params, session=f"{max_tokens}").receipt
            assert receipt.generated_tokens == min(max_tokens or 60, 60)
            assert (receipt.positions == "learned") == (max_tokens in (1, 60 - unused))


def test_answer_ends_at_the_last_position_when_its_length_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "ANSWER_TOKENS", 4)
    count = len(turn(OLD).token_ids(tiny_tokenizer(None)))
    with learned_engine(NEW, max_context_tokens=count + 80) as engine:
        receipt = engine.generate(turn(OLD), SamplingParams(max_tokens=None, ignore_eos=True), session="s").receipt
        assert receipt.positions == "learned" and 0 < receipt.unused_positions < 76
        assert receipt.generated_tokens == 80 - receipt.unused_positions


def test_lengths_are_kept_in_the_file_when_the_engine_closes(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    with tiny_engine(learned_positions=True, positions_file=path) as engine:
        engine.generate(turn(OLD), ONE, session="s")
        engine.generate(turn(OLD), ONE, namespace="tenant")
        engine.generate(turn(OLD), ONE, session="s", store=False)
        engine.logits(turn(OLD), ANSWER, session="s")
        length = layout_of(engine, OLD)[1]
        assert engine.stats().requests == 3
    slots = {entry["namespace"]: entry["slots"] for entry in json.loads(path.read_text())["profiles"]}
    assert slots == {"default": [{"lengths": {str(length): 1}}], "tenant": [{"lengths": {str(length): 1}}]}
    with tiny_engine(learned_positions=True, positions_file=path) as engine:
        assert engine.generate(turn(OLD), ONE, session="s").receipt.positions == "learned"


def test_engine_refuses_another_models_file_when_it_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "positions.json"
    with tiny_engine(learned_positions=True, positions_file=path) as engine:
        engine.generate(turn(OLD), ONE)
    config = EngineConfig(learned_positions=True, positions_file=path, pool_tokens=1024)
    with pytest.raises(ConfigError, match="learned with architecture"):
        Engine.from_model(tiny_model("llama", num_hidden_layers=2), tiny_tokenizer(None), config)


def test_settings_are_refused_when_a_file_is_given_without_learned_positions(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="learned_positions=True"):
        EngineConfig(positions_file=tmp_path / "positions.json")
    with pytest.raises(ConfigError, match="positions_quantile"):
        EngineConfig(positions_quantile=0.0)


def test_profile_of_another_namespace_is_not_used_when_a_tenant_asks() -> None:
    with learned_engine(OLD) as engine:
        assert engine.generate(turn(OLD), ONE, session="s", namespace="tenant").receipt.positions == "contiguous"
