"""Prompts that the benchmarks run on: real agent text, cut to wanted token counts where a benchmark fixes them."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheslide_agents.bench.records import numbered_lines, read_turns
from cacheslide_agents.bench.turns import Turns, TurnSet, edited_prompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FAMILIES = ("fact_edit", "fact_delete", "fact_insert", "memory", "reflexion", "tools", "swe")


class DataMissingError(Exception):
    """The agent data is not there; the message says how to point at it."""


def data_folder() -> Path:
    """The folder named by `CACHESLIDE_DATA`, by default `../shared/data` beside the project.

    Raises:
        DataMissingError: There is no such folder.
    """
    folder = Path(os.environ.get("CACHESLIDE_DATA", "../shared/data"))
    if not (folder / "prompts").is_dir():
        raise DataMissingError(f"no agent data in {folder}: point CACHESLIDE_DATA at a folder with prompts/*.jsonl")
    return folder


def family_turns(family: str, limit: int | None = None) -> TurnSet:
    """The turns of one family, in file order."""
    turn_set, problems = read_turns(data_folder() / "prompts" / f"{family}.jsonl", limit)
    assert not problems, problems
    return turn_set


def records(name: str) -> list[dict[str, Any]]:
    """The records of one file of the agent data."""
    return [json.loads(line) for _, line in numbered_lines(data_folder() / f"{name}.jsonl")]


def sized_turns(
    tokenizer: PreTrainedTokenizerBase,
    system_tokens: int,
    old_tokens: int,
    new_tokens: int,
    suffix_tokens: int,
    query_tokens: int,
    variant: int = 0,
) -> Turns:
    """Two turns of real conversation text with the wanted token counts; old and new update share nothing.

    Args:
        tokenizer: Counts the tokens.
        system_tokens: Unchanged start.
        old_tokens: The update at the first turn.
        new_tokens: The update at the second turn.
        suffix_tokens: Unchanged text after the update.
        query_tokens: What the second turn adds at the end.
        variant: Which stretch of the text to take, so that repetitions do not meet each other's cache.
    """
    text = _Text(tokenizer, variant)
    old, new = text.take(old_tokens), text.take(new_tokens)
    system, suffix, query = text.take(system_tokens), text.take(suffix_tokens), text.take(query_tokens)
    first, second = edited_prompts(system, old, new, suffix, query)
    return Turns(f"sized-{variant}", first, second, answer=" The answer")


class _Text:
    """Conversation text, handed out by the token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, variant: int) -> None:
        conversations = records("locomo")
        sessions = conversations[variant % len(conversations)]["sessions"]
        spoken = "\n".join(f"{turn['speaker']}: {turn['text']}" for session in sessions for turn in session)
        self._words = spoken.split(" ")
        self._tokenizer = tokenizer

    def take(self, num_tokens: int) -> str:
        """The next stretch of words, ending in a newline, of exactly `num_tokens` tokens when tokenized by itself."""
        words = bisect_right(range(min(len(self._words), num_tokens) + 1), num_tokens, key=self._count) - 1
        padding = " a" * (num_tokens - self._count(words))
        text = self._stretch(words).removesuffix("\n") + padding + "\n"
        del self._words[:words]
        return text

    def _stretch(self, words: int) -> str:
        return " ".join(self._words[:words]) + "\n"

    def _count(self, words: int) -> int:
        return len(self._tokenizer.encode(self._stretch(words), add_special_tokens=False))
