"""What a GGUF file says of its model, as the transformers config of the same model.

Reads no weights. What is not known to be served exactly as llama.cpp does is refused, never guessed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ..errors import ModelError, UnsupportedModelError
from .gguf_file import GgufFile, open_gguf

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Names in `general.architecture` that are read; llama.cpp files Mistral under `llama`."""

_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and refuse what cannot be converted.

    Raises:
        ModelError: The file is no GGUF, cut short or corrupt.
        UnsupportedModelError: An architecture that is not read, or one part of a split file.
    """
    file = open_gguf(path)
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} has the architecture {file.architecture!r}; supported in GGUF files are {', '.join(ARCHITECTURES)}"
        )
    if (num_parts := file.fields.get("split.count", 0)) > 1:
        raise UnsupportedModelError(
            f"{path} is one of {num_parts} parts: merge them first with `llama-gguf-split --merge`"
        )
    return file


def gguf_config(file: GgufFile) -> PretrainedConfig:
    """The config under which transformers runs this model as llama.cpp does.

    Raises:
        ModelError: A key that the architecture needs is absent.
        UnsupportedModelError: Its positions or tensors are of a kind that is not read.
    """
    model_type = file.architecture
    window = file.get("attention.sliding_window")
    if model_type == "llama" and (window or "mistral" in str(file.fields.get("general.name", "")).lower()):
        model_type = "mistral"
    heads = int(file.require("attention.head_count"))
    hidden = int(file.require("embedding_length"))
    head_dim = int(file.get("attention.key_length", hidden // heads))
    context = int(file.require("context_length"))
    stops = stop_token_ids(file)
    settings: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": int(file.require("feed_forward_length")),
        "num_hidden_layers": int(file.require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
        "max_position_embeddings": context,
        "rms_norm_eps": _decimal(file.require("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope_parameters(file, head_dim, context),
        "bos_token_id": file.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(stops) if len(stops) > 1 else (stops[0] if stops else None),
        "pad_token_id": file.fields.get("tokenizer.ggml.padding_token_id"),
    }
    if model_type != "phi3":
        settings["head_dim"] = head_dim
    if model_type == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        settings["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    if model_type in ("mistral", "phi3"):
        settings["sliding_window"] = int(window) if window else None
    if model_type == "phi3":
        settings["original_max_position_embeddings"] = int(file.get("rope.scaling.original_context_length", context))
    return CONFIG_MAPPING[model_type](**settings)


def stop_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end an answer: end of sequence, of turn and of message, in the file's order, each once."""
    ids = (file.fields.get(f"tokenizer.ggml.{key}") for key in _STOP_KEYS)
    return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding: some files state a vocabulary without its padding."""
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: download it again")
    return file.tensors["token_embd.weight"].shape[0]


def _rope_parameters(file: GgufFile, head_dim: int, context_tokens: int) -> dict[str, Any]:
    """The rotary embedding; scaling that transformers' own GGUF reader drops is read here."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _decimal(file.get("rope.freq_base", 10000.0))}
    rotary_dim = int(file.get("rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    kind = file.get("rope.scaling.type", "none")
    original = int(file.get("rope.scaling.original_context_length", context_tokens))
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_scaling(file, rope["rope_theta"], rotary_dim)
    if "rope_factors_long.weight" in file.tensors:
        return rope | {
            "rope_type": "longrope",
            "short_factor": _factors(file, "rope_factors_short.weight"),
            "long_factor": _factors(file, "rope_factors_long.weight"),
            "original_max_position_embeddings": original,
            "factor": context_tokens / original,
            "attention_factor": _decimal(file.get("rope.scaling.attn_factor", 1.0)),
        }
    if kind == "none":
        return rope
    factor = _decimal(file.require("rope.scaling.factor"))
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UnsupportedModelError(
        f"{file.path} scales its positions by {kind!r}; supported in GGUF files are none, linear, yarn, longrope and "
        "Llama 3's"
    )


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    """Llama 3's scaling: the file holds only its result, so the published settings are tried and must reproduce it."""
    stored = np.asarray(_factors(file, "rope_freqs.weight"))
    wavelengths = 2 * np.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path} has rotary factors that are not Llama 3's published ones: use the model's original "
            "Hugging Face folder"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _factors(file: GgufFile, name: str) -> list[float]:
    return [_decimal(value) for value in file.tensors[name].data.reshape(-1).view(np.float32)]


def _decimal(value: Any) -> float:
    """A float32 of the file as the shortest decimal that means it: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
