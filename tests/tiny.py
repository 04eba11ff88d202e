"""Tiny random models and tokenizers, built in code: no network, no files, the same ones on every run.

The weights are wider than a fresh initialisation (and norms and biases are not at their neutral values), so that
a forgotten norm, bias or scale changes the logits and greedy answers do not hang on rounding. Not for training.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
VOCAB_SIZE = 384

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
"""The ids of these are their places in this tuple, as in SmolLM2, whose first three tokens are the same."""

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOLLM2 = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LLAMA3 = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}"
    "{% set ns = namespace(system='') %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{% set ns.system = message['content'] + '\n\n' %}"
    "{% elif message['role'] == 'user' %}"
    "{{ '[INST] ' + ns.system + message['content'] + ' [/INST]' }}{% set ns.system = '' %}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ raise_exception('only system, user and assistant roles are supported') }}{% endif %}"
    "{% endfor %}"
)
_QWEN3 = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)

TEMPLATES = {"chatml": _CHATML, "smollm2": _SMOLLM2, "llama3": _LLAMA3, "mistral": _MISTRAL, "qwen3": _QWEN3}
"""Chat templates in the styles that adapters must render; a name for `tiny_tokenizer`."""

_BOS_EOS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
}

_SENTENCES = (
    "The quick brown fox jumps over the lazy dog and the dog sleeps on.",
    "You are a helpful assistant with a memory of what the user told you.",
    "user: What is the name of the user's sister? assistant: Her name is Alice.",
    "The memory says that the user lives in Paris, likes tea and works at a library.",
    "system instructions come first, then the memory, then the history of messages.",
    "Yesterday we walked to the market, bought some bread, and talked about the weather.",
)


def tiny_tokenizer(template: str | None = "chatml") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` ids that encodes and decodes any text without loss.

    Args:
        template: A name of `TEMPLATES`, a Jinja template, or None for a tokenizer without one.
    """
    bos, eos = _BOS_EOS.get(template or "", ("<|im_start|>", "<|im_end|>"))
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerFast = build(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token=bos,
        eos_token=eos,
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        chat_template=TEMPLATES.get(template, template) if template is not None else None,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    return tokenizer


def tiny_model(family: str = "llama", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random decoder of 4 layers, 4 heads over 2 KV heads of width 16, float32, in eval mode.

    Args:
        family: One of `FAMILIES`, or any causal `model_type` of transformers.
        seed: Of the weights; the global generator is left as it was.
        overrides: Fields of the family's config, such as `num_key_value_heads` or `rope_parameters`.
    """
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if family == "mistral":
        settings["sliding_window"] = None
    if family == "qwen3":
        settings["head_dim"] = 16
    config = CONFIG_MAPPING[family](**{**settings, **overrides})
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = build(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    loaded: PreTrainedModel = model.eval().requires_grad_(False)
    return loaded


def tiny_checkpoint(folder: Path, family: str = "llama", template: str | None = "chatml", **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer as a Hugging Face folder; returns the folder."""
    tiny_model(family, **overrides).save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


@lru_cache(maxsize=1)
def _trained_tokenizer() -> str:
    """The BPE tokenizer as JSON; training takes milliseconds and is the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 2, trainer)
    return str(tokenizer.to_str())
