"""The engine as a whole on a tiny random model: reuse against full recomputation, sessions, cancellation, limits."""

from __future__ import annotations

import pytest
import torch

from cacheslide_agents.engine import Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import (
    ContextLengthError,
)
from tests.engine.turns import ANSWER, FEW, HISTORY, NEW, OLD, QUERY, SYSTEM, first_turn, second_turn, tiny_engine


@pytest.fixture
def engine():
    with tiny_engine() as engine:
        yield engine


class TestReuse:
    def test_prefix_equals_recompute_when_the_update_changes(self, engine):
        engine.generate(first_turn(), FEW, session="s")
        full = engine.logits(second_turn(), ANSWER, session="s", policy="recompute")
        reused = engine.logits(second_turn(), ANSWER, session="s", policy="prefix")
        torch.testing.assert_close(reused, full, atol=1e-3, rtol=0)
        receipt = engine.generate(second_turn(), FEW, session="s", policy="prefix").receipt
        assert 0 < receipt.exact_tokens < receipt.prompt_tokens
        assert receipt.slid_tokens == 0

    @pytest.mark.parametrize("policy", ["head", "slide"])
    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
    def test_slide_equals_recompute_when_every_slid_token_is_corrected(self, family, policy):
        with tiny_engine(family, policy=policy, correction_share=1.0, staleness_bound=0.0) as engine:
            engine.generate(first_turn(), FEW, session="s")
            full = engine.logits(second_turn(), ANSWER, session="s", policy="recompute")
            slid = engine.logits(second_turn(), ANSWER, session="s")
            torch.testing.assert_close(slid, full, atol=1e-4, rtol=0)
            receipt = engine.generate(second_turn(), FEW, session="s").receipt
            assert receipt.corrected_tokens == receipt.slid_tokens > 0

    @pytest.mark.parametrize("policy", ["head", "slide"])
    def test_the_suffix_is_reused_when_the_update_changes_length(self, policy):
        with tiny_engine(policy=policy, correction_share=0.1) as engine:
            engine.generate(first_turn(), FEW, session="s")
            receipt = engine.generate(second_turn(), FEW, session="s").receipt
            history_tokens = engine.count_tokens(HISTORY)
        assert receipt.slid_tokens > 0.9 * history_tokens
        if policy == "head":
            assert receipt.corrected_tokens == pytest.approx(0.1 * receipt.slid_tokens, abs=2)
        else:
            assert 0 < receipt.corrected_tokens <= 0.1 * receipt.slid_tokens + 1
        assert receipt.exact_tokens + receipt.slid_tokens + receipt.fresh_tokens == receipt.prompt_tokens
        assert receipt.cache_read_tokens == receipt.exact_tokens + receipt.slid_tokens - receipt.corrected_tokens

    def test_slid_logits_differ_from_recomputed_ones_when_nothing_is_corrected(self):
        """What slides saw another context, so equal numbers would mean that nothing slid."""
        with tiny_engine(correction_share=0.0) as engine:
            long, short = [Segment.suffix("a" * n + "\n") for n in (40, 24)]
            tail = Segment.suffix(HISTORY)
            engine.generate(Prompt([long, tail]), FEW, session="s")
            slid = engine.logits(Prompt([short, tail]), ANSWER, session="s", policy="slide")
            full = engine.logits(Prompt([short, tail]), ANSWER, session="s", policy="recompute")
            assert not torch.allclose(slid, full, atol=1e-4), "context changed, so uncorrected reuse must differ"

    def test_append_only_conversation_is_exact_when_replies_come_back(self, engine):
        text = SYSTEM
        for turn in range(4):
            text += f"user: question {turn}?\nassistant:"
            prompt = Prompt([Segment.suffix(text)])
            full = engine.logits(prompt, ANSWER, session="s", policy="recompute")
            torch.testing.assert_close(engine.logits(prompt, ANSWER, session="s"), full, atol=1e-3, rtol=0)
            output = engine.generate(prompt, SamplingParams(max_tokens=6), session="s")
            assert output.receipt.slid_tokens == 0
            if turn:
                assert output.receipt.exact_tokens >= 0.5 * output.receipt.prompt_tokens
            text += output.text + "\n"

    def test_a_reply_cut_by_a_stop_string_comes_back_with_its_own_ids(self, engine):
        prompt = Prompt([Segment.suffix("<|im_start|>" + SYSTEM + HISTORY + "<|im_end|>")])
        whole = engine.generate(prompt, SamplingParams(max_tokens=12, ignore_eos=True), session="probe")
        text = engine.tokenizer.decode(whole.token_ids[:6], skip_special_tokens=True)
        stop = engine.tokenizer.decode(whole.token_ids[6:8], skip_special_tokens=True)
        output = engine.generate(
            prompt, SamplingParams(max_tokens=12, ignore_eos=True, stop=stop), session="s", policy="recompute"
        )
        assert output.text and text.startswith(output.text)
        longer = Prompt([*prompt.segments, Segment.suffix(output.text), Segment.suffix("<|im_end|>and then?")])
        receipt = engine.generate(longer, FEW, session="s").receipt
        assert receipt.exact_tokens >= len(prompt.token_ids(engine.tokenizer)) + len(output.token_ids) - 3

    def test_greedy_text_is_identical_when_the_prefix_is_reused(self, engine):
        full = engine.generate(second_turn(), FEW, policy="recompute", namespace="apart")
        engine.generate(first_turn(), FEW, session="s")
        assert engine.generate(second_turn(), FEW, session="s", policy="prefix").token_ids == full.token_ids

    def test_second_identical_prompt_computes_one_token(self, engine):
        engine.generate(first_turn(), FEW, session="s")
        receipt = engine.generate(first_turn(), FEW, session="s").receipt
        assert receipt.computed_tokens == 1

    @pytest.mark.parametrize("policy", ["head", "slide"])
    def test_taint_is_carried_when_a_slid_turn_is_continued(self, engine, policy):
        engine.generate(first_turn(), FEW, session="s", policy=policy)
        output = engine.generate(second_turn(), FEW, session="s", policy=policy)
        longer = Prompt([*second_turn().segments, Segment.suffix(output.text + "\nuser: and now?\nassistant:")])
        receipt = engine.generate(longer, FEW, session="s", policy=policy).receipt
        assert receipt.slid_tokens > 0, "what was computed after a slid token is tainted"
        if policy == "head":
            assert receipt.corrected_tokens == 0, "nothing changed, so nothing is corrected"
        exact = engine.generate(longer, FEW, session="other", policy="prefix").receipt
        assert exact.exact_tokens <= engine.count_tokens(SYSTEM + NEW) + 16, "prefix never reads tainted pages"

    def test_text_equals_recompute_when_every_turn_corrects_what_slid(self):
        with tiny_engine(correction_share=1.0, staleness_bound=0.0) as engine:
            for turn in range(6):
                update = Segment.update("memory: " + "x" * (3 + 5 * turn) + "\n")
                prompt = Prompt([Segment.system(SYSTEM), update, Segment.suffix(HISTORY)])
                output = engine.generate(prompt, FEW, session="s")
            assert output.receipt.slid_tokens > 0
            full = engine.generate(prompt, FEW, policy="recompute", namespace="apart")
            assert output.token_ids == full.token_ids


class TestSeparation:
    def test_slid_donors_stay_in_their_session(self, engine):
        engine.generate(first_turn(), FEW, session="a")
        receipt = engine.generate(second_turn(), FEW, session="b").receipt
        assert receipt.slid_tokens == 0
        assert receipt.exact_tokens > 0

    def test_slid_donors_cross_sessions_when_shared(self):
        with tiny_engine(share_slid=True) as engine:
            engine.generate(first_turn(), FEW, session="a")
            assert engine.generate(second_turn(), FEW, session="b").receipt.slid_tokens > 0

    def test_nothing_crosses_namespaces(self, engine):
        engine.generate(first_turn(), FEW, session="s", namespace="one")
        receipt = engine.generate(first_turn(), FEW, session="s", namespace="two").receipt
        assert receipt.fresh_tokens == receipt.prompt_tokens

    def test_nothing_crosses_templates(self, engine):
        engine.generate(first_turn(), FEW, session="s")
        other = Prompt(first_turn().segments, template="other")
        receipt = engine.generate(other, FEW, session="s").receipt
        assert receipt.fresh_tokens == receipt.prompt_tokens

    def test_branches_are_kept_when_a_turn_is_regenerated(self, engine):
        params = [SamplingParams(max_tokens=40, temperature=1.5, seed=seed, ignore_eos=True) for seed in (1, 2)]
        replies = [engine.generate(first_turn(), one, session="s").text for one in params]
        assert replies[0] != replies[1]
        for reply in replies:
            prompt = Prompt([*first_turn().segments, Segment.suffix(reply + QUERY)])
            receipt = engine.generate(prompt, FEW, session="s").receipt
            assert receipt.exact_tokens > engine.count_tokens(SYSTEM + OLD + HISTORY) - 8, "up to the border"

    def test_a_session_is_gone_when_it_is_forgotten(self, engine):
        engine.generate(first_turn(), FEW, session="s")
        engine.forget("s")
        assert len(engine._runner.preparation.replies) == 0
        assert engine.stats().cached_sequences == 0
        assert engine.stats().free_pages == engine.stats().pool_pages


class TestLimits:
    def test_error_gives_numbers_when_the_prompt_is_too_long(self):
        with (
            tiny_engine(max_context_tokens=64) as engine,
            pytest.raises(ContextLengthError, match=r"\d+ tokens.*maximum context length is 64"),
        ):
            engine.generate(first_turn(), FEW)

    def test_max_tokens_is_clamped_when_the_room_is_short(self):
        with tiny_engine(max_context_tokens=64) as engine:
            output = engine.generate(
                Prompt([Segment.suffix("hello there")]), SamplingParams(max_tokens=1000, ignore_eos=True)
            )
            assert output.finish_reason == "length"
            assert output.receipt.prompt_tokens + output.receipt.generated_tokens <= 64

    def test_pool_evicts_the_least_recently_used_when_it_is_full(self):
        with tiny_engine(pool_tokens=1600) as engine:
            for number in range(12):
                prompt = Prompt([Segment.system(f"{number} "), *first_turn().segments])
                engine.generate(prompt, FEW, session=f"s{number}")
            stats = engine.stats()
            assert stats.evicted_sequences > 0
            receipt = engine.generate(prompt, FEW, session="s11").receipt
            assert receipt.computed_tokens == 1, "the most recent one is still there"

    @pytest.mark.parametrize("policy", ["head", "slide"])
    def test_reuse_falls_back_when_donor_and_prompt_do_not_fit(self, policy):
        with tiny_engine() as probe:
            tokens = len(second_turn().token_ids(probe.tokenizer))
        with tiny_engine(pool_tokens=tokens + 64) as engine:
            engine.generate(first_turn(), FEW, session="s")
            receipt = engine.generate(second_turn(), FEW, session="s", policy=policy).receipt
            assert receipt.policy == policy
            assert receipt.fallback is not None and "pool_tokens" in receipt.fallback
            assert receipt.slid_tokens == 0

    def test_no_page_is_lost_over_many_requests(self, engine):
        for number in range(6):
            prompt = second_turn() if number % 2 else first_turn()
            engine.generate(prompt, FEW, session=f"s{number % 3}")
            engine.logits(prompt, ANSWER, session="s0")
        for session in ("s0", "s1", "s2"):
            engine.forget(session)
        assert engine.stats().free_pages == engine.stats().pool_pages

    def test_logits_store_nothing(self, engine):
        before = engine.stats()
        engine.logits(first_turn(), ANSWER, session="s")
        after = engine.stats()
        assert (after.cached_sequences, after.free_pages) == (before.cached_sequences, before.free_pages)

    def test_logits_are_those_of_the_model_itself(self):
        with tiny_engine() as engine:
            prompt_ids = first_turn().token_ids(engine.tokenizer)
            answer_ids = engine.tokenizer.encode(ANSWER, add_special_tokens=False)
            with torch.inference_mode():
                own = engine.model(torch.tensor([prompt_ids + answer_ids])).logits[0]
            expected = own[len(prompt_ids) - 1 : -1]
            torch.testing.assert_close(engine.logits(first_turn(), ANSWER), expected.float(), atol=1e-4, rtol=0)

    def test_chunked_prefill_equals_one_piece(self):
        with tiny_engine() as whole, tiny_engine(prefill_chunk_tokens=37) as chunked:
            for engine in (whole, chunked):
                engine.generate(first_turn(), FEW, session="s")
            torch.testing.assert_close(
                chunked.logits(second_turn(), ANSWER, session="s"),
                whole.logits(second_turn(), ANSWER, session="s"),
                atol=1e-4,
                rtol=0,
            )
