"""Tiny GGUF files written from tiny models, in llama.cpp's layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.tiny import SPECIAL_TOKENS, tiny_model, tiny_tokenizer

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_gguf(
    path: Path,
    family: str = "llama",
    *,
    kind: str = "F32",
    architecture: str | None = None,
    keys: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    without: str | None = None,
    pre: str = "smollm",
    **overrides: Any,
) -> PreTrainedModel:
    """Write `tiny_model(family, **overrides)` as a GGUF file and return the model.

    Args:
        path: The file.
        family: As in `tiny_model`; Mistral is filed under `llama`, as llama.cpp does.
        kind: GGUF type of the matrices (`F32`, `F16`, `BF16`, `Q8_0`, `Q4_1`); norms and biases are F32.
        architecture: What `general.architecture` says, if not the family's own.
        keys: Architecture keys that are added, such as `rope.scaling.type`.
        extra_tensors: Tensors that are added under their GGUF names.
        without: GGUF name of a tensor that is left out.
        pre: The splitting rule of the tokenizer.
        overrides: Fields of the model's config.
    """
    model = tiny_model(family, **overrides)
    config: Any = model.config
    layout = "llama" if family == "mistral" else family
    writer = GGUFWriter(path, architecture or layout)
    writer.add_name(f"Tiny {family}")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    if family in ("mistral", "phi3") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    for key, value in (keys or {}).items():
        name = f"{architecture or layout}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    _add_tokenizer(writer, pre)
    for dense_name, weight in model.state_dict().items():
        if config.tie_word_embeddings and dense_name == "lm_head.weight":
            continue
        name = _gguf_name(dense_name)
        if name == without:
            continue
        if layout == "llama" and any(part in name for part in (".attn_q.", ".attn_k.")):
            heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
        array = weight.to(torch.float32).numpy()
        quantization = GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        writer.add_tensor(name, quantize(array, quantization), raw_dtype=quantization)
    for name, array in (extra_tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert config.model_type in CONFIG_MAPPING
    return model


def _gguf_name(dense_name: str) -> str:
    stem, _, suffix = dense_name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{suffix}"


def _add_tokenizer(writer: GGUFWriter, pre: str) -> None:
    import json

    tokenizer = tiny_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)
