"""`cacheslide profile`: learns how long an agent's updates are, from prompts in JSONL files.

A record, one a line, is one of `cacheslide bench quality` (two prompts each, see `bench.records`) or a single prompt:

    {"segments": [{"role": "system", "text": "…"}, {"role": "update", "text": "…"}, …]}
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "…", "cacheslide": "update"}, …]}, …]}

Messages go through the model's chat template, the others are plain text; a profile is learned for each of the two. A
chat model uses that of its template, so its prompts belong here as messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import convert_to_messages
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.text import Text

from cacheslide_agents.adapters.messages import from_langchain
from cacheslide_agents.engine import EngineConfig, Prompt
from cacheslide_agents.engine.errors import CacheFolderError, PromptError
from cacheslide_agents.engine.model.loading import load_tokenizer
from cacheslide_agents.engine.position.ccpe import PositionProfile, reserved_positions, updates_of
from cacheslide_agents.engine.position.profile_file import ProfileKey, Profiles, add_to_file
from cacheslide_agents.engine.segments import EncodedPrompt
from cacheslide_agents.templates.render import ChatRenderer

from .bench.records import FORMAT as TURNS_FORMAT
from .bench.records import (
    RecordError,
    SegmentRecord,
    first_problem,
    numbered_lines,
    parse_object,
    parse_turns,
    prompt_of,
)
from .tables import show_table, standard_console

FORMAT = f"a single prompt is a list segments of {{role, text}} or a list messages of {{role, content}}; {TURNS_FORMAT}"


class _SegmentsRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    segments: list[SegmentRecord]


class _MessagesRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    messages: list[Any]


def run(files: Sequence[Path], *, model: str | None, quantile: float, namespace: str, output: Path | None) -> None:
    """Learns from the files, shows the slots and adds what was learned to a file.

    Args:
        files: JSONL files.
        model: A model folder, hub id or GGUF file; None is the bundled one. Only its tokenizer is read.
        quantile: Share of the updates that a reserved range holds.
        namespace: The tenant for whom the profile is.
        output: Where the profile goes; one that is there already is added to.

    Raises:
        ConfigError: A file cannot be read, or `output` is another model's profile.
        PromptError: A record is none.
        ModelError: The model cannot be found or read.
    """
    config = EngineConfig(model=model, positions_quantile=quantile, learned_positions=True, positions_file=output)
    tokenizer, identity = load_tokenizer(config)
    renderer = ChatRenderer(tokenizer)
    encoded = [(prompt.template, prompt.encode(tokenizer)) for prompt in _prompts(files, renderer)]
    learned: Profiles = {}
    for template, prompt in encoded:
        profile = learned.setdefault(ProfileKey(namespace, template), PositionProfile())
        profile.observe(update.num_tokens for update in updates_of(prompt))
    if output is not None:
        try:
            add_to_file(output, identity, learned)
        except OSError as error:
            raise CacheFolderError(f"{output} cannot be written ({error.strerror}): name another --output") from error
    console = standard_console()
    for key, profile in learned.items():
        _show(console, key, profile, [prompt for template, prompt in encoded if template == key.template], quantile)
    if output is not None:
        told = f"{output}: for EngineConfig(learned_positions=True, positions_file=…) with {identity.name}"
        console.print(Text(told), soft_wrap=True)


def _show(
    console: Console, key: ProfileKey, profile: PositionProfile, prompts: Sequence[EncodedPrompt], quantile: float
) -> None:
    template = "plain text" if key.template is None else f"chat template {key.template}"
    if not profile.slots:
        console.print(f"{template}: none of {len(prompts)} prompts has an update that something follows")
        return
    rows = []
    for slot, histogram in enumerate(profile.slots):
        reserved = profile.range_tokens(slot, quantile) or 0
        lengths = list(histogram.counts.elements())
        held = [length for length in lengths if length <= reserved]
        unused = sum(reserved - length for length in held) / len(lengths)
        shares = (histogram.quantile(share) for share in (0.0, 0.5, 1.0))
        rows.append((slot + 1, len(lengths), *shares, reserved, f"{len(held) / len(lengths):.0%}", f"{unused:.0f}"))
    show_table(
        console,
        f"{template}: {len(prompts)} prompts, lengths in tokens",
        ("update", "seen", "min", "median", "max", "reserved", "hold", "mean unused"),
        rows,
    )
    tokens = sum(map(len, prompts))
    positions = sum(_num_positions(prompt, profile, quantile) for prompt in prompts)
    console.print(
        f"context per prompt: {tokens / len(prompts):.0f} tokens at {positions / len(prompts):.0f} positions "
        f"({positions / tokens - 1:+.1%})\n"
    )


def _num_positions(prompt: EncodedPrompt, profile: PositionProfile, quantile: float) -> int:
    updates = updates_of(prompt)
    ranges = [profile.range_tokens(slot, quantile) or 0 for slot in range(len(updates))]
    return int(reserved_positions(len(prompt), updates, ranges)[-1]) + 1


def _prompts(files: Sequence[Path], renderer: ChatRenderer) -> Iterator[Prompt]:
    for file in files:
        lines = numbered_lines(file)
        if not lines:
            raise PromptError(f"{file} is empty: give one prompt a line, as JSON")
        for number, line in lines:
            try:
                yield from _read(line, renderer)
            except (RecordError, PromptError) as error:
                raise PromptError(f"{file}:{number} holds no prompt: {error}") from error


def _read(line: bytes, renderer: ChatRenderer) -> list[Prompt]:
    """The one or two prompts of a record.

    Raises:
        RecordError: It is no record.
        PromptError: A prompt of it is malformed.
    """
    values = parse_object(line, FORMAT)
    try:
        if "messages" in values:
            return [_rendered(_MessagesRecord.model_validate(values).messages, renderer)]
        if "segments" in values:
            return [prompt_of(_SegmentsRecord.model_validate(values).segments)]
    except ValidationError as error:
        raise RecordError(first_problem(error, FORMAT)) from None
    turns = parse_turns(values, "")
    return [turns.first, turns.second]


def _rendered(messages: list[Any], renderer: ChatRenderer) -> Prompt:
    try:
        conversation = from_langchain(convert_to_messages(messages))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:  # LangChain's own, about a message's shape
        raise RecordError(f"messages cannot be read ({error}): give a list of {{role, content}}") from None
    return renderer.render(conversation)
