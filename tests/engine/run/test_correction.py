"""Correction by staleness through a whole engine: what is chosen, what is owed, what is left alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.slide.assembly import WHOLLY_STALE
from tests.engine.turns import latest, staleness_of
from tests.reference.dense_pass import DensePass
from tests.reference.session_check import WatchedEngine
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = Segment.system("You are a helpful assistant with a memory of what the user told you.\n")
OLD = Segment.update("memory: the user lives in Paris and likes tea.\n")
NEW = Segment.update("memory: the user moved to a small house by the sea, likes coffee now, and has a dog.\n")
HISTORY = Segment.suffix("".join(f"user: question number {n}?\nassistant: the answer is {n * 7}.\n" for n in range(12)))
NOTE, OTHER_NOTE = Segment.suffix("note: bread at 80.\n"), Segment.suffix("a note: buy 3 loaves at the market.\n")
LATER = Segment.suffix("".join(f"user: and what of day {n}?\nassistant: it rained on it.\n" for n in range(9)))
QUERY = Segment.suffix("user: what does the memory say?\nassistant:")
ANSWER = " the memory says that the user lives in Paris"
ONE = SamplingParams(max_tokens=1)


def tiny_engine(family: str = "llama", model: dict[str, Any] | None = None, **settings: Any) -> Engine:
    config = EngineConfig(**{"pool_tokens": 8192, "dtype": "float32", **settings})
    return Engine.from_model(tiny_model(family, **(model or {})), tiny_tokenizer(None), config)


@pytest.mark.parametrize("share", [0.02, 0.26, 0.5])
@pytest.mark.parametrize("bound", [0.0, 0.01, 0.05, 0.5])
def test_corrected_tokens_stay_within_the_cap_when_the_update_changes(share: float, bound: float) -> None:
    with tiny_engine(correction_share=share, staleness_bound=bound) as engine:
        watched = WatchedEngine(engine)
        watched.turn(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
        receipt = watched.turn(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt
    cap = math.floor(share * receipt.slid_tokens)
    assert receipt.slid_tokens > 200
    assert receipt.corrected_tokens <= cap
    if bound == 0.0:
        assert receipt.corrected_tokens == cap
    if bound == 0.5:
        assert receipt.corrected_tokens == 0, "less than half of all attention is stale"


def test_fewer_are_corrected_when_more_stale_attention_may_be_left() -> None:
    corrected = []
    for bound in (0.0, 0.005, 0.02, 0.08, 1.0):
        with tiny_engine(correction_share=1.0, staleness_bound=bound) as engine:
            engine.generate(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
            receipt = engine.generate(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt
            corrected.append(receipt.corrected_tokens)
    assert corrected[0] == receipt.slid_tokens > corrected[1] > corrected[2] > corrected[3] >= corrected[4] == 0


def test_less_staleness_is_left_when_more_is_corrected() -> None:
    left = []
    for share in (0.01, 0.1, 0.3, 1.0):
        with tiny_engine(correction_share=share, staleness_bound=0.0) as engine:
            engine.generate(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
            left.append(staleness_of(engine.generate(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt))
    assert left == sorted(left, reverse=True) and left[0] > left[1] > left[2] > left[3] == 0.0


@pytest.mark.parametrize("chunk_tokens", [2048, 48])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_slide_equals_recompute_when_fresh_text_stands_between_slid_runs(family: str, chunk_tokens: int) -> None:
    """Text between two slid runs is computed before anything is corrected, so it must be computed again after."""
    settings: dict[str, Any] = {"correction_share": 1.0, "staleness_bound": 0.0, "prefill_chunk_tokens": chunk_tokens}
    with tiny_engine(family, **settings) as engine:
        watched = WatchedEngine(engine)
        watched.turn(Prompt([SYSTEM, OLD, HISTORY, NOTE, LATER]), ONE, session="s")
        changed = Prompt([SYSTEM, NEW, HISTORY, OTHER_NOTE, LATER, QUERY])
        full = watched.logits(changed, ANSWER, session="s", policy="recompute")
        torch.testing.assert_close(watched.logits(changed, ANSWER, session="s"), full, atol=1e-4, rtol=0)
        receipt = watched.turn(changed, ONE, session="s").receipt
        kinds = [treatment for _, _, treatment in receipt.treatments]
        assert kinds == ["exact", "fresh", "corrected", "fresh", "corrected", "fresh"]
        assert receipt.staleness == 0.0


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_staleness_is_the_change_of_attention_when_an_update_is_replaced(family: str) -> None:
    """The whole account against dense passes in float64: donor, turns of the queries, gone and new keys."""
    with tiny_engine(family, model={"num_hidden_layers": 8}, correction_share=0.003, staleness_bound=0.0) as engine:
        runner: Any = engine._runner
        before, after = Prompt([SYSTEM, OLD, HISTORY]), Prompt([SYSTEM, NEW, HISTORY, QUERY])
        engine.generate(before, ONE, session="s")
        donor = latest(engine)
        receipt = engine.generate(after, ONE, session="s").receipt
        kept = latest(engine)
        slid = np.concatenate([np.arange(start, stop) for start, stop, kind in receipt.treatments if kind == "slid"])
        corrected = [start for start, stop, kind in receipt.treatments if kind == "corrected"]
        assert len(corrected) == 1 and len(slid) == receipt.slid_tokens - 1
        turn = len(after.token_ids(engine.tokenizer)) - engine.count_tokens(QUERY.text) - len(donor)
        same = receipt.exact_tokens
        first = min(slid[0], corrected[0])
        np.testing.assert_array_equal(donor.token_ids[slid - turn], kept.token_ids[slid])
        layers = runner.preparation.queries.layers
        assert len(layers) >= 2
        seen, coming = (DensePass(runner._decoder, each.token_ids) for each in (donor, kept))
        gone, new = np.arange(same, first - turn), np.arange(same, first)
        expected = seen.change(layers, slid - turn, gone, turn, slid, coming, new).clamp_max(1.0)
        none = np.arange(0)
        left = seen.change(layers, slid - turn, gone, turn, slid, coming, none)
        came = seen.change(layers, slid - turn, none, turn, slid, coming, new)
        assert expected.max() > 0.1 and left.max() > 0.05 and came.max() > 0.05
        torch.testing.assert_close(torch.from_numpy(kept.staleness[slid]).double(), expected, rtol=0.03, atol=4e-3)
        assert not kept.staleness[corrected].any()


@pytest.mark.parametrize(
    ("settings", "is_known"),
    [
        ({"policy": "slide"}, True),
        ({"policy": "slide", "correction_share": 0.0}, False),
        ({"policy": "head"}, False),
        ({"policy": "head", "correction_share": 1.0}, True),
        ({"policy": "deviation"}, False),
        ({"policy": "deviation", "deviation_share": 1.0}, True),
        ({"policy": "epic"}, False),
        ({"policy": "cacheblend"}, False),
        ({"policy": "paper"}, False),
        ({"policy": "prefix"}, True),
    ],
)
def test_receipt_says_no_staleness_when_nobody_measured_what_slid(settings: dict[str, Any], is_known: bool) -> None:
    with tiny_engine(**settings) as engine:
        for prompt in (Prompt([SYSTEM, OLD, HISTORY]), Prompt([SYSTEM, NEW, HISTORY, QUERY])):
            receipt = engine.generate(prompt, ONE, session="s").receipt
        assert receipt.is_exact == (settings["policy"] == "prefix")
        assert (receipt.staleness is not None) == is_known
        assert receipt.to_dict()["staleness"] == receipt.staleness


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({"correction_share": 0.0}, 1.0),
        ({"correction_share": 0.2, "policy": "head"}, 0.8),
        ({"deviation_share": 0.2, "policy": "deviation"}, 0.8),
        ({"policy": "paper"}, 1.0),
    ],
)
def test_a_later_turn_corrects_what_an_earlier_one_slid_unmeasured(settings: dict[str, Any], leaves: float) -> None:
    with tiny_engine(correction_share=0.5, staleness_bound=0.0) as engine:
        engine.generate(Prompt([SYSTEM, OLD, HISTORY, QUERY]), ONE, session="s")
        before = engine.config
        engine.adjust(**settings)
        slid = engine.generate(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt.slid_tokens
        owed = latest(engine).staleness
        assert set(np.unique(owed)) == {0.0, WHOLLY_STALE}, "what slid may be all wrong"
        assert owed.sum() == pytest.approx(leaves * slid, abs=1.0)
        engine.adjust(**{name: getattr(before, name) for name in settings})
        receipt = engine.generate(Prompt([SYSTEM, NEW, HISTORY, QUERY, NOTE]), ONE, session="s").receipt
        assert receipt.corrected_tokens > 0 and staleness_of(receipt) < owed.sum() / receipt.slid_tokens


def test_nothing_is_corrected_when_nothing_changed() -> None:
    with tiny_engine() as engine:
        watched = WatchedEngine(engine)
        first = Prompt([SYSTEM, OLD, HISTORY])
        watched.turn(first, ONE, session="s")
        for prompt in (first, Prompt([SYSTEM, OLD, HISTORY, LATER]), Prompt([SYSTEM, OLD, HISTORY, LATER, QUERY])):
            receipt = watched.turn(prompt, ONE, session="s").receipt
            assert (receipt.slid_tokens, receipt.corrected_tokens, receipt.staleness) == (0, 0, 0.0)


def test_debt_stays_when_a_corrected_turn_is_continued_and_nothing_more_is_corrected() -> None:
    with tiny_engine(correction_share=1.0, staleness_bound=0.02) as engine:
        watched = WatchedEngine(engine)
        watched.turn(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
        turn = [SYSTEM, NEW, HISTORY, QUERY]
        before = watched.turn(Prompt(turn), ONE, session="s").receipt
        assert 0 < before.corrected_tokens < before.slid_tokens and latest(engine).staleness.max() > 0.0
        engine.adjust(staleness_bound=1.0)
        after = watched.turn(Prompt([*turn, LATER]), ONE, session="s").receipt
        assert after.slid_tokens > before.slid_tokens and after.corrected_tokens == 0
        owed = staleness_of(before) * before.slid_tokens
        assert staleness_of(after) * after.slid_tokens == pytest.approx(owed, rel=1e-4), "what was owed is still owed"


def test_debt_is_carried_when_later_turns_only_append() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        watched = WatchedEngine(engine)
        watched.turn(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
        turn = [SYSTEM, NEW, HISTORY, QUERY]
        owed = staleness_of(watched.turn(Prompt(turn), ONE, session="s").receipt)
        debts = latest(engine).staleness.copy()
        assert owed > 0.02
        receipt = watched.turn(Prompt([*turn, LATER]), ONE, session="s").receipt
        assert 0.0 < staleness_of(receipt) < owed
        later = latest(engine).staleness[: len(debts)]
        assert ((later == debts) | (later == 0.0)).all() and 0 < (later != debts).sum() == receipt.corrected_tokens


def test_debts_add_up_when_an_update_changes_twice() -> None:
    with tiny_engine(correction_share=0.02) as engine:
        watched = WatchedEngine(engine)
        owed = []
        for update in ("memory: tea.\n", "memory: the user has a dog.\n", "memory: 7 cats at 9.\n"):
            prompt = Prompt([SYSTEM, Segment.update(update), HISTORY])
            owed.append(staleness_of(watched.turn(prompt, ONE, session="s").receipt))
        assert owed[0] == 0.0 < owed[1] < owed[2]


def test_the_donor_stays_as_it_is_when_a_token_in_a_shared_page_is_corrected() -> None:
    """An edit of equal length in a page of its own: what follows slides in place, in the donor's own pages."""
    start = "You are a helpful assistant. "
    with tiny_engine(correction_share=0.05, staleness_bound=0.0) as engine:
        while engine.count_tokens(start) % 16:
            start += "7"
        watched = WatchedEngine(engine)
        prompts = [Prompt([Segment.system(start), Segment.update(16 * digit), HISTORY, QUERY]) for digit in "38"]
        watched.turn(prompts[0], ONE, session="s")
        donor = latest(engine)
        kv, staleness = watched._kv(donor.table, len(donor)), donor.staleness.copy()
        receipt = watched.turn(prompts[1], ONE, session="s").receipt  # also checks that no cached page was written
        assert receipt.fresh_tokens < 32 and 0 < receipt.corrected_tokens < 0.1 * receipt.slid_tokens
        edited = latest(engine)
        assert edited.id != donor.id
        assert torch.equal(watched._kv(donor.table, len(donor)), kv) and (donor.staleness == staleness).all()
        corrected = {
            token // 16
            for begin, end, kind in receipt.treatments
            for token in range(begin, end)
            if kind in ("corrected", "fresh")
        }
        shared = {page for page in range(len(donor) // 16) if donor.table.pages[page] == edited.table.pages[page]}
        assert shared == set(range(len(donor) // 16)) - corrected and len(shared) > 3


def test_exact_text_is_new_to_the_donor_when_it_comes_from_another_session() -> None:
    left = []
    for exact_elsewhere in (False, True):
        with tiny_engine(correction_share=0.003) as engine:
            watched = WatchedEngine(engine)
            if exact_elsewhere:
                watched.turn(Prompt([SYSTEM, NEW, NOTE]), ONE, session="other")
            watched.turn(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
            receipt = watched.turn(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt
            fresh = sum(stop - start for start, stop, kind in receipt.treatments[:2] if kind == "fresh")
            assert (fresh > 10) != exact_elsewhere
            left.append(staleness_of(receipt))
    # Not quite the same: the line end of the update is matched in one case and part of the exact text in the other.
    assert left[1] == pytest.approx(left[0], rel=0.1)


@pytest.mark.parametrize("model", [{"num_hidden_layers": 2}, {"num_key_value_heads": 1}])
def test_heads_are_corrected_when_a_model_leaves_no_room_for_queries(model: dict[str, int]) -> None:
    receipts = []
    for policy in ("head", "slide"):
        with tiny_engine(model=model, policy=policy) as engine:
            assert not engine._runner.preparation.queries.layers
            engine.generate(Prompt([SYSTEM, OLD, HISTORY]), ONE, session="s")
            receipts.append(engine.generate(Prompt([SYSTEM, NEW, HISTORY, QUERY]), ONE, session="s").receipt)
    assert receipts[0].treatments == receipts[1].treatments
    assert receipts[1].policy == "slide" and receipts[1].corrected_tokens > 0


@pytest.mark.real_model
def test_text_that_says_again_what_a_new_line_says_is_corrected_first() -> None:
    said = "Melanie: That's great! I just signed up for a pottery class yesterday. It's like therapy for me.\n"
    talk = "".join(
        f"Caroline: On day {day} we walked along the river and talked about the garden.\n" for day in range(20)
    )
    asked = Segment.suffix("Question: When did Melanie sign up for a pottery class?\nThe answer is")
    old, new = (
        Segment.update(f"<memory>\n- Melanie {line}\n- Caroline likes the river.\n</memory>\n")
        for line in ("values family time and finds it special.", "signed up for a pottery class, which is therapeutic.")
    )
    before, history = Segment.system("You keep a memory block.\n"), Segment.suffix(talk + said + talk)
    with Engine.load(EngineConfig(dtype="float32", pool_tokens=8192, correction_share=0.02)) as engine:
        engine.generate(Prompt([before, old, history]), ONE, session="s")
        prompt = Prompt([before, new, history, asked])
        treatments = engine.generate(prompt, ONE, session="s").receipt.treatments
        start = engine.count_tokens(prompt.text[: prompt.text.index(" signed up for a pottery class yesterday")])
        corrected = {token for first, last, how in treatments if how == "corrected" for token in range(first, last)}
        assert {start, start + 1} <= corrected, "' signed up': what a copying head finds in the new line"
