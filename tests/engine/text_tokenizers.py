"""Small tokenizers in the styles that prompts must be encoded for, with a chat template each."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.tiny import TEMPLATES, tiny_tokenizer

_PHI3 = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
_SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "You are a helpful assistant with a memory of what the user told you.",
    "user assistant system memory hello there how are you today",
)
STYLES = ("chatml", "smollm2", "llama3", "qwen3", "mistral", "mistral_legacy", "phi3")


@cache
def text_tokenizer(style: str) -> PreTrainedTokenizerFast:
    """A tokenizer of one of `STYLES`; the same object each time."""
    if style == "llama3":
        return _llama3()
    if style == "qwen3":
        return _qwen3()
    if style in ("mistral", "mistral_legacy", "phi3"):
        return _sentencepiece(style)
    return tiny_tokenizer(style)


def _wrap(tokenizer: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    build: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=4096, **settings
    )
    return wrapped


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.add_special_tokens(special)
    return tokenizer


def _llama3() -> PreTrainedTokenizerFast:
    bos = "<|begin_of_text|>"
    tokenizer = _byte_level([bos, "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return _wrap(tokenizer, bos_token=bos, eos_token="<|eot_id|>", chat_template=TEMPLATES["llama3"])


def _qwen3() -> PreTrainedTokenizerFast:
    tokenizer = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>", "<plain_word>")])
    return _wrap(tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATES["qwen3"])


def _sentencepiece(style: str) -> PreTrainedTokenizerFast:
    """BPE with byte fallback and a space before the text, as SentencePiece models are converted."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=8
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    state["model"] |= {"byte_fallback": True, "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if style != "mistral":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    if style == "phi3":
        marks = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
        tokenizer.add_special_tokens([AddedToken(mark, rstrip=True, normalized=False) for mark in marks])
        return _wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=_PHI3)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in ("[INST]", "[/INST]")])
    template = TEMPLATES["mistral"]
    return _wrap(tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template)
