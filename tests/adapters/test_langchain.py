"""`CacheSlideChat` over a tiny random model: answers, settings, streams, cancellation, token counts."""

from __future__ import annotations

import asyncio
import gc
import pickle
import time
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    trim_messages,
)
from langchain_core.runnables import ConfigurableField

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.adapters.errors import UnsupportedFeatureError
from cacheslide_agents.adapters.fields import ModelFields
from cacheslide_agents.engine.config import EngineConfig, SamplingParams
from cacheslide_agents.engine.errors import ConfigError, ContextLengthError, PromptError
from tests.adapters.tiny_llm import tiny_llm, tiny_settings
from tests.tiny import tiny_checkpoint

HISTORY = "The user met Alice in Paris, where she works at a library and likes tea. " * 4


def chat_model(**settings: Any) -> CacheSlideChat:
    return CacheSlideChat(**tiny_settings(**settings))


def turn(memory: str, *history: BaseMessage) -> list[BaseMessage]:
    blocks: list[Any] = [
        {"type": "text", "text": "You are a helpful assistant. "},
        {"type": "text", "text": memory, "cacheslide": "update"},
    ]
    return [SystemMessage(blocks), *history, HumanMessage(HISTORY)]


def receipt(message: BaseMessage) -> dict[str, Any]:
    found: dict[str, Any] = message.response_metadata["cacheslide"]
    return found


def collected(chunks: Any) -> Any:
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def test_fields_and_defaults_are_the_engines_when_listed() -> None:
    defaults = EngineConfig()
    for field in fields(EngineConfig):
        assert ModelFields.model_fields[field.name].default == getattr(defaults, field.name)
    for field in fields(SamplingParams):
        assert ModelFields.model_fields[field.name].default is None


def test_usage_and_receipt_agree_when_a_turn_is_answered() -> None:
    message = chat_model().invoke(turn("Likes tea."))
    usage, account = message.usage_metadata, receipt(message)
    assert usage is not None
    assert usage["input_tokens"] == account["prompt_tokens"]
    assert usage["output_tokens"] == account["generated_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + 8
    details = usage["input_token_details"]
    assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
    assert message.response_metadata["model_name"] == chat_model().model_name
    assert message.response_metadata["finish_reason"] == "length"


def test_suffix_slides_when_the_memory_of_a_thread_changes() -> None:
    chat = chat_model(max_tokens=2)
    config: Any = {"configurable": {"thread_id": "slides"}}
    chat.invoke(turn("Likes tea."), config)
    edited = receipt(chat.invoke(turn("Likes coffee, lives in Rome and sleeps."), config))
    assert edited["session"] == "slides"
    assert edited["slid_tokens"] > 50
    other = receipt(chat.invoke(turn("Likes water and the sea."), {"configurable": {"thread_id": "another"}}))
    assert other["slid_tokens"] == 0


def test_stream_equals_the_whole_answer_when_its_chunks_are_added() -> None:
    chat = chat_model()
    whole = chat.invoke("Tell me of Alice.")
    chunks = list(chat.stream("Tell me of Alice."))
    merged = collected(chunks)
    assert merged.content == whole.content
    assert merged.usage_metadata["output_tokens"] == 8
    assert merged.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]  # type: ignore[index]
    assert merged.response_metadata["model_name"] == whole.response_metadata["model_name"]
    assert merged.response_metadata["cacheslide"]["generated_tokens"] == 8
    assert [chunk.usage_metadata is not None for chunk in chunks].count(True) == 1
    assert chunks[-1].chunk_position == "last"


async def test_async_answers_equal_the_sync_ones_when_awaited() -> None:
    chat = chat_model()
    expected = chat.invoke("Tell me of Alice.").content
    assert (await chat.ainvoke("Tell me of Alice.")).content == expected
    whole = None
    async for chunk in chat.astream("Tell me of Alice."):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.content == expected
    assert whole.usage_metadata is not None


def test_tokens_reach_callbacks_once_when_streamed() -> None:
    class Tokens(BaseCallbackHandler):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def on_llm_new_token(self, token: Any, **_: Any) -> None:
            self.texts.append(token)

    tokens = Tokens()
    whole = collected(chat_model().stream("Tell me of Alice.", {"callbacks": [tokens]}))
    assert "".join(tokens.texts) == whole.content


async def test_event_loop_goes_on_when_an_answer_is_awaited() -> None:
    chat = chat_model(max_tokens=64, ignore_eos=True)
    longest_gap, last = 0.0, time.perf_counter()
    answer = asyncio.create_task(chat.ainvoke(HISTORY))
    num_beats = 0
    while not answer.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest_gap, last = max(longest_gap, now - last), now
        num_beats += 1
    seconds = receipt(answer.result())["total_seconds"]
    assert num_beats >= 10
    assert longest_gap < seconds / 2


async def test_pages_are_freed_when_an_answer_is_cancelled() -> None:
    chat = chat_model(max_tokens=2000, ignore_eos=True, namespace="cancelled")
    task = asyncio.create_task(chat.ainvoke("Go on for ever."))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    started = time.perf_counter()
    assert (await chat.ainvoke("Hi", max_tokens=2)).usage_metadata is not None
    assert time.perf_counter() - started < 5


def test_request_ends_when_a_stream_is_closed() -> None:
    chat = chat_model(max_tokens=2000, ignore_eos=True)
    before = chat.engine.stats().requests
    chunks: Any = chat.stream("Go on for ever.")
    next(chunks)
    chunks.close()
    del chunks
    gc.collect()
    assert chat.invoke("Hi", max_tokens=2).usage_metadata is not None
    assert chat.engine.stats().waiting_requests == 0
    assert chat.engine.stats().requests <= before + 2


@pytest.mark.parametrize(
    "call",
    [
        lambda chat: chat.invoke("Hi", max_tokens=3, policy="recompute"),
        lambda chat: chat.bind(max_tokens=3, policy="recompute").invoke("Hi"),
        lambda chat: chat.configurable_fields(
            max_tokens=ConfigurableField(id="limit"), policy=ConfigurableField(id="how")
        ).invoke("Hi", {"configurable": {"limit": 3, "how": "recompute"}}),
        lambda chat: collected(chat.stream("Hi", max_tokens=3, policy="recompute")),
    ],
    ids=["call", "bind", "configurable", "stream"],
)
def test_settings_hold_when_given_in_any_way(call: Any) -> None:
    account = receipt(call(chat_model()))
    assert account["generated_tokens"] == 3
    assert account["policy"] == "recompute"


def test_chunks_come_one_by_one_when_fields_are_configured() -> None:
    configurable = chat_model().configurable_fields(max_tokens=ConfigurableField(id="limit"))
    assert len(list(configurable.stream("Hi", {"configurable": {"limit": 6}}))) > 2


def test_settings_of_the_constructor_hold_when_a_call_gives_none() -> None:
    account = receipt(chat_model(policy="prefix", max_tokens=2).invoke("Hi"))
    assert (account["policy"], account["generated_tokens"]) == ("prefix", 2)


def test_stop_strings_end_the_answer_when_given_anywhere() -> None:
    whole = chat_model(max_tokens=24).invoke("Tell me.").text
    stop = whole[3:5]
    expected = whole[: whole.index(stop)]
    assert chat_model(max_tokens=24, stop=[stop]).invoke("Tell me.").text == expected
    assert chat_model(max_tokens=24).invoke("Tell me.", stop=[stop]).text == expected
    assert collected(chat_model(max_tokens=24).stream("Tell me.", stop=[stop])).text == expected


def test_answers_repeat_when_a_seed_is_given() -> None:
    chat = chat_model(temperature=1.5)
    assert chat.invoke("Hi", seed=7).content == chat.invoke("Hi", seed=7).content
    assert len({chat.invoke("Hi", seed=seed).text for seed in range(4)}) > 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temprature": 1}, "CacheSlideChat has no setting 'temprature'; it has"),
        ({"timeout": 3}, "CacheSlideChat has no setting 'timeout'"),
        ({"temperature": -1}, "temperature = -1"),
        ({"policy": "fast"}, "policy = 'fast'"),
        ({"stop": [""]}, "stop"),
        ({"device": "tpu"}, "device='tpu' and llm= contradict each other"),
        ({"model": "x"}, "model='x' and llm= contradict each other"),
    ],
)
def test_error_names_the_setting_when_it_is_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chat_model(**settings)


def test_error_names_the_setting_when_a_call_has_a_wrong_one() -> None:
    with pytest.raises(ConfigError, match="a call has no setting 'temprature'; it has max_tokens"):
        chat_model().invoke("Hi", temprature=1)
    with pytest.raises(ConfigError, match="top_p = 2"):
        chat_model().invoke("Hi", top_p=2)
    with pytest.raises(ConfigError, match="policy 'fast' does not exist"):
        chat_model().invoke("Hi", policy="fast")


def test_engine_is_shared_when_the_model_is_rebuilt_or_copied() -> None:
    chat = chat_model()
    bound: Any = chat.bind(stop=["x"]).with_config({"tags": ["a"]})
    copies = [chat_model(policy="prefix", temperature=1.0), deepcopy(chat), chat.model_copy(deep=True), bound.bound]
    assert all(copy.engine is chat.engine for copy in copies)
    assert deepcopy(chat).llm is chat.llm


def test_error_is_clear_when_a_wrapping_model_is_pickled() -> None:
    with pytest.raises(UnsupportedFeatureError, match="name the model with model="):
        pickle.dumps(chat_model())


def test_checkpoint_is_shared_overridden_and_pickled_when_named(tmp_path: Path) -> None:
    folder, other = tiny_checkpoint(tmp_path / "one"), tiny_checkpoint(tmp_path / "two", seed=1)
    settings: Any = {"dtype": "float32", "pool_tokens": 1024, "max_tokens": 4}
    chat = CacheSlideChat(model=str(folder), **settings)
    again = pickle.loads(pickle.dumps(chat))
    assert again.engine is chat.engine is CacheSlideChat(model=folder, **settings).engine
    assert "one" in chat.invoke("Hi").response_metadata["model_name"]
    assert "two" in chat.invoke("Hi", model=str(other)).response_metadata["model_name"]
    chat.close()
    assert chat.invoke("Hi").usage_metadata is not None


def test_error_is_clear_when_a_wrapped_model_is_overridden() -> None:
    with pytest.raises(ConfigError, match="cannot be used with llm="):
        chat_model().invoke("Hi", model="other")


def test_token_count_is_the_usage_when_messages_are_counted() -> None:
    chat = chat_model()
    messages = turn("Likes tea.")
    usage = chat.invoke(messages).usage_metadata
    assert usage is not None
    assert chat.get_num_tokens_from_messages(messages) == usage["input_tokens"]
    assert chat.get_num_tokens("Alice likes tea") == len(chat.get_token_ids("Alice likes tea"))
    assert chat_model(custom_get_token_ids=lambda text: [1] * len(text)).get_num_tokens("abc") == 3


def test_error_when_the_namespace_of_a_call_is_empty() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        chat_model().invoke("Hi", namespace="")


def test_error_when_a_counted_text_has_a_lone_surrogate() -> None:
    with pytest.raises(PromptError, match="surrogate"):
        chat_model().get_num_tokens("a\ud800")


def test_messages_are_counted_when_they_make_no_prompt() -> None:
    chat = chat_model(chat_template="{{ raise_exception('no') }}")
    assert chat.get_num_tokens_from_messages([HumanMessage("Alice")]) == chat.get_num_tokens("Alice")
    with pytest.raises(PromptError, match="refuses this conversation"):
        chat.invoke("Alice")


def test_history_is_trimmed_when_the_model_counts() -> None:
    chat = chat_model()
    history: list[Any] = [HumanMessage(f"Number {number}") for number in range(20)]
    kept = trim_messages(history, max_tokens=120, token_counter=chat, strategy="last")
    assert 0 < len(kept) < 20
    assert chat.get_num_tokens_from_messages(kept) <= 120


def test_profile_states_the_context_when_asked() -> None:
    profile = chat_model().profile
    assert profile is not None
    assert profile["max_input_tokens"] == chat_model().engine.context_tokens - 1
    assert profile["tool_calling"] is False


def test_traces_name_settings_when_asked() -> None:
    params = chat_model(temperature=0.5, stop="x")._get_ls_params(max_tokens=5)
    assert params["ls_provider"] == "cacheslide"
    assert (params["ls_temperature"], params["ls_max_tokens"], params["ls_stop"]) == (0.5, 5, ["x"])


def test_tool_history_is_answered_when_the_template_has_no_tools() -> None:
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "1", "type": "tool_call"}
    messages: list[BaseMessage] = [
        HumanMessage("Is it sunny?"),
        AIMessage("", tool_calls=[call]),
        ToolMessage([{"type": "text", "text": "Sunny"}], tool_call_id="1"),
    ]
    assert chat_model().invoke(messages).usage_metadata is not None


@pytest.mark.parametrize(
    "call",
    [
        lambda chat: chat.bind_tools([]),
        lambda chat: chat.with_structured_output({"title": "x", "type": "object"}),
        lambda chat: chat.invoke("Hi", tools=[{"type": "function"}]),
        lambda chat: chat.get_num_tokens_from_messages([HumanMessage("Hi")], tools=[{"type": "function"}]),
    ],
)
def test_error_names_a_later_release_when_tools_are_wanted(call: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="later release"):
        call(chat_model())


async def test_overflow_is_langchains_own_error_when_the_prompt_is_too_long() -> None:
    chat = chat_model()
    long = "tea and " * 3000
    for error in (ContextOverflowError, ContextLengthError):
        with pytest.raises(error, match="maximum context length"):
            chat.invoke(long)
    with pytest.raises(ContextOverflowError):
        list(chat.stream(long))
    with pytest.raises(ContextOverflowError):
        await chat.ainvoke(long)
    with pytest.raises(ContextOverflowError):
        _ = [chunk async for chunk in chat.astream(long)]


def test_batch_keeps_order_when_run_in_threads() -> None:
    chat = chat_model()
    prompts: list[Any] = [f"Tell me of {name}." for name in ("Alice", "Paris", "tea")]
    answers = chat.batch(prompts)
    assert [answer.content for answer in answers] == [chat.invoke(prompt).content for prompt in prompts]


def test_template_of_the_constructor_is_used_when_given() -> None:
    template = "{% for message in messages %}{{ word + message['content'] }}{% endfor %}"
    chat = chat_model(chat_template=template, template_variables={"word": "Say: "})
    assert receipt(chat.invoke("Hi"))["prompt_tokens"] == chat.get_num_tokens("Say: Hi")


def test_wrapped_settings_hold_when_the_constructor_gives_none() -> None:
    model, tokenizer = tiny_llm()
    model.generation_config.max_new_tokens = 3
    try:
        assert receipt(chat_model(max_tokens=None).invoke("Hi"))["generated_tokens"] == 3
        assert receipt(chat_model(max_tokens=2, llm=(model, tokenizer)).invoke("Hi"))["generated_tokens"] == 2
    finally:
        model.generation_config.max_new_tokens = None
