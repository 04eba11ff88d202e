"""A conversation as a prompt, through the model's own chat template.

The prompt's text is exactly what `tokenizer.apply_chat_template(..., tokenize=False)` renders. What people, tools and
the model wrote are literal segments (control tokens in them stay text); the template's own glue is not literal.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.engine.segments import Prompt, Role, Segment

from .adaptation import as_template_message, tools_as_text, variants
from .marks import Region, locate
from .messages import ChatMessage, TextPart, ToolCall, with_segments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STRFTIME = re.compile(r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)""")
_TAG = re.compile(r"</?[\w|]+>|\[/?[A-Z_]+\]")
_PROBE = "cacheslideprobe"


class ChatRenderer:
    """Renders conversations with one tokenizer's chat template.

    A template may write today's date, which would change every prompt at midnight: the date is settled when the
    renderer is made. It stands in for `strftime_now("…")` in the template and for a `date_string` that is not given.

    Attributes:
        date: The settled date.

    Args:
        tokenizer: The model's.
        chat_template: A Jinja template, or a file with one, instead of the tokenizer's own.
        date: The date that templates write; today's by default.
        variables: What else the template reads, such as `enable_thinking` or `date_string`.

    Raises:
        PromptError: The file of the template cannot be read.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | Path | None = None,
        date: datetime | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self.date = date or datetime.now()
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._chat_template = _template_text(chat_template)
        self._tool_templates: dict[str, bool] = {}

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Renders a conversation.

        Where the template refuses it, it is put differently (see `adaptation`), and the text equals the template's
        rendering of that.

        Args:
            messages: The conversation, at least one message.
            tools: JSON schemas of tools, for templates that write them.
            add_generation_prompt: Whether the answer's header ends the text.
            variables: What the template reads, on top of the renderer's own.

        Returns:
            A prompt whose segments' roles are those of `with_segments`. Glue is `system` up to the end of the leading
            system messages and `suffix` after that.

        Raises:
            PromptError: There is no message, no chat template, the template refuses the conversation or has no place
                for tools, or control tokens that somebody typed would be read as such.
        """
        if not messages:
            raise PromptError("the conversation is empty: give at least one message")
        rendering = _Rendering(self, tools, {**self._variables, **(variables or {})})
        if (
            any(message.tool_calls or message.role == "tool" for message in messages)
            and not rendering.takes_tool_calls()
        ):
            settled = tools_as_text(with_segments(messages))
        else:
            settled = with_segments(messages)
        conversation, text = rendering.accepted(settled, add_generation_prompt)
        if tools and text == rendering.without_tools(conversation, add_generation_prompt):
            raise PromptError(
                "the chat template has no place for tools and would drop them: "
                "describe them in the system message, or give a template that writes them as chat_template="
            )
        segments = rendering.segments(conversation, text, add_generation_prompt)
        return Prompt(segments, template=rendering.identity)

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special) | set(self._tokenizer.all_special_tokens)

    @cached_property
    def _other_tokens(self) -> frozenset[str]:
        """Added tokens that are not special, such as `<think>`: control tokens as well, but a model writes them."""
        added = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        return frozenset(content for content in added if not content.isspace()) - self._special_tokens


class _Rendering:
    """One call's template, tools and variables."""

    def __init__(
        self, renderer: ChatRenderer, tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]
    ) -> None:
        self._renderer = renderer
        self._tools = [dict(tool) for tool in tools] if tools else None
        self._source = _source(renderer._tokenizer, renderer._chat_template, self._tools)
        self._pinned = _STRFTIME.sub(lambda match: repr(renderer.date.strftime(match["format"])), self._source)
        self._variables = dict(variables)
        if "date_string" in self._source:
            self._variables.setdefault("date_string", renderer.date.strftime("%d %b %Y"))

    @property
    def identity(self) -> str:
        """The template's digest. Tools and dates are text of the prompt, so they are no part of it."""
        return hashlib.sha256(self._source.encode()).hexdigest()[:16]

    def takes_tool_calls(self) -> bool:
        """Whether the template writes the calls and results of a conversation that uses a tool."""
        memory = self._renderer._tool_templates
        if self._pinned not in memory:
            call = ToolCall(_PROBE, {"city": "Rome"}, "abcdefghi")
            conversation = [
                ChatMessage.user("Hi"),
                ChatMessage.assistant(tool_calls=[call]),
                ChatMessage.tool("Sunny", tool_call_id=call.id, name=call.name),
            ]
            try:
                text = self.without_tools(conversation, False)
            except Exception:
                text = ""
            memory[self._pinned] = call.name in text and "Sunny" in text
        return memory[self._pinned]

    def text(self, conversation: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The template's rendering."""
        return self._apply(conversation, add_generation_prompt, self._tools)

    def without_tools(self, conversation: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        return self._apply([as_template_message(message) for message in conversation], add_generation_prompt, None)

    def _apply(
        self, conversation: Sequence[Mapping[str, Any]], add_generation_prompt: bool, tools: list[dict[str, Any]] | None
    ) -> str:
        apply: Any = self._renderer._tokenizer.apply_chat_template
        text: str = apply(
            [dict(message) for message in conversation],
            tools=tools,
            chat_template=self._pinned,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._variables,
        )
        return text

    def accepted(self, messages: Sequence[ChatMessage], add_generation_prompt: bool) -> tuple[list[ChatMessage], str]:
        """The first variant of the conversation that the template takes, and its rendering."""
        from jinja2 import TemplateError

        refusal: Exception | None = None
        for variant in variants(messages):
            try:
                return variant, self.text([as_template_message(message) for message in variant], add_generation_prompt)
            except (TemplateError, TypeError) as error:
                refusal = refusal or error
        roles = ", ".join(message.role for message in messages)
        raise PromptError(f"the chat template refuses this conversation ({roles}): {refusal}") from refusal

    def segments(self, messages: Sequence[ChatMessage], text: str, add_generation_prompt: bool) -> list[Segment]:
        """The rendered text cut into segments."""
        conversation = [as_template_message(message) for message in messages]

        def render(marked: list[dict[str, Any]]) -> str:
            return self.text(marked, add_generation_prompt)

        renderer = self._renderer
        tags = _alternatives((set(_TAG.findall(self._source)) | renderer._other_tokens) - renderer._special_tokens)
        regions = locate(conversation, text, render, tags, _alternatives(renderer._other_tokens))
        self._refuse_injection(conversation, text, regions, render)
        system_end = self._system_end(messages, text, regions)
        return list(_merged(_cut(messages, text, regions, system_end)))

    def _system_end(self, messages: Sequence[ChatMessage], text: str, regions: Sequence[Region]) -> int:
        """Where the glue of the leading system messages ends: at their own rendering's end if the text begins so."""
        num_leading = next((idx for idx, message in enumerate(messages) if message.role != "system"), len(messages))
        after = min((region.start for region in regions if region.message_idx >= num_leading), default=len(text))
        before = max((region.stop for region in regions if region.message_idx < num_leading), default=0)
        if 0 < num_leading < len(messages):
            try:
                head = self.text([as_template_message(message) for message in messages[:num_leading]], False)
            except Exception:
                head = ""
            if before <= len(head) <= after and text.startswith(head):
                return len(head)
        return max(after, before)

    def _refuse_injection(
        self, conversation: Sequence[Mapping[str, Any]], text: str, regions: Sequence[Region], render: Any
    ) -> None:
        """Checks that no typed control token is left among the template's own.

        The template's own are counted in a rendering of the same conversation whose control tokens are blanked.
        """
        special, other = self._renderer._special_tokens, self._renderer._other_tokens
        typed, own = _alternatives(special | other), _alternatives(special)
        blank = [_blanked(message, own if message["role"] == "assistant" else typed) for message in conversation]
        if blank == list(conversation):
            return
        try:
            expected = Counter(typed.findall(render(blank)))
        except Exception:
            expected = Counter()
        literal = [(region.start, region.stop) for region in regions]
        found = Counter(
            match[0]
            for match in typed.finditer(text)
            if not any(start <= match.start() and match.end() <= stop for start, stop in literal)
        )
        if extra := found - expected:
            raise PromptError(
                f"the chat template moves text with the control token {next(iter(extra))!r} to where it cannot be told "
                "from its own: remove the token from the message, tool call or name"
            )


def _cut(
    messages: Sequence[ChatMessage], text: str, regions: Sequence[Region], system_end: int
) -> Iterator[tuple[Role, str, bool]]:
    """(role, text, literal) of glue and of parts, in order."""
    offset = 0
    for region in regions:
        yield from _glue(text, offset, region.start, system_end)
        parts = messages[region.message_idx].parts
        if region.content_start is None:
            yield _common_role(parts), text[region.start : region.stop], True
        else:
            place = 0
            for part in parts:
                start = max(place, region.content_start) - region.content_start + region.start
                place += len(part.text)
                stop = min(place - region.content_start + region.start, region.stop)
                if start < stop:
                    assert part.segment is not None
                    yield part.segment, text[start:stop], True
        offset = region.stop
    yield from _glue(text, offset, len(text), system_end)


def _glue(text: str, start: int, stop: int, system_end: int) -> Iterator[tuple[Role, str, bool]]:
    middle = min(max(start, system_end), stop)
    yield "system", text[start:middle], False
    yield "suffix", text[middle:stop], False


def _merged(cuts: Iterable[tuple[Role, str, bool]]) -> Iterator[Segment]:
    """Segments without empty ones; neighbours alike become one."""
    last: Segment | None = None
    for role, text, literal in cuts:
        if not text:
            continue
        if last is not None and (last.role, last.literal) == (role, literal):
            last = Segment(role, last.text + text, literal)
            continue
        if last is not None:
            yield last
        last = Segment(role, text, literal)
    if last is not None:
        yield last


def _common_role(parts: Sequence[TextPart]) -> Role:
    """The role of text that cannot be told apart into parts: `update` if any of it is rewritten."""
    roles = [part.segment for part in parts if part.segment is not None]
    return "update" if "update" in roles else roles[0] if roles else "suffix"


def _alternatives(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing if there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")


def _blanked(value: Any, tokens: re.Pattern[str]) -> Any:
    """The value with every token in its strings replaced by a dot."""
    if isinstance(value, str):
        return tokens.sub("·", value)
    if isinstance(value, Mapping):
        return {tokens.sub("·", key): _blanked(item, tokens) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_blanked(item, tokens) for item in value]
    return value


def _template_text(template: str | Path | None) -> str | None:
    if not isinstance(template, Path):
        return template
    try:
        return template.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"chat_template={str(template)!r} cannot be read: {error.strerror or error}") from error


def _source(tokenizer: PreTrainedTokenizerBase, template: str | None, tools: list[dict[str, Any]] | None) -> str:
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'this model'} has no chat template: "
            "give one as chat_template=, or use Prompt with plain segments"
        )
    choose: Any = tokenizer.get_chat_template
    try:
        source: str = choose(template, tools)
    except ValueError as error:
        raise PromptError(f"no chat template can be chosen: {error}; name one with chat_template=") from error
    return source
