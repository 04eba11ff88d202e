"""`cacheslide profile`: learns how long an agent's updates are, from prompts in JSONL files.

A record, one a line, is one of `cacheslide bench quality` (two prompts each, see `bench.records`) or a single prompt:

    {"segments": [{"role": "system", "text": "…"}, {"role": "update", "text": "…"}, …]}
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "…", "cacheslide": "update"}, …]}, …]}

Messages go through the model's chat template, the others are plain text; a profile is learned for each of the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from langchain_core.messages import convert_to_messages
from rich.console import Console

from cacheslide_agents.adapters.messages import from_langchain
from cacheslide_agents.engine import EngineConfig, Prompt, Segment
from cacheslide_agents.engine.errors import CacheFolderError, PromptError
from cacheslide_agents.engine.model.loading import load_tokenizer
from cacheslide_agents.engine.position.ccpe import PositionProfile, reserved_positions, updates_of
from cacheslide_agents.engine.position.profile_file import ProfileKey, Profiles, add_to_file
from cacheslide_agents.engine.segments import EncodedPrompt
from cacheslide_agents.templates.render import ChatRenderer

from .bench.records import RecordError, numbered_lines, parse_turns
from .tables import show_table, standard_console


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
    console = standard_console()
    for key, profile in learned.items():
        _show(console, key, profile, [prompt for template, prompt in encoded if template == key.template], quantile)
    if output is not None:
        try:
            add_to_file(output, identity, learned)
        except OSError as error:
            raise CacheFolderError(f"{output} cannot be written ({error.strerror}): name another --output") from error
        console.print(f"{output}: for EngineConfig(learned_positions=True, positions_file=…) with {identity.name}")


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
                yield from _read(line.decode(), renderer)
            except (ValueError, TypeError, KeyError, PromptError, RecordError) as error:
                raise PromptError(
                    f"{file}:{number} holds no prompt ({error}): give an object with segments, with messages, with "
                    "first and second, or with system, old, new, suffix and query"
                ) from error


def _read(line: str, renderer: ChatRenderer) -> list[Prompt]:
    """The one or two prompts of a record."""
    record = json.loads(line)
    if isinstance(record, dict) and "messages" in record:
        return [renderer.render(from_langchain(convert_to_messages(record["messages"])))]
    if isinstance(record, dict) and "segments" in record:
        return [Prompt(Segment(segment["role"], segment["text"]) for segment in record["segments"])]
    turns = parse_turns(line, "")
    return [turns.first, turns.second]
