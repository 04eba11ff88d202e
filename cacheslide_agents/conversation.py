"""`cacheslide chat`: a conversation at the terminal, each answer followed by what its prompt reused."""

from __future__ import annotations

import sys
from typing import Any

import typer
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.engine.config import PolicyName


def converse(*, model: str | None, policy: PolicyName, system: str, max_tokens: int) -> None:
    """Reads lines and answers them until the input ends.

    Args:
        model: A model folder, hub id or GGUF file; None is the bundled one.
        policy: How reuse is decided.
        system: The system message.
        max_tokens: Longest answer in tokens.

    Raises:
        CacheSlideError: The model cannot be loaded or a prompt no longer fits.
    """
    chat = CacheSlideChat(model=model, policy=policy, max_tokens=max_tokens)
    messages: list[BaseMessage] = [SystemMessage(system)]
    while (line := _read_line()) is not None:
        if not line:
            continue
        messages.append(HumanMessage(line))
        answer: AIMessageChunk | None = None
        for piece in chat.stream(messages, {"configurable": {"thread_id": "terminal"}}):
            assert isinstance(piece, AIMessageChunk)
            typer.echo(piece.text, nl=False)
            answer = piece if answer is None else answer + piece
        if answer is not None:
            messages.append(answer)
            typer.secho(f"\n{_summary(answer.response_metadata['cacheslide'])}", dim=True)


def _read_line() -> str | None:
    """The next line, or None when the input ends. Without a terminal there is no prompt sign."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _summary(receipt: dict[str, Any]) -> str:
    counts = ", ".join(f"{receipt[f'{name}_tokens']} {name}" for name in ("exact", "slid", "corrected", "fresh"))
    fallback = f"; less reused: {receipt['fallback']}" if receipt["fallback"] else ""
    seconds = f"{receipt['ttft_seconds']:.2f} s"
    return f"[{receipt['prompt_tokens']} prompt tokens: {counts}; first token after {seconds}{fallback}]"
