"""A tiny random model for adapter tests: one object, so that every chat model over it shares one engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from tests.tiny import tiny_model, tiny_tokenizer

POOL_TOKENS = 8192


@lru_cache(maxsize=4)
def tiny_llm(template: str = "smollm2") -> tuple[Any, Any]:
    """A transformers (model, tokenizer) pair."""
    return tiny_model(), tiny_tokenizer(template)


def tiny_settings(**settings: Any) -> dict[str, Any]:
    """Constructor settings of a chat model over it."""
    return {"llm": tiny_llm(), "pool_tokens": POOL_TOKENS, "max_tokens": 8, **settings}
