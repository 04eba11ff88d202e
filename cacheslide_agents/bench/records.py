"""Turns from JSONL files: the records that a person writes, checked line by line.

A record is one of two shapes, with optional `id`, `answer` and `old_value`:

    {"system": "…", "old": "…", "new": "…", "suffix": "…", "query": "…"}
    {"first": [{"role": "system", "text": "…"}, …], "second": [{"role": "update", "text": "…"}, …]}

The first stands for system + old + suffix, then system + new + suffix + query. Texts are taken as they are: whoever
wants a chat template applies it before. A bad record is reported and left out; the others are used.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cacheslide_agents.engine import Prompt, Segment
from cacheslide_agents.engine.errors import ConfigError, PromptError
from cacheslide_agents.engine.segments import Role

from .turns import Turns, TurnSet, edited_prompts

FORMAT = (
    "a record has the texts system, old, new, suffix and query, or the lists first and second of {role, text}, and may "
    "have answer, old_value and id"
)
_SHOWN_CHARACTERS = 40

Text = Annotated[str, Field(min_length=1)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | int | None = None
    answer: Text | None = None
    old_value: Text | None = None


class EditRecord(_Record):
    """An update that is rewritten between two turns."""

    system: str = ""
    old: str
    new: str
    suffix: str
    query: str = ""

    def prompts(self) -> tuple[Prompt, Prompt]:
        """The two prompts."""
        return edited_prompts(self.system, self.old, self.new, self.suffix, self.query)


class SegmentRecord(BaseModel):
    """One segment of a prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Role
    text: str


class PromptsRecord(_Record):
    """Two prompts in full, for changes that are no rewritten update."""

    first: Annotated[list[SegmentRecord], Field(min_length=1)]
    second: Annotated[list[SegmentRecord], Field(min_length=1)]

    def prompts(self) -> tuple[Prompt, Prompt]:
        """The two prompts."""
        return prompt_of(self.first), prompt_of(self.second)


class RecordError(Exception):
    """A record that cannot be used; the message gives the value, the limit and the remedy."""


def parse_object(line: bytes, shape: str = FORMAT) -> dict[str, Any]:
    """The JSON object of one line.

    Args:
        line: As the file has it.
        shape: What a record looks like, in words.

    Raises:
        RecordError: The line holds something else.
    """
    try:
        values = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RecordError(
            f"no UTF-8, byte 0x{line[error.start]:02x} at column {error.start + 1}: save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise RecordError(f"no JSON, {error.msg} at column {error.colno}: write one object a line") from None
    except RecursionError:
        raise RecordError(f"lists or objects nested deeper than Python's JSON reader goes: {shape}") from None
    except ValueError:  # JSON knows no longest integer, Python does
        digits = sys.get_int_max_str_digits()
        raise RecordError(f"an integer of more than {digits} digits: write it as text, in quotes") from None
    if not isinstance(values, dict):
        raise RecordError(f"{_shown(values)} is no JSON object: {shape}")
    return values


def parse_turns(values: Mapping[str, Any], name: str) -> Turns:
    """The turns of one record.

    Args:
        values: Its JSON object.
        name: Names the turns if they have no id.

    Raises:
        RecordError: The object is no record.
    """
    shape = PromptsRecord if {"first", "second"} & values.keys() else EditRecord
    try:
        record = shape.model_validate(values)
        first, second = record.prompts()
    except ValidationError as error:
        raise RecordError(first_problem(error)) from None
    except PromptError as error:
        raise RecordError(str(error)) from None
    number = name if record.id is None else str(record.id)
    return Turns(number, first, second, answer=record.answer, old_value=record.old_value)


def numbered_lines(path: Path) -> list[tuple[int, bytes]]:
    """The lines of a JSONL file that are not blank, with their numbers from 1, without a byte order mark.

    Bytes, because text knows more ends of lines than JSON does, which may stand in the middle of a record.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}; name a JSONL file") from error
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def read_turns(path: Path, limit: int | None = None) -> tuple[TurnSet, list[str]]:
    """The turns of a file, and what is wrong with those of its records that are left out.

    Args:
        path: A JSONL file; blank lines are skipped.
        limit: Good records to read; None reads all.

    Raises:
        ConfigError: The file cannot be read, or no record of it can be used.
    """
    name = os.fsencode(path.stem).decode(errors="replace")  # a file's name may hold bytes that no text does
    turns: list[Turns] = []
    problems: list[str] = []
    for number, line in numbered_lines(path):
        if limit is not None and len(turns) >= limit:
            break
        try:
            turns.append(parse_turns(parse_object(line), f"{name}-{number}"))
        except RecordError as error:
            problems.append(f"{path}:{number}: {error}")
    if not turns:
        raise ConfigError(f"no record of {path} can be used. {problems[0] if problems else 'It is empty: ' + FORMAT}")
    return TurnSet(name, tuple(turns)), problems


def read_inputs(names: Sequence[str], limit: int | None = None) -> tuple[list[TurnSet], list[str]]:
    """The turns of files and of families of the agent data, and what is wrong with records that are left out.

    Args:
        names: Files, or names of `prompts/NAME.jsonl` in the folder that `CACHESLIDE_DATA` names.
        limit: Good records to read of each; None reads all.

    Raises:
        ConfigError: There is no such file or family, or no record of one can be used.
    """
    sets: list[TurnSet] = []
    problems: list[str] = []
    for name in names:
        turn_set, wrong = read_turns(input_path(name), limit)
        if turn_set.name in (other.name for other in sets):
            raise ConfigError(f"two inputs are called {turn_set.name!r}: figures are told apart by name; rename a file")
        sets.append(turn_set)
        problems += wrong
    return sets, problems


def input_path(name: str) -> Path:
    """The file of an input: itself, or a family's.

    Args:
        name: As in `read_inputs`.

    Raises:
        ConfigError: There is no such file or family.
    """
    if (path := Path(name)).exists():
        return path
    folder = os.environ.get("CACHESLIDE_DATA")
    families = sorted(file.stem for file in Path(folder, "prompts").glob("*.jsonl")) if folder else []
    if folder and name in families:
        return Path(folder, "prompts", f"{name}.jsonl")
    known = f"one of {', '.join(families)}" if families else "a family of the folder that CACHESLIDE_DATA names"
    raise ConfigError(f"{name!r} is no file and no family of prompts: name a JSONL file or {known}")


def prompt_of(segments: Sequence[SegmentRecord]) -> Prompt:
    """The prompt of these segments.

    Raises:
        PromptError: It has no text.
    """
    return Prompt([Segment(segment.role, segment.text) for segment in segments])


def first_problem(error: ValidationError, shape: str = FORMAT) -> str:
    """The first of a record's problems: where, the value, the limit, and what a record looks like (`shape`)."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"{where} is missing: {shape}"
    if problem["type"] == "extra_forbidden":
        return f"{where} is no key of a record: {shape}"
    return f"{where} = {_shown(problem['input'])}: {problem['msg']}; {shape}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
