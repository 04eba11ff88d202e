"""Calls to an engine: what is refused, streaming, threads and event loops, cancellation, closing."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from cacheslide_agents.engine import Engine, EngineConfig, Prompt, SamplingParams, Segment
from cacheslide_agents.engine.errors import (
    ConfigError,
    EngineClosedError,
    PromptError,
    RequestCancelledError,
)
from cacheslide_agents.engine.run.sequence import RunningSequence
from cacheslide_agents.engine.slide.assembly import Assembly
from tests.engine.turns import FEW, first_turn, second_turn, tiny_engine
from tests.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def engine():
    with tiny_engine() as engine:
        yield engine


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
        engine._runner.preparation.index.evict(engine.stats().pool_pages)
        engine.forget("s")
        assert len(engine._runner.preparation.replies) == 0

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
        assert not any(sequence.pins for sequence in engine._runner.preparation.index.by_recency())

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
