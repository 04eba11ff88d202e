"""A Hugging Face folder, looked over before any weight is read: is it whole, and can it be served exactly?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError, UnsupportedModelError

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("tekken.json",))
_LFS_POINTER = b"version https://git-lfs"


def supported_families() -> tuple[str, ...]:
    """The `model_type`s that the decoder serves exactly."""
    from . import families

    return tuple(families.FAMILIES)


def check_folder(folder: Path) -> None:
    """Look over config, tokenizer and weights of a Hugging Face folder.

    Raises:
        ModelError: A file is missing, cut short or unreadable; the message names it.
        UnsupportedModelError: The model cannot be served exactly.
    """
    check_config_json(read_config(folder / "config.json"), str(folder))
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model or vocab.json with merges.txt): "
            "copy the tokenizer's files of the model into it"
        )
    for path in weight_files(folder):
        check_safetensors(path)


def read_config(path: Path) -> dict[str, Any]:
    """Read a `config.json`.

    Raises:
        ModelError: It is missing or no JSON object.
    """
    if not path.is_file():
        raise ModelError(f"{path.parent} has no config.json: give a Hugging Face model folder, a GGUF file or a hub id")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download it again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds no JSON object: download it again")
    return config


def check_config_json(config: dict[str, Any], name: str) -> None:
    """Refuse what cannot be served exactly, by the config alone.

    Args:
        config: The content of `config.json`.
        name: The model as the person named it, for the message.

    Raises:
        UnsupportedModelError: Quantized weights, an encoder, or an unknown architecture.
    """
    families = supported_families()
    supported = f"supported are dense decoder-only models of the types {', '.join(families)}"
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"{name} has weights quantized by {method!r} without a dense form: use the model's unquantized checkpoint "
            f"or a GGUF file; {supported}"
        )
    model_type = config.get("model_type")
    named = config.get("architectures")
    architectures = [str(architecture) for architecture in named] if isinstance(named, list) else []
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{name} ({model_type}) is an encoder-decoder, not a decoder: {supported}")
    if architectures and not any(architecture.endswith("ForCausalLM") for architecture in architectures):
        raise UnsupportedModelError(f"{name} is a {architectures[0]}, which does not generate text: {supported}")
    if model_type not in families:
        raise UnsupportedModelError(f"{name} is of type {model_type!r}, which is not known here: {supported}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or the shards of its index.

    Raises:
        ModelError: There are none, or a shard is missing.
    """
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        remedy = (
            f"convert {pickled[0]} to safetensors, since loading pickles runs code"
            if pickled
            else "copy or download the weights into it"
        )
        raise ModelError(f"{folder} has no weights ({WEIGHTS} or {WEIGHTS_INDEX} with its shards): {remedy}")
    weight_map = read_config(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map: download it again")
    paths = [folder / name for name in sorted({str(name) for name in weight_map.values()})]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(paths)} weight files, {missing[0]} first: download them"
        )
    return paths


def check_safetensors(path: Path) -> None:
    """Compare a safetensors file's size with what its own header promises.

    Raises:
        ModelError: It is cut short, a Git LFS pointer or something else.
    """
    remedy = "delete it and download it again"
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header_bytes = int.from_bytes(start, "little")
            if start and _LFS_POINTER.startswith(start):
                raise ModelError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`")
            if len(start) < 8 or 8 + header_bytes > size:
                raise ModelError(f"{path} ({size} bytes) is not a complete safetensors file: {remedy}")
            header = json.loads(file.read(header_bytes))
            end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} has a broken header ({error}): {remedy}") from error
    if 8 + header_bytes + end != size:
        raise ModelError(f"{path} has {size} bytes, but its header promises {8 + header_bytes + end}: {remedy}")
