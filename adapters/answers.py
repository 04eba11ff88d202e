"""The engine's answers as LangChain messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from cacheslide_agents.engine.receipt import Receipt

if TYPE_CHECKING:
    from cacheslide_agents.engine.run.request import Output, Piece


def answer_result(output: Output, model_name: str) -> ChatResult:
    """A whole answer."""
    message = AIMessage(
        output.text,
        usage_metadata=usage_of(output.receipt),
        response_metadata=_metadata(output.receipt, output.finish_reason, model_name),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def answer_chunk(piece: Piece, model_name: str) -> ChatGenerationChunk:
    """A part of an answer. The last alone carries usage and metadata: LangChain adds up what several chunks say."""
    if piece.receipt is None:
        return ChatGenerationChunk(message=AIMessageChunk(content=piece.text))
    message = AIMessageChunk(
        content=piece.text,
        chunk_position="last",
        usage_metadata=usage_of(piece.receipt),
        response_metadata=_metadata(piece.receipt, piece.finish_reason, model_name),
    )
    return ChatGenerationChunk(message=message)


def usage_of(receipt: Receipt) -> UsageMetadata:
    """Token counts: `cache_read` was reused, `cache_creation` computed and kept; together they are the prompt."""
    return UsageMetadata(
        input_tokens=receipt.prompt_tokens,
        output_tokens=receipt.generated_tokens,
        total_tokens=receipt.prompt_tokens + receipt.generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=receipt.cache_read_tokens, cache_creation=receipt.computed_tokens
        ),
    )


def _metadata(receipt: Receipt, finish_reason: str | None, model_name: str) -> dict[str, Any]:
    return {
        "model_name": model_name,
        "model_provider": "cacheslide",
        "finish_reason": finish_reason,
        "cacheslide": receipt.to_dict(),
    }
