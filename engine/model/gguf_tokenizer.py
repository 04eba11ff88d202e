"""The tokenizer of a GGUF file.

A file names the rule that splits text before merging only by a short word (`tokenizer.ggml.pre`). transformers' own
reader falls back to GPT-2's rule for words that it does not know, SmolLM's among them: spaces or empty lines before a
digit then become other tokens than those the model was trained on (an empty line before "1." two instead of one). So
byte-level vocabularies are built here, and an unknown word is refused. Sentencepiece vocabularies (Llama 2, Mistral,
Phi-3) are left to transformers.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError, UnsupportedModelError
from .gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: never typed by a person, and typed but always whole."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_gpt2() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "refact": _digits_then_gpt2,
    "command-r": _digits_then_gpt2,
    "llama-bpe": lambda: _split(_LLAMA3_SPLIT),
    "llama3": lambda: _split(_LLAMA3_SPLIT),
    "llama-v3": lambda: _split(_LLAMA3_SPLIT),
    "qwen2": lambda: _split(_QWEN2_SPLIT),
    "deepseek-r1-qwen": lambda: _split(_QWEN2_SPLIT),
    "tekken": lambda: _split(_TEKKEN_SPLIT),
}
"""By `tokenizer.ggml.pre`: how text is split before byte pairs are merged."""


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Build the tokenizer with its special tokens and chat template.

    Raises:
        UnsupportedModelError: A kind of vocabulary or a splitting rule that is not known here.
        ModelError: The vocabulary is absent or broken.
    """
    kind = file.fields.get("tokenizer.ggml.model")
    if kind == "llama":
        return _sentencepiece(file)
    if kind != "gpt2":
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of kind {kind!r}; supported in GGUF files are gpt2 (byte-level) and llama "
            "(sentencepiece)"
        )
    try:
        return _byte_level(file)
    except UnsupportedModelError:
        raise
    except Exception as error:  # tokenizers raises bare exceptions for a broken vocabulary
        raise ModelError(f"{file.path} has a broken tokenizer ({error}): download it again") from error


def _byte_level(file: GgufFile) -> PreTrainedTokenizerBase:
    fields = file.fields
    rule = fields.get("tokenizer.ggml.pre", "default")
    if rule not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{file.path} splits text by the rule {rule!r}, which is not known here; known are "
            f"{', '.join(PRE_TOKENIZERS)}: use the model's original Hugging Face folder"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    whole_words = rule.startswith("llama") or rule == "tekken"
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    if "qwen" in rule:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        AddedToken(token, normalized=False, special=token_kind == _CONTROL)
        for token, token_kind in zip(tokens, kinds, strict=True)
        if token_kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    names = _special_names(fields, tokens)
    if fields.get("tokenizer.ggml.add_bos_token") and (bos := names.get("bos_token")) is not None:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
                ),
            ]
        )
    build: Any = PreTrainedTokenizerFast
    built: PreTrainedTokenizerBase = build(
        tokenizer_object=tokenizer,
        **names,
        extra_special_tokens=[str(token.content) for token in added if token.special],
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(file.require("context_length")),
    )
    return built


def _special_names(fields: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _sentencepiece(file: GgufFile) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    try:
        # transformers looks for other files beside the GGUF, so it gets a folder with nothing else in it
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder) / "model.gguf"
            try:
                alone.symlink_to(file.path.absolute())
            except OSError:
                shutil.copyfile(file.path, alone)
            tokenizer: PreTrainedTokenizerBase = load(folder, gguf_file=alone.name)
    except Exception as error:
        raise ModelError(f"{file.path} has a tokenizer that transformers cannot read ({error})") from error
    tokenizer.chat_template = file.fields.get("tokenizer.chat_template")
    return tokenizer
