"""`CacheSlideChat`: a LangChain chat model whose prompts keep the KV cache of earlier turns when they change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput, ModelProfile
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from pydantic import ConfigDict

from cacheslide_agents.engine.arguments import text_ids
from cacheslide_agents.engine.errors import PromptError

from .answers import answer_chunk, answer_result
from .fields import ModelFields
from .messages import from_langchain
from .overflow import known_overflow
from .settings import SAMPLING_SETTINGS, Request, no_tools
from .threads import in_thread, thread_of_call, thread_of_config, with_thread

_LANGCHAIN_SETTINGS = ("stream", "ls_structured_output_format", "structured_output_format")
"""What LangChain itself passes along with a call."""


class CacheSlideChat(ModelFields, BaseChatModel):
    """A local chat model that reuses KV across the turns of an agent.

    Settings are those of `ModelFields`; sampling settings and `policy` may be given here, with a call, through `bind`
    and through `configurable_fields`.

    A conversation is known by its thread: `{"configurable": {"thread_id": …}}` in a call's config, `thread_id` or
    `session_id` in its metadata, `session=` with the call, or `session_id` here. Without one, only exact prefixes are
    reused.

    Attributes:
        streaming: Whether `invoke` streams inside, so that callbacks see every token; None and False do not.
    """

    streaming: bool | None = None

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    if not TYPE_CHECKING:  # type checkers see the fields' own signature

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            if self.profile is None:
                self.profile = self._resolve_model_profile()

    @property
    def _llm_type(self) -> str:
        return "cacheslide"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        settings = self._settings()
        return {
            "model": settings.shared().engine.model_name,
            "policy": self.policy,
            "namespace": self.namespace,
            "chat_template": self.chat_template,
            "template_variables": self.template_variables,
            **asdict(settings.sampling()),
        }

    def _request(
        self, messages: list[BaseMessage], stop: list[str] | None, run_manager: Any, call: dict[str, Any]
    ) -> Request:
        settings = {name: value for name, value in call.items() if name not in _LANGCHAIN_SETTINGS}
        if stop is not None:
            settings["stop"] = stop
        session = thread_of_call(settings.get("session"), run_manager) or self.session_id
        return self._settings().request(from_langchain(messages), session, settings)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = self._request(messages, stop, run_manager, kwargs)
        with known_overflow():
            output = request.shared.engine.generate(**request.arguments())
        return answer_result(output, request.shared.engine.model_name)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = await asyncio.to_thread(self._request, messages, stop, run_manager, kwargs)
        with known_overflow():
            output = await request.shared.engine.agenerate(**request.arguments())
        return answer_result(output, request.shared.engine.model_name)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        request = self._request(messages, stop, run_manager, kwargs)
        engine = request.shared.engine
        pieces: Any = engine.stream(**request.arguments())
        with known_overflow(), closing(pieces):
            for piece in pieces:
                if piece.text or piece.receipt is not None:
                    yield answer_chunk(piece, engine.model_name)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        request = await asyncio.to_thread(self._request, messages, stop, run_manager, kwargs)
        engine = request.shared.engine
        pieces: Any = engine.astream(**request.arguments())
        with known_overflow():
            async with aclosing(pieces):
                async for piece in pieces:
                    if piece.text or piece.receipt is not None:
                        yield answer_chunk(piece, engine.model_name)

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Answers a conversation; the receipt is in `response_metadata["cacheslide"]`."""
        with in_thread(thread_of_config(config)):
            return super().invoke(input, config, stop=stop, **kwargs)

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """`invoke` for asyncio; cancelling the task cancels the request."""
        with in_thread(thread_of_config(config)):
            return await super().ainvoke(input, config, stop=stop, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Answers chunk by chunk; the last one has the usage and the receipt. Closing it cancels the request."""
        thread = thread_of_config(config)
        chunks: Any = super().stream(input, config, stop=stop, **kwargs)
        with closing(chunks):
            while True:
                with in_thread(thread):
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    async def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """`stream` for asyncio."""
        thread = thread_of_config(config)
        chunks: Any = super().astream(input, config, stop=stop, **kwargs)
        async with aclosing(chunks):
            while True:
                with in_thread(thread):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                yield chunk

    def stream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """LangChain's event stream; see `BaseChatModel.stream_events`."""
        return super().stream_events(input, with_thread(config), **kwargs)

    def astream_events(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        """LangChain's event stream for asyncio; see `BaseChatModel.astream_events`."""
        return super().astream_events(input, with_thread(config), **kwargs)

    def get_token_ids(self, text: str) -> list[int]:
        """The token ids of a text with the model's own tokenizer, without special tokens.

        Raises:
            PromptError: The text holds a lone surrogate.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return text_ids(text, self.engine.tokenizer)

    def get_num_tokens(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.get_token_ids(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """The number of tokens of a prompt of these messages, as `usage_metadata["input_tokens"]` will say.

        Messages that make no prompt by themselves, as `trim_messages` asks about, count as their texts.

        Raises:
            UnsupportedFeatureError: Tools are given.
            PromptError: A message holds something that is no text.
        """
        if tools:
            raise no_tools("counting the tokens of tools")
        conversation = from_langchain(messages)
        settings = self._settings()
        shared = settings.shared()
        try:
            return len(settings.render(shared, conversation).encode(shared.engine.tokenizer))
        except PromptError:
            return sum(self.get_num_tokens(message.content) for message in conversation)

    def bind_tools(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses.

        Raises:
            UnsupportedFeatureError: Always.
        """
        raise no_tools("bind_tools")

    def with_structured_output(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses.

        Raises:
            UnsupportedFeatureError: Always.
        """
        raise no_tools("with_structured_output")

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        call = {name: value for name, value in kwargs.items() if name in SAMPLING_SETTINGS}
        params = self._settings().sampling({**call, **({"stop": stop} if stop is not None else {})})
        traced = LangSmithParams(
            ls_provider="cacheslide",
            ls_model_type="chat",
            ls_model_name=str(kwargs.get("model") or self.model_name),
            ls_temperature=params.temperature,
        )
        if params.max_tokens is not None:
            traced["ls_max_tokens"] = params.max_tokens
        if params.stop:
            traced["ls_stop"] = list(params.stop)
        return traced

    def _resolve_model_profile(self) -> ModelProfile | None:
        shared = self._settings().peek()
        if shared is None:
            return None
        return ModelProfile(
            name=shared.engine.model_name,
            max_input_tokens=shared.engine.context_tokens - 1,
            max_output_tokens=shared.engine.context_tokens - 1,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            tool_calling=False,
            structured_output=False,
            temperature=True,
        )
