"""Incremental decoding against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cacheslide_agents.engine.run.detokenize import Detokenizer
from tests.engine.text_tokenizers import STYLES, text_tokenizer

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [
                "The quick",
                " ",
                "  ",
                "\n",
                "é",
                "e\u0301",
                "你好",
                "日本語",
                "👩‍👩‍👧",
                "🇫🇷",
                "\ufffd",
                "<|im_end|>",
                "▁",
            ]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    ),
    max_size=12,
).map("".join)


def _pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("style", STYLES)
@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_pieces_add_up_to_the_whole_when_ids_come_from_text(style: str, text: str) -> None:
    tokenizer = text_tokenizer(style)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_add_up_to_the_whole_when_ids_are_random(style: str, data: st.DataObject) -> None:
    tokenizer = text_tokenizer(style)
    byte_ids = [
        tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in (0xE4, 0xBD, 0xA0, 0xC3, 0xF0, 0x9F, 0x0A)
    ]
    any_id = st.integers(0, len(tokenizer) + 2)  # beyond the last token too, as in a padded vocabulary
    known = [token_id for token_id in byte_ids if isinstance(token_id, int) and token_id != tokenizer.unk_token_id]
    ids = data.draw(st.lists(st.one_of(any_id, st.sampled_from(known)) if known else any_id, max_size=40))
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("style", STYLES)
def test_characters_come_whole_when_their_bytes_are_several_tokens(style: str) -> None:
    tokenizer = text_tokenizer(style)
    ids = tokenizer.encode("dog 你 🦊 dog", add_special_tokens=False)
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == "dog 你 🦊 dog"
    assert any("你" in piece for piece in pieces)
    assert not pieces[-1]


@pytest.mark.parametrize("style", ["chatml", "mistral"])
def test_unfinished_character_is_replaced_when_the_text_ends(style: str) -> None:
    tokenizer = text_tokenizer(style)
    ids = tokenizer.encode("dog 🦊", add_special_tokens=False)[:-1]
    pieces = _pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces[:-1])
    assert pieces[-1].endswith("\ufffd")
    assert "".join(pieces) == tokenizer.decode(ids)


def test_leading_space_stays_when_the_context_is_known() -> None:
    tokenizer = text_tokenizer("mistral")
    ids = tokenizer.encode("dog", add_special_tokens=False)
    context = tokenizer.encode("the[/INST]", add_special_tokens=False)
    for context_ids, expected in (((), "dog"), (context, " dog"), (context[-1:], "dog")):
        detokenizer = Detokenizer(tokenizer, context_ids)
        assert "".join([*map(detokenizer.push, ids), detokenizer.finish()]) == expected


@pytest.mark.parametrize("scheme", ["always", "never"])
@given(ids=st.lists(st.integers(0, 7), max_size=12))
@settings(max_examples=100, deadline=None)
def test_pieces_add_up_to_the_whole_when_words_are_marked(scheme: str, ids: list[int]) -> None:
    words = {word: idx for idx, word in enumerate(["<unk>", "▁", "▁dog", "dog", "▁▁", ".", "\ufffd", "▁你"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    assert "".join(_pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_cost_of_a_token_stays_when_the_text_is_long() -> None:
    tokenizer = text_tokenizer("mistral")
    detokenizer = Detokenizer(tokenizer)
    for token_id in tokenizer.encode("The quick brown fox " * 50, add_special_tokens=False):
        detokenizer.push(token_id)
        assert len(detokenizer._window) == 1
