"""Which added tokens control the model, and how they are written as text."""

from __future__ import annotations

import gc
import weakref

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cacheslide_agents.engine.errors import PromptError
from cacheslide_agents.engine.segments import Prompt, Segment
from cacheslide_agents.engine.tokenization import encode_prompt
from cacheslide_agents.engine.vocabulary import Vocabulary
from tests.engine.text_tokenizers import text_tokenizer
from tests.tiny import tiny_tokenizer


def _merging_tokenizer() -> PreTrainedTokenizerFast:
    """Its own merges build the special token `<a>` from letters, and `!` is special by itself."""
    vocab = {token: idx for idx, token in enumerate(["<", "a", ">", "<a", "<a>", "a>", "!", "\n"])}
    backend = Tokenizer(models.BPE(vocab, [("<", "a"), ("<a", ">"), ("a", ">")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<a>", "!"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


def test_control_tokens_are_the_special_ones_and_those_that_the_template_writes() -> None:
    tokenizer = text_tokenizer("qwen3")
    vocabulary = Vocabulary.of(tokenizer)
    controls = {tokenizer.convert_ids_to_tokens(token_id) for token_id in vocabulary.control_ids}
    assert controls == {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    assert vocabulary.special_ids < vocabulary.control_ids


def test_vocabulary_is_made_anew_when_tokens_or_the_template_change() -> None:
    tokenizer = tiny_tokenizer("chatml")
    first = Vocabulary.of(tokenizer)
    assert Vocabulary.of(tokenizer) is first
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    token_id = tokenizer.convert_tokens_to_ids("<tool>")
    assert token_id not in Vocabulary.of(tokenizer).control_ids
    tokenizer.chat_template = "{{ '<tool>' + messages[0]['content'] }}"
    assert token_id in Vocabulary.of(tokenizer).control_ids


def test_tokenizer_is_not_kept_alive() -> None:
    tokenizer = tiny_tokenizer("chatml")
    Vocabulary.of(tokenizer)
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_typed_control_token_is_cut_when_merges_would_build_it() -> None:
    tokenizer = _merging_tokenizer()
    ids = encode_prompt(Prompt([Segment.suffix("a<a>a", literal=True)], "t"), tokenizer).token_ids
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["a", "<", "a>", "a"]


def test_typed_control_token_is_refused_when_it_cannot_be_cut() -> None:
    with pytest.raises(PromptError, match="control token '!', which this tokenizer cannot write as text"):
        encode_prompt(Prompt([Segment.suffix("a!", literal=True)], "t"), _merging_tokenizer())


@pytest.mark.parametrize(
    ("style", "opening", "byte_level", "byte_tokens"),
    [("chatml", 0, True, False), ("llama3", 1, True, False), ("mistral", 1, False, True), ("phi3", 1, False, True)],
)
def test_pipeline_is_recognised(style: str, opening: int, byte_level: bool, byte_tokens: bool) -> None:
    vocabulary = Vocabulary.of(text_tokenizer(style))
    assert len(vocabulary.opening_ids) == opening
    assert (vocabulary.is_byte_level, vocabulary.has_byte_tokens) == (byte_level, byte_tokens)
