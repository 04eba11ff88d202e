"""What comparing policies needs of an engine: answers that store nothing and settings that change while it lives."""

from __future__ import annotations

import threading

import pytest
import torch

from cacheslide_agents.engine.errors import ConfigError, PromptError
from tests.engine.turns import ANSWER, FEW, first_turn, second_turn, tiny_engine


@pytest.fixture
def engine():
    with tiny_engine(staleness_bound=0.0) as engine:
        engine.generate(first_turn(), FEW, session="s")
        yield engine


def _tokens(engine, **settings):
    receipt = engine.generate(second_turn(), FEW, session="s", **settings).receipt
    return receipt.exact_tokens, receipt.slid_tokens, receipt.corrected_tokens, receipt.fresh_tokens


@pytest.mark.parametrize("policy", ["recompute", "prefix", "head", "slide"])
def test_nothing_changes_for_later_requests_when_an_answer_is_not_stored(engine, policy):
    before = engine.stats()
    tokens = [_tokens(engine, policy=policy, store=False) for _ in range(2)]
    after = engine.stats()
    assert tokens[0] == tokens[1]
    assert (after.free_pages, after.cached_sequences) == (before.free_pages, before.cached_sequences)
    assert after.requests == before.requests + 2


def test_later_requests_reuse_more_when_an_answer_is_stored(engine):
    fresh_tokens = [_tokens(engine, policy="slide")[-1] for _ in range(2)]
    assert fresh_tokens[1] < fresh_tokens[0]


def test_more_is_corrected_when_the_share_is_raised(engine):
    _, slid, few, _ = _tokens(engine, store=False)
    engine.adjust(correction_share=0.5)
    _, slid_still, many, _ = _tokens(engine, store=False)
    assert slid_still == slid, "what was cached is still there"
    assert few < many == pytest.approx(0.5 * slid, abs=1)
    assert engine.config.correction_share == 0.5


def test_the_setting_is_refused_when_it_cannot_change_or_does_not_fit(engine):
    with pytest.raises(ConfigError, match="pool_tokens cannot change while an engine lives"):
        engine.adjust(pool_tokens=64, correction_share=0.5)
    with pytest.raises(ConfigError, match=r"correction_share = 2.*from 0"):
        engine.adjust(correction_share=2)
    assert engine.config.correction_share == 0.15


def test_both_settings_change_when_two_threads_adjust_at_once(engine):
    hold = threading.Event()
    engine._scheduler.submit(hold.wait)
    changes = ({"correction_share": 0.5}, {"max_hops": 3}, {"min_slide_tokens": 5})
    threads = [threading.Thread(target=engine.adjust, kwargs=change) for change in changes]
    for count, thread in enumerate(threads):
        thread.start()
        while engine._scheduler.waiting <= count:
            pass
    hold.set()
    for thread in threads:
        thread.join()
    config = engine.config
    assert config is engine._runner.preparation.config
    assert (config.correction_share, config.max_hops, config.min_slide_tokens) == (0.5, 3, 5)


@pytest.mark.parametrize("policy", ["recompute", "prefix", "head", "slide", "deviation"])
def test_a_trace_has_the_logits_of_each_continuation_when_there_are_several(engine, policy):
    before = engine.stats()
    continuations = [[17], ANSWER, [20, 21, 22], ANSWER + ", or so they say"]
    trace = engine.trace(second_turn(), *continuations, session="s", policy=policy)
    for logits, continuation in zip(trace.logits, continuations, strict=True):
        alone = engine.logits(second_turn(), continuation, session="s", policy=policy)
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)
    assert engine.stats() == before


def test_a_trace_has_the_keys_and_values_of_the_prompt_when_nothing_follows(engine):
    spec = engine._runner.preparation.forward.decoder.spec
    tokens = len(second_turn().token_ids(engine.tokenizer))
    alone = engine.trace(second_turn(), session="s")
    assert alone.logits == ()
    assert alone.keys_values.shape == (spec.num_layers, tokens, 2 * spec.num_kv_heads, spec.head_dim)
    followed = engine.trace(second_turn(), ANSWER, [17], session="s")
    torch.testing.assert_close(followed.keys_values, alone.keys_values, atol=1e-5, rtol=0)


def test_a_trace_is_refused_when_a_continuation_is_empty_or_no_token(engine):
    before = engine.stats()
    with pytest.raises(PromptError, match="the continuation is empty"):
        engine.trace(second_turn(), ANSWER, [], session="s")
    with pytest.raises(PromptError, match="token id 99999999 is not one of"):
        engine.trace(second_turn(), ANSWER, [99999999], session="s")
    assert engine.stats() == before
