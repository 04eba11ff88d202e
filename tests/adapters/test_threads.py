"""The thread id reaches the engine from every place where people put it, and from no other call's."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

from cacheslide_agents.adapters import CacheSlideChat
from tests.adapters.tiny_llm import tiny_settings

CONFIG: Any = {"configurable": {"thread_id": "a"}}
IN_METADATA: Any = {"metadata": {"thread_id": "a"}}
SESSION_IN_METADATA: Any = {"metadata": {"session_id": "a"}}
SESSION: Any = {"configurable": {"session_id": "a"}}
NUMBER: Any = {"configurable": {"thread_id": 7}}


@pytest.fixture(name="chat")
def _chat() -> CacheSlideChat:
    return CacheSlideChat(**tiny_settings(max_tokens=2))


def session_of(message: BaseMessage) -> str | None:
    session: str | None = message.response_metadata["cacheslide"]["session"]
    return session


def last(chunks: Any) -> Any:
    return list(chunks)[-1]


async def alast(chunks: Any) -> Any:
    return [chunk async for chunk in chunks][-1]


@pytest.mark.parametrize("config", [CONFIG, IN_METADATA, SESSION_IN_METADATA, SESSION], ids=str)
async def test_thread_is_known_when_a_plain_call_names_it(chat: CacheSlideChat, config: Any) -> None:
    assert session_of(chat.invoke("Hi", config)) == "a"
    assert session_of(last(chat.stream("Hi", config))) == "a"
    assert session_of(await chat.ainvoke("Hi", config)) == "a"
    assert session_of(await alast(chat.astream("Hi", config))) == "a"


async def test_thread_is_known_when_batched_bound_or_configured(chat: CacheSlideChat) -> None:
    other: Any = {"configurable": {"thread_id": "b"}}
    assert [session_of(answer) for answer in chat.batch(["Hi", "Ho"], [CONFIG, other])] == ["a", "b"]
    assert [session_of(answer) for answer in await chat.abatch(["Hi", "Ho"], [CONFIG, other])] == ["a", "b"]
    assert session_of(chat.bind(stop=["x"]).invoke("Hi", CONFIG)) == "a"
    assert session_of(chat.with_config(CONFIG).invoke("Hi")) == "a"
    assert session_of(chat.with_retry().invoke("Hi", CONFIG)) == "a"


async def test_thread_is_known_when_the_model_runs_in_a_sequence(chat: CacheSlideChat) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | chat
    assert session_of(chain.invoke({"text": "Hi"}, CONFIG)) == "a"
    assert session_of(last(chain.stream({"text": "Hi"}, CONFIG))) == "a"
    assert session_of(await chain.ainvoke({"text": "Hi"}, CONFIG)) == "a"
    nested: Any = RunnableLambda(lambda text: chat.invoke(text))
    assert session_of(nested.invoke("Hi", CONFIG)) == "a"


async def test_thread_is_known_when_events_are_streamed(chat: CacheSlideChat) -> None:
    ends = [
        event["data"]["output"]
        async for event in chat.astream_events("Hi", CONFIG, version="v2")
        if event["event"] == "on_chat_model_end"
    ]
    assert [session_of(message) for message in ends] == ["a"]
    assert session_of(chat.stream_events("Hi", CONFIG, version="v3").output) == "a"


def test_thread_is_known_when_langgraph_runs_the_model(chat: CacheSlideChat) -> None:
    graph_module = pytest.importorskip("langgraph.graph")
    graph = graph_module.StateGraph(graph_module.MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_edge(graph_module.START, "model")
    state = graph.compile().invoke({"messages": [("human", "Hi")]}, CONFIG)
    assert session_of(state["messages"][-1]) == "a"


def test_argument_wins_when_several_name_a_thread(chat: CacheSlideChat) -> None:
    named = CacheSlideChat(**tiny_settings(max_tokens=2, session_id="own"))
    assert session_of(named.invoke("Hi")) == "own"
    assert session_of(named.invoke("Hi", CONFIG)) == "a"
    assert session_of(named.invoke("Hi", CONFIG, session="given")) == "given"
    assert session_of(chat.invoke("Hi", NUMBER)) == "7"
    assert session_of(chat.invoke("Hi")) is None


def test_threads_stay_apart_when_streams_take_turns(chat: CacheSlideChat) -> None:
    streams = [chat.stream("Hi", {"configurable": {"thread_id": name}}) for name in "ab"]
    chunks: list[list[Any]] = [[], []]
    for _ in range(8):
        for place, stream in enumerate(streams):
            if (chunk := next(stream, None)) is not None:
                chunks[place].append(chunk)
            assert session_of(chat.invoke("Ho")) is None
    assert [session_of(received[-1]) for received in chunks] == ["a", "b"]
