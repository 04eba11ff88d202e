"""GGUF files as dense Hugging Face checkpoints: converted once into the user's cache folder, then only loaded.

The copy appears under its final name by one rename, so it is whole or not there; one process converts while others
wait; a manifest of sizes and digests tells a damaged copy from a good one. Nothing here runs a model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from .cache_folder import exclusive, replaced_folder, require_space, sha256_of, source_digest, unwritable
from .gguf_file import GgufFile
from .gguf_metadata import gguf_config, read_gguf, stop_token_ids
from .gguf_tokenizer import gguf_tokenizer
from .gguf_weights import dense_shapes, dense_tensors, num_weights, stored_bytes, write_safetensors
from .progress import Say, long_step, say

CONVERSION = 1
"""Raise it when the conversion writes something else from the same file; older copies are then not used."""

MANIFEST = "manifest.json"
_SPARE_BYTES = 32 << 20
"""Room for tokenizer, config and file system overhead beside the weights."""


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file's model in memory, for when no dense copy can be written.

    Attributes:
        config: Its transformers config.
        tokenizer: Its tokenizer.
        generation: Its generation settings (stop tokens).
        weights: By transformers' names, CPU, model dtype.
    """

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig
    weights: dict[str, torch.Tensor]


def dense_copy(source: Path, cache: Path, progress: Say | None = None) -> Path:
    """The dense checkpoint of a GGUF file, converted now if there is no good copy yet.

    Args:
        source: The GGUF file.
        cache: The cache folder; made if it does not exist.
        progress: Takes lines for the person who waits; None writes to stderr.

    Returns:
        A folder that `from_pretrained` reads: weights, config, tokenizer, chat template, generation config.

    Raises:
        ModelError: The file is corrupt or incomplete.
        UnsupportedModelError: The file's architecture or tokenizer is not read.
        CacheFolderError: The cache folder is full or cannot be written; nothing half-written is left.
    """
    digest = source_digest(source, cache)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip(".-") or "model"
    target = cache / "models" / f"{stem}-{digest[:12]}-v{CONVERSION}"
    if is_whole(target):
        return target
    title = f"converting {source.name} (once)"
    line = progress or say
    with exclusive(target, on_wait=lambda: line(f"another process is {title}; waiting for it")):
        if is_whole(target):
            return target
        if target.exists():
            line(f"the converted copy {target} is damaged; it is made again")
        _convert(source, digest, target, title, progress)
    return target


def is_whole(folder: Path) -> bool:
    """Whether a converted copy is as it was written.

    Sizes are compared on every load; digests only of files touched since, because reading every byte would cost more
    than loading them.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["conversion"] != CONVERSION:
            return False
        for name, entry in manifest["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != entry["bytes"]:
                return False
            if stat.st_mtime_ns != entry["mtime_ns"] and sha256_of(folder / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def load_in_memory(source: Path, dtype: torch.dtype, progress: Say | None = None) -> GgufModel:
    """Dequantize a GGUF file into memory, writing nothing.

    Raises:
        ModelError: As `dense_copy`.
        UnsupportedModelError: As `dense_copy`.
    """
    file = read_gguf(source)
    config = gguf_config(file)
    tokenizer = gguf_tokenizer(file)
    with long_step(f"dequantizing {source.name} into memory", num_weights(file), progress) as advance:
        weights = {name: tensor.to(dtype) for name, tensor in dense_tensors(file, config, advance)}
    return GgufModel(config, tokenizer, _generation(file), weights)


def _convert(source: Path, digest: str, target: Path, title: str, progress: Say | None) -> None:
    """Write the checkpoint; the caller holds the lock of `target`."""
    file = read_gguf(source)
    config = gguf_config(file)
    config.dtype = torch.float16
    tokenizer = gguf_tokenizer(file)
    shapes = dense_shapes(file, config)
    with replaced_folder(target) as scratch:
        require_space(scratch, stored_bytes(shapes) + _SPARE_BYTES)
        with long_step(title, num_weights(file), progress) as advance:
            write_safetensors(scratch / "model.safetensors", shapes, dense_tensors(file, config, advance))
        config.save_pretrained(scratch)
        _generation(file).save_pretrained(scratch)
        _save_tokenizer(tokenizer, scratch)
        manifest = {
            "conversion": CONVERSION,
            "source": {"name": source.name, "bytes": source.stat().st_size, "sha256": digest},
            "files": {path.name: asdict(_Entry.of(path)) for path in sorted(scratch.iterdir())},
        }
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


@dataclass(frozen=True)
class _Entry:
    bytes: int
    sha256: str
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> _Entry:
        stat = path.stat()
        return cls(stat.st_size, sha256_of(path), stat.st_mtime_ns)


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the Rust side raises a bare exception when the disk is full
        if found := re.search(r"os error (\d+)", str(error)):
            number = int(found[1])
            raise unwritable(folder.parent, OSError(number, os.strerror(number))) from error
        raise


def _generation(file: GgufFile) -> GenerationConfig:
    stops = stop_token_ids(file)
    build: Callable[..., Any] = GenerationConfig
    generation: GenerationConfig = build(
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=list(stops) if len(stops) > 1 else (stops[0] if stops else None),
        pad_token_id=file.fields.get("tokenizer.ggml.padding_token_id"),
    )
    return generation
