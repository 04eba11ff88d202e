"""Turns for a first look, when no prompts are given: invented ones over the demo's workshop notes.

They show how the command works and how kinds of change differ. They say nothing about other prompts.
"""

from __future__ import annotations

from ..demo.script import WORKSHOP
from .turns import Turns, TurnSet, edited_prompts

_SYSTEM = f"{WORKSHOP.instructions}\n"
_NOTES = f"Mara: {WORKSHOP.history[0].text}\n\n"
_MARKET = "The next market is on Saturday."
_TUBE = "The price of a tube is six crowns."
_HAZEL = "The password of the gate is hazel."

_TOOLS_SYSTEM = "You can call functions. Available functions, one a line:\n"
_TOOLS = (
    '{"name": "find_customer", "description": "Looks a customer up by name.", "parameters": {"name": "string"}}',
    '{"name": "list_rentals", "description": "All rentals of a day.", "parameters": {"day": "string"}}',
    '{"name": "order_part", "description": "Orders a part.", "parameters": {"part": "string", "count": "integer"}}',
)
_NEW_TOOL = '{"name": "send_reminder", "description": "Reminds a customer.", "parameters": {"customer": "string"}}'

_REFLECTIONS = (
    "- I answered from the first day alone. Next time I will read all days before I answer.",
    "- I mixed up the camping site and the school. Next time I will check who rented what.",
)


def samples() -> TurnSet:
    """One pair of turns for each kind of change."""
    memory = WORKSHOP.memory
    return TurnSet(
        "samples",
        (
            _memory_turns(
                "edit-day",
                memory,
                [line.replace("Saturday", "Monday") if line == _MARKET else line for line in memory],
                ("When is the next market?", "The next market is on", " Monday."),
                old_value="Saturday",
            ),
            _memory_turns(
                "edit-price",
                memory,
                [line.replace("six", "eight") if line == _TUBE else line for line in memory],
                ("What is the price of a tube?", "The price of a tube is", " eight crowns."),
                old_value="six crowns",
            ),
            _memory_turns(
                "delete",
                memory,
                [line for line in memory if line != _HAZEL],
                ("What is the password of the gate?", "The password of the gate is", " not in the memory."),
                old_value="hazel",
            ),
            _memory_turns(
                "insert",
                memory,
                [*memory[:3], "The plumber is Mister Rowan.", *memory[3:]],
                ("Who is the plumber?", "The plumber is", " Mister Rowan."),
            ),
            _memory_turns(
                "time",
                ["It is ten past nine.", *memory],
                ["It is a quarter past nine on Thursday.", *memory],
                ("Who is the landlord?", "The landlord is", " Mister Finch."),
            ),
            _turns(
                "reflections",
                "You answer questions about a text. Think, then answer in a few words.\n",
                "\n".join(_REFLECTIONS[:1]) + "\n\n",
                "\n".join(_REFLECTIONS) + "\n\n",
                _NOTES,
                "Question: Who came back with the four bicycles?\nAnswer:",
                " the family from the camping site",
            ),
            _turns(
                "tools",
                _TOOLS_SYSTEM,
                "\n".join(_TOOLS) + "\n\n",
                "\n".join((*_TOOLS[:2], _NEW_TOOL, *_TOOLS[2:])) + "\n\n",
                _NOTES,
                "Mara: Please remind the postwoman that her bike is ready.\nCall:",
                ' send_reminder(customer="postwoman")',
            ),
        ),
    )


def _memory_turns(
    name: str,
    old: list[str] | tuple[str, ...],
    new: list[str] | tuple[str, ...],
    asked: tuple[str, str, str],
    old_value: str | None = None,
) -> Turns:
    question, start, answer = asked
    before, after = ("<memory>\n" + "\n".join(lines) + "\n</memory>\n\n" for lines in (old, new))
    return _turns(name, _SYSTEM, before, after, _NOTES, f"Mara: {question}\nAssistant: {start}", answer, old_value)


def _turns(
    name: str, system: str, old: str, new: str, suffix: str, query: str, answer: str, old_value: str | None = None
) -> Turns:
    first, second = edited_prompts(system, old, new, suffix, query)
    return Turns(name, first, second, answer, old_value)
