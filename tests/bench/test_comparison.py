"""Measurements on a tiny model against figures taken from the engine one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cacheslide_agents.bench.comparison import Comparison
from cacheslide_agents.bench.summary import summarize
from cacheslide_agents.bench.turns import Turns
from cacheslide_agents.bench.variants import REFERENCES, Variant, all_policies, variants
from cacheslide_agents.engine import Prompt, SamplingParams, Segment
from cacheslide_agents.engine.config import PER_REQUEST
from cacheslide_agents.engine.errors import ConfigError, ContextLengthError, PromptError
from tests.engine.turns import ANSWER, HISTORY, NEW, OLD, QUERY, SYSTEM, first_turn, second_turn, tiny_engine

TURNS = Turns("t", first_turn(), second_turn(), answer=ANSWER, old_value="Paris")
WHOLE = {"correction_share": 1.0, "staleness_bound": 0.0}
NONE = {"correction_share": 0.0}
VARIANTS = [
    *variants(["slide", "head"]),
    Variant("none", "slide", NONE),
    Variant("whole", "slide", WHOLE),
    Variant("as head", "slide", {"staleness_bound": 0.0}, computes_like="head"),
]


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def measured(engine):
    return {one.variant: one for one in Comparison(engine, VARIANTS, repeats=2).measure(TURNS)}


def _by_hand(engine, settings):
    """KL, agreement and leak from probabilities in float64, on a cache of its own."""

    def probabilities(continuation, policy):
        logits = engine.logits(second_turn(), continuation, session="by hand", policy=policy).double()
        return torch.softmax(logits, -1).numpy()

    defaults = {name: getattr(engine.config, name) for name in PER_REQUEST}
    engine.adjust(**settings)
    engine.generate(first_turn(), SamplingParams(max_tokens=1), session="by hand", policy="slide")
    full, slid = probabilities(ANSWER, "recompute"), probabilities(ANSWER, "slide")
    kl = float(np.mean([np.sum(p * np.log(p / q)) for p, q in zip(full, slid, strict=True)]))
    leads = np.sort(np.log(full), axis=-1)
    clear = leads[:, -1] - leads[:, -2] > 0.1
    agreeing = int(np.sum((full.argmax(-1) == slid.argmax(-1)) & clear))
    old = engine.tokenizer.encode(" Paris", add_special_tokens=False)
    full, slid = (
        sum(np.log(row[token]) for row, token in zip(probabilities(old, policy), old, strict=True))
        for policy in ("recompute", "slide")
    )
    engine.forget("by hand")
    engine.adjust(**defaults)
    return kl, agreeing, int(clear.sum()), slid - full


@pytest.mark.parametrize(("variant", "settings"), [("slide", {}), ("none", NONE)])
def test_figures_are_those_taken_by_hand_when_slide_is_measured(engine, measured, variant, settings):
    kl, agreeing, clear, leak = _by_hand(engine, settings)
    one = measured[variant]
    assert one.kl == pytest.approx(kl, rel=1e-3, abs=1e-7)
    assert (one.agreeing_tokens, one.clear_tokens) == (agreeing, clear)
    assert one.leak == pytest.approx(leak, abs=1e-4)


def test_divergence_is_zero_when_policies_are_the_same(measured):
    full = measured["recompute"]
    assert (full.kl, full.leak, full.key_cksim) == (0.0, 0.0, 1.0)
    assert full.agreeing_tokens == full.clear_tokens > 0
    assert full.to_full.exact_match == 1.0
    assert full.computed_share == 1.0


def test_divergence_is_rounding_when_every_slid_token_is_corrected(measured):
    assert measured["whole"].kl < 1e-7
    assert measured["whole"].key_cksim == pytest.approx(1.0, abs=1e-5)
    assert measured["none"].kl > 1e-5, "context changed, so uncorrected reuse must differ"
    assert measured["none"].key_cksim < 0.9999
    assert measured["none"].corrected_share == 0.0


def test_as_much_is_computed_when_a_variant_computes_like_another(measured):
    wanted = measured["head"].receipt.computed_tokens
    assert measured["as head"].receipt.computed_tokens == pytest.approx(wanted, abs=1)
    assert measured["as head"].receipt.policy == "slide"
    assert wanted != measured["none"].receipt.computed_tokens


@pytest.mark.parametrize("rotation", range(len(VARIANTS)))
def test_as_much_is_computed_when_runs_slide_only_without_correction(engine, rotation):
    """A line between two changes slides without correction and is computed with them else."""
    kept = "the user was born in a village in the north, far from any town.\n"
    changed = "the user moved to a small house by the sea, likes coffee now, has a dog, a cat and two ponies.\n"
    old = Segment.update(f"{OLD}{kept}the user likes tea.\n")
    new = Segment.update(f"{NEW}{kept}{changed}")
    system, history, query = Segment.system(SYSTEM), Segment.suffix(HISTORY), Segment.suffix(QUERY)
    turns = Turns("t", Prompt([system, old, history]), Prompt([system, new, history, query]), answer=ANSWER)
    comparison = Comparison(engine, VARIANTS)
    comparison._measured = rotation
    receipts = {one.variant: one.receipt for one in comparison.measure(turns)}
    assert receipts["none"].slid_tokens > receipts["slide"].slid_tokens
    assert receipts["as head"].computed_tokens == pytest.approx(receipts["head"].computed_tokens, abs=1)


def test_no_policy_finds_anothers_cache_when_all_are_measured(measured):
    assert measured["recompute"].receipt.exact_tokens == 0
    assert 0 < measured["prefix"].receipt.exact_tokens < measured["prefix"].receipt.prompt_tokens / 4
    assert measured["prefix"].receipt.slid_tokens == 0


def test_settings_and_cache_are_as_before_when_all_is_measured(engine, measured):
    before = engine.config
    free = engine.stats().free_pages
    comparison = Comparison(engine, VARIANTS)
    comparison.warm_up(TURNS)
    comparison.measure(TURNS)
    assert engine.config == before
    stats = engine.stats()
    assert (stats.free_pages, stats.cached_sequences) == (free, 0)


def test_nothing_stays_cached_when_a_prompt_does_not_fit():
    with tiny_engine(max_context_tokens=64) as engine:
        with pytest.raises(ContextLengthError):
            Comparison(engine, variants([])).measure(TURNS)
        assert engine.stats().cached_sequences == 0


@pytest.mark.parametrize(("policies", "pool_tokens"), [(["slide"], 944), (["slide", "epic"], 1408)])
def test_turns_are_refused_when_the_pool_does_not_keep_the_first(policies, pool_tokens):
    with tiny_engine(pool_tokens=pool_tokens, repair=False) as engine:
        comparison = Comparison(engine, variants(policies))
        comparison.warm_up(TURNS)
        with pytest.raises(PromptError, match=rf"the pool of {pool_tokens} tokens .* raise pool_tokens"):
            comparison.measure(TURNS)
        assert engine.stats().cached_sequences == 0


def test_divergence_is_over_the_full_prefills_answer_when_there_is_no_gold_one(engine):
    turns = Turns("t", first_turn(), second_turn())
    ones = Comparison(engine, variants(["slide"]), answer_tokens=6).measure(turns)
    answer = engine.generate(second_turn(), SamplingParams(max_tokens=6), policy="recompute", store=False)
    for one in ones:
        assert one.to_gold is None and one.leak is None
        assert one.receipt.generated_tokens <= 6
    assert ones[0].answer == answer.text
    assert ones[0].clear_tokens <= len(answer.token_ids)


def test_figures_are_the_same_when_the_order_is_another(engine, measured):
    swapped = [VARIANTS[0], *reversed(VARIANTS[1:-1]), VARIANTS[-1]]
    for one in Comparison(engine, swapped).measure(TURNS):
        assert one.kl == pytest.approx(measured[one.variant].kl, rel=1e-4, abs=1e-9)
        assert one.receipt.computed_tokens == measured[one.variant].receipt.computed_tokens


def test_summary_is_the_mean_and_median_of_measurements_when_there_are_several(measured):
    from dataclasses import replace

    others = [
        replace(one, kl=one.kl + 0.3, ttft_seconds=2.0, leak=None, agreeing_tokens=0, clear_tokens=one.clear_tokens * 2)
        for one in measured.values()
    ]
    for summary in summarize("both", [list(measured.values()), others]):
        one = measured[summary.variant]
        assert summary.prompts == 2
        assert summary.mean_kl == pytest.approx(one.kl + 0.15)
        assert summary.median_kl == pytest.approx(one.kl + 0.15)
        assert summary.max_kl == pytest.approx(one.kl + 0.3)
        assert summary.ttft_seconds == pytest.approx((one.ttft_seconds + 2.0) / 2)
        assert summary.of_prefix == pytest.approx((one.ttft_seconds / measured["prefix"].ttft_seconds + 1) / 2)
        assert summary.leak == one.leak
        assert summary.agreement == pytest.approx(one.agreeing_tokens / (3 * one.clear_tokens))


def test_variants_are_all_policies_and_budgets_when_asked_for():
    made = variants(all_policies(), [0.05, 0.2, 0.05])
    assert {variant.policy for variant in made} == set(all_policies())
    assert [variant.name for variant in made if variant.policy == "slide"] == ["slide", "slide 5 %", "slide 20 %"]
    assert [variant.name for variant in made if variant.policy in REFERENCES] == list(REFERENCES)


def test_variant_is_refused_when_its_policy_or_budget_does_not_exist():
    with pytest.raises(ConfigError, match="policy 'slid' does not exist: use one of recompute"):
        variants(["slid"])
    with pytest.raises(ConfigError, match="budget 26: give a share of the slid tokens, from 0 to 1"):
        variants(["slide"], [26])
