"""`CacheSlideLLM`: a LlamaIndex LLM whose prompts keep the KV cache of earlier turns when they change."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Any

try:
    from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
except ModuleNotFoundError as error:
    raise ImportError("CacheSlideLLM needs llama-index-core: pip install 'cacheslide-agents[llamaindex]'") from error
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.custom import CustomLLM
from pydantic import ConfigDict

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.engine.receipt import Receipt
from cacheslide_agents.engine.segments import Prompt, Segment
from cacheslide_agents.templates.messages import STABLE_TAG, TAG, TextPart, ToolCall
from cacheslide_agents.templates.messages import ChatMessage as Message
from cacheslide_agents.templates.messages import MessageRole as Role

from .fields import ModelFields
from .settings import Request

_ROLES: dict[MessageRole, Role] = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}


class CacheSlideLLM(ModelFields, CustomLLM):
    """A local LLM that reuses KV across the turns of an agent.

    Settings are those of `ModelFields`; sampling settings, `policy` and `session` may also be given with a call.
    `chat` goes through the model's chat template (or `messages_to_prompt`, if one is given), `complete` continues a
    text as it is. Usage is in `raw["usage"]`, the receipt in `raw["cacheslide"]`.

    A `CachePoint` says that what is rewritten between turns comes after it; `additional_kwargs={"cacheslide": role}` of
    a message tags all its text.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex serializes the class."""
        return "CacheSlideLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex asks of a model."""
        settings = self._settings()
        engine = settings.shared().engine
        return LLMMetadata(
            context_window=engine.context_tokens,
            num_output=min(settings.sampling().max_tokens or engine.context_tokens, engine.context_tokens),
            is_chat_model=True,
            is_function_calling_model=False,
            model_name=engine.model_name,
        )

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answers a conversation."""
        request = self._chat_request(messages, kwargs)
        output = request.shared.engine.generate(**request.arguments())
        return _chat_response(output.text, None, output.receipt, request)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Generator[ChatResponse, None, None]:
        """Answers piece by piece; the last response has the usage. Closing the generator cancels the request."""
        request = self._chat_request(messages, kwargs)

        def responses() -> Generator[ChatResponse, None, None]:
            text = ""
            pieces: Any = request.shared.engine.stream(**request.arguments())
            with closing(pieces):
                for piece in pieces:
                    text += piece.text
                    yield _chat_response(text, piece.text, piece.receipt, request)

        return responses()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """`chat` for asyncio; cancelling the task cancels the request."""
        request = await asyncio.to_thread(self._chat_request, messages, kwargs)
        output = await request.shared.engine.agenerate(**request.arguments())
        return _chat_response(output.text, None, output.receipt, request)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        """`stream_chat` for asyncio."""
        request = await asyncio.to_thread(self._chat_request, messages, kwargs)

        async def responses() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            pieces: Any = request.shared.engine.astream(**request.arguments())
            async with aclosing(pieces):
                async for piece in pieces:
                    text += piece.text
                    yield _chat_response(text, piece.text, piece.receipt, request)

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continues a text."""
        request = self._completion_request(prompt, formatted, kwargs)
        output = request.shared.engine.generate(**request.arguments())
        return _completion_response(output.text, None, output.receipt, request)

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[CompletionResponse, None, None]:
        """Continues a text piece by piece; the last response has the usage."""
        request = self._completion_request(prompt, formatted, kwargs)

        def responses() -> Generator[CompletionResponse, None, None]:
            text = ""
            pieces: Any = request.shared.engine.stream(**request.arguments())
            with closing(pieces):
                for piece in pieces:
                    text += piece.text
                    yield _completion_response(text, piece.text, piece.receipt, request)

        return responses()

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """`complete` for asyncio; cancelling the task cancels the request."""
        request = await asyncio.to_thread(self._completion_request, prompt, formatted, kwargs)
        output = await request.shared.engine.agenerate(**request.arguments())
        return _completion_response(output.text, None, output.receipt, request)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        """`stream_complete` for asyncio."""
        request = await asyncio.to_thread(self._completion_request, prompt, formatted, kwargs)

        async def responses() -> AsyncGenerator[CompletionResponse, None]:
            text = ""
            pieces: Any = request.shared.engine.astream(**request.arguments())
            async with aclosing(pieces):
                async for piece in pieces:
                    text += piece.text
                    yield _completion_response(text, piece.text, piece.receipt, request)

        return responses()

    def _chat_request(self, messages: Sequence[ChatMessage], call: dict[str, Any]) -> Request:
        if self.messages_to_prompt in (None, generic_messages_to_prompt):
            return self._request(from_llama_index(messages), call)
        return self._request(Prompt([Segment.suffix(self.messages_to_prompt(messages))]), call)

    def _completion_request(self, prompt: str, formatted: bool, call: dict[str, Any]) -> Request:
        text = prompt if formatted or self.completion_to_prompt is None else self.completion_to_prompt(prompt)
        return self._request(Prompt([Segment.suffix(text)]), call)

    def _request(self, what: list[Message] | Prompt, call: dict[str, Any]) -> Request:
        session = call.get("session")
        return self._settings().request(what, self.session_id if session is None else str(session), call)


def from_llama_index(messages: Sequence[ChatMessage]) -> list[Message]:
    """LlamaIndex messages as chat messages; text blocks are joined by line breaks, as `ChatMessage.content` does.

    Raises:
        PromptError: A message holds a block that is no text, or a tag that does not exist.
    """
    return [_from_message(idx, message) for idx, message in enumerate(messages)]


def _from_message(idx: int, message: ChatMessage) -> Message:
    parts: list[TextPart] = []
    calls: list[ToolCall] = []
    tag = message.additional_kwargs.get(TAG)
    for block in message.blocks:
        if isinstance(block, TextBlock):
            parts.append(TextPart.from_block({"text": f"\n{block.text}" if parts else block.text, TAG: tag}))
        elif isinstance(block, CachePoint):
            if parts:
                parts[-1] = TextPart.from_block({**parts[-1].to_block(), STABLE_TAG: block.cache_control.type})
        elif isinstance(block, ToolCallBlock):
            calls.append(ToolCall(block.tool_name, _arguments(block.tool_kwargs), block.tool_call_id))
        elif not isinstance(block, ThinkingBlock):
            raise PromptError(
                f"message {idx} ({message.role.value}) has a block of type {block.block_type!r}, but the model reads "
                "text only: describe it in a text block, or leave it out"
            )
    return Message(
        _ROLES[message.role],
        tuple(parts),
        tuple(calls),
        tool_call_id=message.additional_kwargs.get("tool_call_id"),
        name=message.additional_kwargs.get("name"),
    )


def _arguments(kwargs: dict[str, Any] | str) -> dict[str, Any]:
    """A tool call's arguments, which some models leave as JSON text."""
    if isinstance(kwargs, dict):
        return kwargs
    try:
        parsed = json.loads(kwargs)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"arguments": kwargs}


def _chat_response(text: str, delta: str | None, receipt: Receipt | None, request: Request) -> ChatResponse:
    message = ChatMessage(role=MessageRole.ASSISTANT, content=text)
    return ChatResponse(message=message, delta=delta, **_accounts(receipt, request))


def _completion_response(text: str, delta: str | None, receipt: Receipt | None, request: Request) -> CompletionResponse:
    return CompletionResponse(text=text, delta=delta, **_accounts(receipt, request))


def _accounts(receipt: Receipt | None, request: Request) -> dict[str, Any]:
    """`raw` and `additional_kwargs`: usage and receipt, once the answer is whole."""
    if receipt is None:
        return {}
    counts = {
        "prompt_tokens": receipt.prompt_tokens,
        "completion_tokens": receipt.generated_tokens,
        "total_tokens": receipt.prompt_tokens + receipt.generated_tokens,
    }
    raw = {
        "model": request.shared.engine.model_name,
        "finish_reason": receipt.finish_reason,
        "usage": {**counts, "prompt_tokens_details": {"cached_tokens": receipt.cache_read_tokens}},
        "cacheslide": receipt.to_dict(),
    }
    return {"raw": raw, "additional_kwargs": counts}
