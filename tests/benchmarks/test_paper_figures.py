"""Reuse shares of hand-made prompts, similarity of keys on a tiny model, and the raw traces where they are."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from benchmarks import paper_figures, traces
from benchmarks.pictures import reuse_picture, similarity_picture
from tests.engine.turns import tiny_engine
from tests.tiny import tiny_tokenizer

needs_data = pytest.mark.skipif(not os.environ.get("CACHESLIDE_DATA"), reason="needs CACHESLIDE_DATA")


def test_shares_are_those_counted_by_hand_when_the_prompts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer(None)
    # Digits are tokens of their own: 20 stay in front, 30 move behind two new ones, 48 are new at the end.
    start, moved = "1" * 20, "2345678906" * 3
    agents = {"one": lambda: iter([[start + moved, start + "77" + moved + "8" * 48], ["alone"]])}
    monkeypatch.setattr(paper_figures, "AGENTS", agents)
    figures = paper_figures.reuse_shares(tokenizer, None)["one"]
    assert (figures["transitions"], figures["median_tokens"]) == (1, 100)
    assert figures["prefix"] == [0.2]
    assert figures["repeats"] == [0.5]
    assert (figures["prefix_mean"], figures["prefix_variance"]) == (0.2, 0.0)
    assert reuse_picture({"one": figures}).startswith(b"\x89PNG")


@needs_data
def test_rotated_keys_are_alike_when_the_text_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SHIFTS": (0, 64), "SHIFTED_PROMPTS": 1, "SUFFIX_WORDS": 60}.items():
        monkeypatch.setattr(paper_figures, name, value)
    with tiny_engine() as engine:
        figures = paper_figures.key_similarity(engine)
        assert engine.stats().cached_sequences == 0
    assert figures["aligned"][0] == pytest.approx(1.0, abs=1e-5)
    assert figures["unaligned"][0] == pytest.approx(1.0, abs=1e-5)
    assert figures["aligned"][1] > figures["unaligned"][1] + 0.1
    assert similarity_picture(figures).startswith(b"\x89PNG")


@needs_data
@pytest.mark.parametrize("agent", traces.AGENTS)
def test_prompts_follow_one_another_when_a_trace_is_rebuilt(agent: str) -> None:
    prompts = next(found for found in traces.AGENTS[agent]() if len(found) > 1)
    assert all(prompts)
    assert len(set(prompts)) > 1


@needs_data
def test_only_the_last_observations_are_kept_when_an_agent_elides() -> None:
    last = max((prompts[-1] for prompts in traces.swe_agent()), key=len)
    assert traces._STUB in last


@needs_data
def test_prompts_only_grow_when_the_agent_appends() -> None:
    for prompts in traces.tau_airline():
        assert all(later.startswith(earlier) for earlier, later in pairwise(prompts))
