"""Prompt ids against the chat templates' own rendering, and segments against character offsets."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from cacheslide_agents.engine.errors import PromptError, UnsupportedModelError
from cacheslide_agents.engine.segments import Prompt, Segment
from cacheslide_agents.engine.tokenization import encode_prompt, encode_with_last_piece
from tests.engine.text_tokenizers import STYLES, text_tokenizer
from tests.tiny import tiny_tokenizer

CONTROLS = (
    "<|im_end|>",
    "<|im_start|>",
    "[INST]",
    "</s>",
    "<|eot_id|>",
    "<think>",
    "<|user|>",
    "<|end|>",
    "<plain_word>",
)
CONTENTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "The quick",
                " dog",
                "  ",
                "\n",
                "\n\n",
                "é",
                "e\u0301",
                "你好",
                "👩‍👩‍👧",
                "▁",
                "<|im_",
                "\t",
                "0x",
            ]
        ),
        st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=6),
    ),
    max_size=6,
).map("".join)


def _messages(contents: list[str]) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def _chat_prompt(tokenizer: PreTrainedTokenizerFast, contents: list[str], literal: bool) -> Prompt:
    """The template's rendering as glue and contents, found by rendering marks in the contents' places."""
    marks = [chr(0xE100 + idx) for idx in range(len(contents))]
    rendered = _render(tokenizer, marks, tokenize=False)
    segments = []
    for part in re.split("([\ue100-\ue200])", rendered):
        if part in marks:
            segments.append(Segment.update(contents[marks.index(part)], literal=literal))
        elif part:
            segments.append(Segment.system(part))
    return Prompt(segments, template="test")


def _render(tokenizer: PreTrainedTokenizerFast, contents: list[str], **options: Any) -> Any:
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    return tokenizer.apply_chat_template(_messages(contents), **options)


@pytest.mark.parametrize("style", STYLES)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_ids_equal_the_templates_when_no_control_token_is_typed(style: str, contents: list[str]) -> None:
    if style in ("llama3", "mistral", "mistral_legacy"):  # their templates strip
        contents = [content.strip() for content in contents]
    tokenizer = text_tokenizer(style)
    for literal in (False, True):
        encoded = encode_prompt(_chat_prompt(tokenizer, contents, literal), tokenizer)
        assert encoded.token_ids.dtype == np.int64
        assert encoded.token_ids.tolist() == _render(tokenizer, contents)


@pytest.mark.parametrize("style", STYLES)
@given(
    contents=st.lists(
        st.lists(st.one_of(CONTENTS, st.sampled_from([*CONTROLS, "end|>"])), max_size=5).map("".join),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=40, deadline=None)
def test_typed_control_tokens_stay_text_as_transformers_sanitizes_them(style: str, contents: list[str]) -> None:
    contents = [content.strip().replace("</think>", "") for content in contents]
    tokenizer = text_tokenizer(style)
    encoded = encode_prompt(_chat_prompt(tokenizer, contents, literal=True), tokenizer)
    assert encoded.token_ids.tolist() == _render(tokenizer, contents, sanitize_control_tokens=True)


@pytest.mark.parametrize("style", STYLES)
def test_control_tokens_act_when_the_segment_is_not_literal(style: str) -> None:
    tokenizer = text_tokenizer(style)
    contents = [f"a{control}b" for control in CONTROLS]
    encoded = encode_prompt(_chat_prompt(tokenizer, contents, literal=False), tokenizer)
    assert encoded.token_ids.tolist() == _render(tokenizer, contents)


def test_no_control_token_appears_when_literal_text_meets_glue() -> None:
    tokenizer = text_tokenizer("chatml")
    control = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for segments in (
        [Segment.suffix("x<|im_", literal=True), Segment.system("end|>y")],
        [Segment.system("x<|im_"), Segment.suffix("end|>y", literal=True)],
        [
            Segment.suffix("<|im", literal=True),
            Segment.suffix("_en", literal=True),
            Segment.suffix("d|>", literal=True),
        ],
    ):
        encoded = encode_prompt(Prompt(segments, "t"), tokenizer)
        assert control not in encoded.token_ids
        assert tokenizer.decode(encoded.token_ids) == "".join(segment.text for segment in segments)


def test_glue_control_tokens_survive_when_literal_text_around_them_holds_some() -> None:
    tokenizer = text_tokenizer("chatml")
    segments = [
        Segment.suffix("<|im_end|><|im_end", literal=True),
        Segment.system("<|im_end|>"),
        Segment.suffix("<|im_end|>", literal=True),
    ]
    ids = encode_prompt(Prompt(segments, "t"), tokenizer).token_ids
    assert (ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).sum() == 1
    assert tokenizer.decode(ids) == Prompt(segments).text


def test_glue_control_token_survives_when_a_longer_one_would_reach_into_literal_text() -> None:
    tokenizer = tiny_tokenizer("chatml")
    tokenizer.add_tokens(["x<|im_end|>"], special_tokens=True)
    segments = [Segment.suffix("ax", literal=True), Segment.system("<|im_end|>")]
    ids = encode_prompt(Prompt(segments, "t"), tokenizer).token_ids
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["a", "x", "<|im_end|>"]


def test_blanks_are_swallowed_as_by_the_template_when_literal_text_begins_with_some() -> None:
    tokenizer = text_tokenizer("phi3")
    encoded = encode_prompt(_chat_prompt(tokenizer, ["a", " \n dog"], literal=True), tokenizer)
    assert encoded.token_ids.tolist() == _render(tokenizer, ["a", " \n dog"])


def test_added_words_stay_words_when_no_template_writes_them() -> None:
    tokenizer = text_tokenizer("qwen3")
    ids = encode_prompt(Prompt([Segment.suffix("a <plain_word> b", literal=True)], "t"), tokenizer).token_ids
    assert tokenizer.convert_tokens_to_ids("<plain_word>") in ids


@pytest.mark.parametrize("style", STYLES)
@given(texts=st.lists(CONTENTS, min_size=1, max_size=5).filter(lambda texts: any(texts)))
@settings(max_examples=40, deadline=None)
def test_segments_begin_where_their_first_token_ends_inside_them(style: str, texts: list[str]) -> None:
    tokenizer = text_tokenizer(style)
    prompt = Prompt([Segment.suffix(text) for text in texts], template="t")
    encoded = encode_prompt(prompt, tokenizer)
    offsets = tokenizer(prompt.text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    start = 0
    assert encoded.segment_starts[0] == 0
    for text, first_token in list(zip(texts, encoded.segment_starts, strict=True)):
        ends_before = [end <= start for _, end in offsets]
        if start:
            assert first_token == sum(ends_before)
        start += len(text)
    assert list(encoded.segment_starts) == sorted(encoded.segment_starts)


def test_straddling_token_belongs_to_the_later_segment() -> None:
    tokenizer = text_tokenizer("chatml")
    (whole,) = tokenizer.encode(" assistant")[:1]
    encoded = encode_prompt(
        Prompt([Segment.system("x as"), Segment.update("sistant 你"), Segment.suffix("好")], "t"), tokenizer
    )
    assert encoded.token_ids[1] == whole
    assert encoded.segment_starts[1] == 1
    assert len(encoded) - encoded.segment_starts[2] == 3  # the bytes of one character share its offsets
    assert encoded.roles == ("system", "update", "suffix")


@pytest.mark.parametrize("style", STYLES)
def test_plain_prompts_get_the_tokenizers_own_opening_and_no_ending(style: str) -> None:
    tokenizer = text_tokenizer(style)
    ids = encode_prompt(Prompt([Segment.system(""), Segment.suffix("hello there")]), tokenizer).token_ids.tolist()
    expected = tokenizer("hello there")["input_ids"]
    assert ids == (expected[:-1] if expected[-1] == tokenizer.eos_token_id else expected)


@pytest.mark.parametrize("style", ["llama3", "mistral", "phi3"])
def test_opening_is_not_doubled_when_the_text_has_it(style: str) -> None:
    tokenizer = text_tokenizer(style)
    assert tokenizer.bos_token is not None
    ids = encode_prompt(Prompt([Segment.suffix(tokenizer.bos_token + "hello")]), tokenizer).token_ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    typed = encode_prompt(
        Prompt([Segment.suffix(tokenizer.bos_token + "hello", literal=True)]), tokenizer
    ).token_ids.tolist()
    assert typed.count(tokenizer.bos_token_id) == 1
    assert len(typed) > len(ids)


@pytest.mark.parametrize("style", STYLES)
def test_control_characters_are_encoded_when_they_are_all_there_is(style: str) -> None:
    tokenizer = text_tokenizer(style)
    text = "".join(chr(code) for code in (*range(32), 0x7F, 0x85, 0x200B, 0xFFFE))
    ids = encode_prompt(Prompt([Segment.update(text, literal=True)], "t"), tokenizer).token_ids
    assert tokenizer.decode(ids) == text


def test_lone_surrogate_is_refused_with_its_place() -> None:
    prompt = Prompt([Segment.system("abc"), Segment.update("de\ud800f")])
    with pytest.raises(PromptError, match=r"segment 1 \(update\) holds the lone surrogate '\\ud800' at character 2"):
        encode_prompt(prompt, text_tokenizer("chatml"))


def test_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

        def __len__(self) -> int:
            return 1

    slow: Any = Slow()
    with pytest.raises(UnsupportedModelError, match="Slow is not a fast tokenizer"):
        encode_prompt(Prompt([Segment.suffix("a")]), slow)


def test_prompt_is_whole_when_the_tokenizer_was_left_truncating() -> None:
    tokenizer = text_tokenizer("smollm2")
    tokenizer("hello there dog", truncation=True, max_length=1)
    assert (
        tokenizer.decode(encode_prompt(Prompt([Segment.suffix("hello there dog")], "t"), tokenizer).token_ids)
        == "hello there dog"
    )


@pytest.mark.parametrize("style", STYLES)
def test_last_piece_is_what_stands_behind_the_last_special_token(style: str) -> None:
    tokenizer = text_tokenizer(style)
    prompt = _chat_prompt(tokenizer, ["be kind", "hello <|im_end|> [/INST] <|assistant|>"], literal=True)
    encoded, piece = encode_with_last_piece(prompt, tokenizer)
    expected = {"llama3": "\n\n", "phi3": "", "mistral": "", "mistral_legacy": ""}.get(style, "assistant\n")
    assert piece.text == expected
    assert piece.ids.tolist() == encoded.token_ids[len(encoded) - len(piece.ids) :].tolist()
    assert len(piece.ids) == len(tokenizer.encode(expected, add_special_tokens=False))


def test_last_piece_is_the_whole_text_when_there_is_no_special_token() -> None:
    _, piece = encode_with_last_piece(Prompt([Segment.suffix("plain text")], "t"), text_tokenizer("chatml"))
    assert piece.text == "plain text"


@pytest.mark.parametrize("style", STYLES)
@given(reply=CONTENTS)
@settings(max_examples=30, deadline=None)
def test_sampled_ids_return_when_the_reply_is_not_canonical(style: str, reply: str) -> None:
    tokenizer = text_tokenizer(style)
    reply = "ok" + reply.strip()  # what the templates keep as it is
    first = _chat_prompt(tokenizer, ["s", "hello"], literal=True)
    _, (header_text, header_ids) = encode_with_last_piece(first, tokenizer)
    sampled = [token for char in reply for token in tokenizer.encode(char, add_special_tokens=False)]
    decoded = str(tokenizer.decode(sampled, skip_special_tokens=True))
    book = {header_text + decoded: np.array([*header_ids, *sampled])}
    second = _chat_prompt(tokenizer, ["s", "hello", decoded, "go on"], literal=True)
    encoded, _ = encode_with_last_piece(second, tokenizer, book.get)
    reply_idx = next(idx for idx, segment in enumerate(second.segments) if segment.text == decoded)
    begin, end = encoded.segment_starts[reply_idx : reply_idx + 2]
    assert encoded.token_ids[begin:end].tolist() == sampled


def test_segment_borders_inside_a_sampled_piece_follow_its_characters() -> None:
    tokenizer = text_tokenizer("chatml")
    ids = [token for char in "assistant\nhé你 x" for token in tokenizer.encode(char)]
    segments = [
        Segment.system("<|im_start|>assistant\n"),
        Segment.suffix("hé"),
        Segment.update("你"),
        Segment.suffix(" x"),
        Segment.system("<|im_end|>"),
    ]
    encoded = encode_prompt(Prompt(segments, "t"), tokenizer, {"assistant\nhé你 x": np.array(ids)}.get)
    pieces = [tokenizer.decode(part) for part in np.split(encoded.token_ids, encoded.segment_starts[1:])]
    assert pieces == [segment.text for segment in segments]


def test_sampled_ids_are_not_taken_when_they_hold_control_tokens() -> None:
    tokenizer = text_tokenizer("chatml")
    prompt = Prompt([Segment.system("<|im_start|>"), Segment.suffix("hello"), Segment.system("<|im_end|>")], "t")
    bad = np.array([*tokenizer.encode("hel"), tokenizer.convert_tokens_to_ids("<|im_end|>"), *tokenizer.encode("lo")])
    assert (
        encode_prompt(prompt, tokenizer, lambda _: bad).token_ids.tolist()
        == encode_prompt(prompt, tokenizer).token_ids.tolist()
    )


def test_encoding_takes_milliseconds_when_a_user_types_control_tokens() -> None:
    tokenizer = text_tokenizer("chatml")
    prompt = Prompt([Segment.suffix("hello <|im_end|> there " * 500, literal=True)], "t")
    encode_prompt(prompt, tokenizer)
    started = time.perf_counter()
    encode_prompt(prompt, tokenizer)
    assert time.perf_counter() - started < 1.0
