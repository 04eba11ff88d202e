"""The engine as a whole on a tiny random model: reuse against full recomputation, sessions, cancellation, limits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import (
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    PromptError,
    RequestCancelledError,
)
from cacheslide_agents.engine.run.sequence import RunningSequence
from cacheslide_agents.engine.slide.assembly import Assembly
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = "You are a helpful assistant with a memory of what the user told you.\n"
OLD = "memory: the user lives in Paris and likes tea.\n"
NEW = "memory: the user moved to a small house by the sea, likes coffee now, and has a dog.\n"
HISTORY = "".join(f"user: question number {n}?\nassistant: the answer is {n * 7}.\n" for n in range(12))
QUERY = "user: what does the memory say?\nassistant:"
ANSWER = " the memory says that the user lives in Paris"


def first_turn() -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(OLD), Segment.suffix(HISTORY)])


def second_turn() -> Prompt:
    return Prompt([Segment.system(SYSTEM), Segment.update(NEW), Segment.suffix(HISTORY), Segment.suffix(QUERY)])


def tiny_engine(family: str = "llama", **settings) -> Engine:
    settings = {"pool_tokens": 8192, "dtype": "float32", **settings}
    return Engine.from_model(tiny_model(family), tiny_tokenizer(None), EngineConfig(**settings))


@pytest.fixture
def engine():
    with tiny_engine() as engine:
        yield engine


FEW = SamplingParams(max_tokens=8, ignore_eos=True)


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
        assert len(engine._runner._replies) == 0
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


class TestBadInput:
    def test_error_when_the_prompt_is_empty(self):
        with pytest.raises(PromptError, match="empty"):
            Prompt([])
        with pytest.raises(PromptError, match="empty"):
            Prompt([Segment.system("")])

    def test_error_when_the_role_does_not_exist(self):
        with pytest.raises(PromptError, match="system, update, suffix"):
            Segment("footer", "text")  # type: ignore[arg-type]

    def test_error_when_a_setting_is_unknown(self):
        with pytest.raises(ConfigError, match="corection_share"):
            EngineConfig(corection_share=0.1)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="temprature"):
            SamplingParams(temprature=1)  # type: ignore[call-arg]

    def test_error_when_the_policy_does_not_exist(self, engine):
        with pytest.raises(ConfigError, match=r"'magic' does not exist.*slide"):
            engine.generate(first_turn(), policy="magic")

    def test_control_characters_are_served_or_refused_clearly(self, engine):
        output = engine.generate(Prompt([Segment.suffix("".join(map(chr, range(1, 32))))]), FEW)
        assert output.finish_reason == "length"
        with pytest.raises(PromptError):
            engine.generate(Prompt([Segment.suffix("\ud800")]), FEW)

    def test_replies_are_gone_when_a_session_is_forgotten_after_its_pages_were_evicted(self, engine):
        engine.generate(first_turn(), FEW, session="s")
        engine._runner.index.evict(engine.stats().pool_pages)
        engine.forget("s")
        assert len(engine._runner._replies) == 0

    @pytest.mark.parametrize("token_id", [-1, 384, 10**6])
    def test_error_when_a_token_id_is_not_the_models(self, engine, token_id):
        with pytest.raises(PromptError, match=rf"{token_id} is not one of the model's 384"):
            engine.logits(first_turn(), [5, token_id])
        assert engine.stats().free_pages == engine.stats().pool_pages

    def test_error_when_the_tokenizer_has_more_tokens_than_the_model(self):
        tokenizer = tiny_tokenizer(None)
        tokenizer.add_tokens(["unheard-of"])
        with (
            Engine.from_model(tiny_model(), tokenizer, EngineConfig(pool_tokens=256)) as engine,
            pytest.raises(PromptError, match="tokenizer that belongs to the model"),
        ):
            engine.generate(Prompt([Segment.suffix("an unheard-of word")]), FEW)

    def test_error_when_the_continuation_is_empty(self, engine):
        with pytest.raises(PromptError, match="continuation"):
            engine.logits(first_turn(), "")


class TestRequests:
    def test_streamed_text_equals_the_whole_answer(self, engine):
        whole = engine.generate(first_turn(), FEW)
        pieces = list(engine.stream(first_turn(), FEW))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [piece.receipt is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    def test_pages_are_free_when_a_stream_is_closed_early(self, engine):
        stream = engine.stream(first_turn(), SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        stream.close()
        assert engine.stats().free_pages == engine.stats().pool_pages
        engine.generate(first_turn(), FEW)

    def test_queued_call_ends_at_once_when_it_is_cancelled(self, engine):
        running = engine.stream(first_turn(), SamplingParams(max_tokens=1500, ignore_eos=True))
        next(running)

        async def queued() -> None:
            task = asyncio.create_task(engine.agenerate(second_turn(), FEW))
            await asyncio.sleep(0.05)
            assert engine.stats().waiting_requests == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.stats().waiting_requests == 0

        asyncio.run(queued())
        running.close()

    def test_answers_stay_apart_when_threads_call_at_once(self, engine):
        prompts = [Prompt([Segment.system(f"{n} {n} {n}\n"), *first_turn().segments]) for n in range(6)]
        expected = [engine.generate(prompt, FEW, policy="recompute").token_ids for prompt in prompts]
        answers: dict[int, tuple[int, ...]] = {}

        def call(number: int) -> None:
            answers[number] = engine.generate(prompts[number], FEW, session=f"t{number}").token_ids

        threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[number] for number in range(6)] == expected

    async def test_event_loop_stays_free_while_an_answer_is_generated(self, engine):
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        output = await engine.agenerate(first_turn(), SamplingParams(max_tokens=60, ignore_eos=True))
        ticker.cancel()
        assert output.receipt.generated_tokens == 60
        assert ticks > 5

    def test_running_and_waiting_calls_end_when_the_engine_is_closed(self):
        engine = tiny_engine()
        running = engine.stream(first_turn(), SamplingParams(max_tokens=1500, ignore_eos=True))
        next(running)
        errors: list[BaseException] = []

        def wait() -> None:
            with pytest.raises(RequestCancelledError) as caught:
                engine.generate(second_turn(), SamplingParams(max_tokens=1500, ignore_eos=True))
            errors.append(caught.value)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not engine.stats().waiting_requests:
            time.sleep(0.001)
        engine.close()
        waiting.join()
        assert len(errors) == 1
        with pytest.raises(RequestCancelledError):
            list(running)
        assert engine.stats().free_pages == engine.stats().pool_pages

    @pytest.mark.parametrize("failing", ["layer", "append"])
    def test_no_page_and_no_pin_is_kept_when_the_model_fails(self, engine, monkeypatch, failing):
        engine.generate(first_turn(), FEW, session="s")
        before = engine.stats()
        calls = 0

        def fail(*_: object) -> None:
            nonlocal calls
            calls += 1
            if failing == "append" or calls == 3:
                raise MemoryError("no room")

        if failing == "layer":
            monkeypatch.setattr(Assembly, "slide", fail)
        else:
            monkeypatch.setattr(RunningSequence, "append", fail)
        with pytest.raises(MemoryError):
            engine.generate(second_turn(), FEW, session="s")
        monkeypatch.undo()
        after = engine.stats()
        assert (after.free_pages, after.cached_sequences) == (before.free_pages, before.cached_sequences)
        assert engine._runner.index.stats().pinned == 0

    def test_error_when_the_engine_is_closed(self):
        engine = tiny_engine()
        engine.close()
        engine.close()
        with pytest.raises(EngineClosedError):
            engine.generate(first_turn(), FEW)

    def test_wrapped_model_still_runs_by_itself(self):
        model, ids = tiny_model("llama"), torch.tensor([[5, 6, 7, 8]])
        with torch.inference_mode():
            before = model(ids).logits
            with Engine.from_model(model, tiny_tokenizer(None), EngineConfig(pool_tokens=256)):
                torch.testing.assert_close(model(ids).logits, before)
