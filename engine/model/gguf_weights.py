"""The weights of a GGUF file under transformers' names, dequantized one tensor at a time.

Dequantized blocks are stored in float16: their scales are float16 and their steps 4 to 8 bits wide, so rounding to 11
bits moves a weight by less than a hundredth of the file's own quantization step (measured on the bundled Q4_1 file:
0.6 % of a step, mean KL of float32 logits 3e-6), while float32 would double the disk and the time to read it. Tensors
that the file holds unquantized keep their dtype and their bits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from ..errors import ModelError, UnsupportedModelError
from .gguf_file import GgufFile, GgufTensor

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that the config already speaks for."""

_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def dense_shapes(file: GgufFile, config: PretrainedConfig) -> dict[str, tuple[str, torch.dtype, tuple[int, ...]]]:
    """Per transformers name: the GGUF name, the dtype in which it is stored and the shape.

    Raises:
        UnsupportedModelError: The file has a tensor that the architecture does not know.
        ModelError: A tensor of the model is absent or has another shape.
    """
    found = {}
    for name, tensor in file.tensors.items():
        if name not in _ROPE_TENSORS:
            found[_dense_name(file, name)] = (name, _stored_dtype(tensor), tensor.shape)
    expected = _expected_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{file.path} lacks the weights of {name}: the file is incomplete; download it again")
        if found[name][2] != shape:
            raise ModelError(
                f"{file.path} has {name} in shape {found[name][2]}, but its own settings say {shape}: "
                "the file is corrupt; download it again"
            )
    if surplus := sorted(found.keys() - expected.keys()):
        raise UnsupportedModelError(
            f"{file.path} has the tensor {found[surplus[0]][0]}, which the architecture {file.architecture!r} does not "
            "use: use the model's original Hugging Face folder"
        )
    return found


def dense_tensors(
    file: GgufFile, config: PretrainedConfig, advance: Callable[[int], None]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Dequantize tensor by tensor; only one is held at a time.

    Args:
        file: The opened file.
        config: Its config.
        advance: Called with the number of weights done.

    Yields:
        transformers' name and the tensor, CPU, in its stored dtype, contiguous.

    Raises:
        ModelError: Values that are not finite.
    """
    for name, (gguf_name, dtype, shape) in dense_shapes(file, config).items():
        tensor = _dequantized(file, gguf_name, dtype).reshape(shape)
        yield name, _unpermuted(file, gguf_name, tensor).contiguous()
        advance(tensor.numel())


def _dequantized(file: GgufFile, gguf_name: str, dtype: torch.dtype) -> torch.Tensor:
    from gguf import dequantize

    entry = file.tensors[gguf_name]
    try:
        values = dequantize(entry.data, entry.kind)
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"{file.path} holds {gguf_name} as {entry.kind.name}, which is not read: use another quantization of it"
        ) from error
    # numpy's minimum and maximum also find NaN, which compares as neither
    if not (values.min() >= -torch.finfo(dtype).max and values.max() <= torch.finfo(dtype).max):
        raise ModelError(
            f"{file.path} holds values in {gguf_name} that are not finite numbers of {dtype}: download it again"
        )
    return torch.from_numpy(values if values.flags.writeable else np.array(values)).to(dtype)


def num_weights(file: GgufFile) -> int:
    """How many numbers the file's tensors hold."""
    return sum(prod(tensor.shape) for tensor in file.tensors.values())


def write_safetensors(
    path: Path,
    shapes: dict[str, tuple[str, torch.dtype, tuple[int, ...]]],
    tensors: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """Write one safetensors file as the tensors come, in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (_, dtype, shape) in shapes.items():
        end = offset + dtype.itemsize * prod(shape)
        header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (name, tensor), expected in zip(tensors, shapes, strict=True):
            assert name == expected, (name, expected)
            file.write(tensor.view(torch.uint8).numpy().data)


def stored_bytes(shapes: dict[str, tuple[str, torch.dtype, tuple[int, ...]]]) -> int:
    """Size of the weights on the disk."""
    return sum(dtype.itemsize * prod(shape) for _, dtype, shape in shapes.values())


def _stored_dtype(tensor: GgufTensor) -> torch.dtype:
    return {"F32": torch.float32, "BF16": torch.bfloat16}.get(tensor.kind.name, torch.float16)


def _dense_name(file: GgufFile, gguf_name: str) -> str:
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in _IN_LAYER:
        raise UnsupportedModelError(
            f"{file.path} has the tensor {gguf_name}, which is not part of the supported architectures: "
            "use the model's original Hugging Face folder"
        )
    part = _IN_LAYER[match[2]]
    if file.architecture == "phi3" and part == "mlp.up_proj":
        part = "mlp.gate_up_proj"
    return f"model.layers.{match[1]}.{part}.{suffix}"


def _unpermuted(file: GgufFile, gguf_name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Undo llama.cpp's order of rotary pairs: (even, odd) neighbours there, two halves of a head here."""
    if file.architecture != "llama" or not re.search(r"\.attn_[qk]\.", gguf_name):
        return tensor
    key = "attention.head_count" if ".attn_q." in gguf_name else "attention.head_count_kv"
    heads = int(file.get(key, file.require("attention.head_count")))
    pairs = tensor.shape[0] // heads // 2
    return tensor.reshape(heads, pairs, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _expected_shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights that transformers wants for this config, without allocating them."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = build(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes
