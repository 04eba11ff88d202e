"""Where each message's text stands in what a chat template rendered.

Templates trim, move, escape and drop text, so a search for it can be fooled. Here the text goes through the template
between two marks (characters that occur nowhere in the conversation); the rendering without its marks must equal the
true one, and then the marks say where the text is. Surrounding white space stays outside the marks, so that trimming
works as ever, and tags that the template itself writes (such as `<think>`) stay outside too, so that it finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from typing import Any

_MARKS = (range(0x20000, 0x2A6DF), range(0x12000, 0x12399), range(0x13000, 0x1342F))
"""Printable letters without case that people hardly write: rare ideographs, cuneiform, hieroglyphs."""

Render = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True)
class Region:
    """A range of the rendered text that a message's author wrote.

    Attributes:
        start: First character of the rendered text.
        stop: One past the last.
        message_idx: The message.
        content_start: Offset in the message's content of an unchanged copy; None where the template changed the text
            (escaped it as JSON, say) or where it is an argument of a tool call.
    """

    start: int
    stop: int
    message_idx: int
    content_start: int | None

    @property
    def content_stop(self) -> int | None:
        """End offset in the message's content."""
        return None if self.content_start is None else self.content_start + self.stop - self.start


@dataclass(frozen=True)
class _Piece:
    """A marked piece of text: of a message's content at an offset, or of a tool call's argument."""

    message_idx: int
    text: str
    content_start: int | None


class _Marker:
    """Puts marks into a conversation and reads them out of its rendering."""

    def __init__(self, messages: Sequence[Mapping[str, Any]], tags: re.Pattern[str]) -> None:
        self._tags = tags
        taken = set("".join(_strings(list(messages))))
        self._free = (chr(code) for block in _MARKS for code in block if chr(code) not in taken)
        self._pieces: dict[str, tuple[_Piece, str]] = {}

    def mark(self, messages: Sequence[Mapping[str, Any]], only: int | None = None) -> list[dict[str, Any]]:
        """A copy of the conversation with marks; `only` leaves all messages but one as they are."""
        return [
            self._mark_message(idx, message) if only in (None, idx) else dict(message)
            for idx, message in enumerate(messages)
        ]

    def read(self, marked: str) -> tuple[str, list[Region]]:
        """The rendering without its marks, and what stood between the two marks of a piece."""
        marks = "".join(opening + closing for opening, (_, closing) in self._pieces.items())
        chunks = re.split(f"([{marks}])", marked) if marks else [marked]  # text, mark, text, mark, …, text
        texts = chunks[::2]
        starts = list(accumulate(map(len, texts), initial=0))
        regions = []
        for place in range(1, len(texts) - 1):
            piece, closing = self._pieces.get(chunks[2 * place - 1], (None, ""))
            if piece is not None and chunks[2 * place + 1] == closing:
                content_start = piece.content_start if texts[place] == piece.text else None
                regions.append(Region(starts[place], starts[place + 1], piece.message_idx, content_start))
        return "".join(texts), regions

    def _mark_message(self, idx: int, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = dict(message)
        content = message["content"]
        bounds = [0, *(edge for match in self._tags.finditer(content) for edge in match.span()), len(content)]
        texts = []
        for place, (start, stop) in enumerate(pairwise(bounds)):
            text = content[start:stop]
            texts.append(text if place % 2 else self._mark_text(text, idx, start))
        marked["content"] = "".join(texts)
        if "tool_calls" in message:
            marked["tool_calls"] = [self._mark_call(call, idx) for call in message["tool_calls"]]
        return marked

    def _mark_call(self, call: Mapping[str, Any], message_idx: int) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": self._mark_value(function["arguments"], message_idx)}}

    def _mark_value(self, value: Any, message_idx: int) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, message_idx, None)
        if isinstance(value, Mapping):
            return {key: self._mark_value(item, message_idx) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark_value(item, message_idx) for item in value]
        return value

    def _mark_text(self, text: str, message_idx: int, content_start: int | None) -> str:
        core = text.strip()
        pair = tuple(islice(self._free, 2)) if core else ()
        if len(pair) < 2:
            return text
        lead = len(text) - len(text.lstrip())
        start = None if content_start is None else content_start + lead
        self._pieces[pair[0]] = (_Piece(message_idx, core, start), pair[1])
        return f"{text[:lead]}{pair[0]}{core}{pair[1]}{text[lead + len(core) :]}"


def locate(
    messages: Sequence[Mapping[str, Any]],
    rendered: str,
    render: Render,
    tags: re.Pattern[str],
    keep_apart: re.Pattern[str],
) -> list[Region]:
    """Finds the messages' text in their rendering.

    Args:
        messages: As the template gets them: dicts with `role`, `content` and perhaps `tool_calls`.
        rendered: Their rendering.
        render: Renders a conversation of the same shape.
        tags: What the template may look for inside a text; left outside the marks.
        keep_apart: Tokens that stay the template's own in an assistant's text: regions do not grow over them.

    Returns:
        Regions in order, not overlapping, as long as they can be. Text that the template dropped has none; neither
        has text that cannot be found.
    """
    marker = _Marker(messages, tags)
    clean, regions = marker.read(_try(render, marker.mark(messages)))
    if clean != rendered:
        regions = []
        for idx, message in enumerate(messages):
            clean, found = marker.read(_try(render, marker.mark(messages, only=idx)))
            regions += found if clean == rendered else _search(rendered, idx, message["content"], regions)
    return _grow(_disjoint(regions), messages, rendered, keep_apart)


def _try(render: Render, messages: list[dict[str, Any]]) -> str:
    """A template may refuse marked text (a date that it parses, say): then nothing is found by marks."""
    try:
        return render(messages)
    except Exception:
        return ""


def _search(rendered: str, idx: int, content: str, earlier: Iterable[Region]) -> list[Region]:
    """Plain search after the text of the messages before."""
    core = content.strip()
    start = rendered.find(core, max((region.stop for region in earlier), default=0)) if core else -1
    lead = len(content) - len(content.lstrip())
    return [Region(start, start + len(core), idx, lead)] if start >= 0 else []


def _disjoint(regions: Iterable[Region]) -> list[Region]:
    kept: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.start, -region.stop)):
        if region.stop > region.start and (not kept or region.start >= kept[-1].stop):
            kept.append(region)
    return kept


def _grow(
    regions: Sequence[Region], messages: Sequence[Mapping[str, Any]], rendered: str, keep_apart: re.Pattern[str]
) -> list[Region]:
    """Takes in the white space and tags around a region, and between two, that are a copy of the content as well."""
    grown: list[Region] = []
    for place, region in enumerate(regions):
        if region.content_start is None:
            grown.append(region)
            continue
        content = messages[region.message_idx]["content"]
        floor = grown[-1].stop if grown else 0
        ceiling = regions[place + 1].start if place + 1 < len(regions) else len(rendered)
        before = _copy_before(rendered[floor : region.start], content[: region.content_start])
        after = _copy_before(rendered[region.stop : ceiling][::-1], content[region.content_stop :][::-1])[::-1]
        if messages[region.message_idx]["role"] == "assistant":
            before = _cut_before(before, keep_apart)
            after = _cut_after(after, keep_apart)
        region = replace(
            region,
            start=region.start - len(before),
            stop=region.stop + len(after),
            content_start=region.content_start - len(before),
        )
        last = grown[-1] if grown else None
        if (
            last is not None
            and last.message_idx == region.message_idx
            and last.stop == region.start
            and last.content_stop == region.content_start
        ):
            grown[-1] = replace(last, stop=region.stop)
        else:
            grown.append(region)
    return grown


def _cut_before(text: str, keep_apart: re.Pattern[str]) -> str:
    """What of `text` comes after the last token to keep apart."""
    return keep_apart.split(text)[-1]


def _cut_after(text: str, keep_apart: re.Pattern[str]) -> str:
    """What of `text` comes before the first token to keep apart."""
    return keep_apart.split(text, maxsplit=1)[0]


def _copy_before(rendered: str, content: str) -> str:
    """The longest common end of both; nothing if it stops inside white space, which then is the template's."""
    pairs = zip(reversed(rendered), reversed(content), strict=False)
    length = next((idx for idx, (a, b) in enumerate(pairs) if a != b), min(len(rendered), len(content)))
    num_spaces = len(content) - len(content.rstrip())
    return content[len(content) - length :] if length >= num_spaces else ""


def _strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
