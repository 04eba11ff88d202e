"""From a setting to a model in memory: a folder, a hub id, a GGUF file or the bundled model.

Everything that can be refused is refused before weights are read. What the decoder makes of the model is elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..config import EngineConfig
from ..errors import CacheFolderError, ModelError
from ..position.rope import rope_spec
from .bundled import BUNDLED_NAME, bundled_model
from .cache_folder import cache_folder
from .checkpoint import check_folder
from .gguf import dense_copy, load_in_memory
from .gguf_metadata import gguf_config, read_gguf
from .gguf_tokenizer import gguf_tokenizer
from .hub import fetch_from_hub, is_hub_id
from .identity import ModelIdentity
from .placement import resolve_device_and_dtype
from .progress import Say
from .support import check_config


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be read by the decoder.

    Attributes:
        model: On its device, in its dtype, in eval mode, without gradients.
        tokenizer: Its tokenizer, with the chat template where there is one.
        path: The dense checkpoint in use; the GGUF file itself where no dense copy could be written.
        name: The model as a person calls it.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    path: Path
    name: str


def load_model(config: EngineConfig, progress: Say | None = None) -> LoadedModel:
    """Load what `config.model` names.

    Args:
        config: The settings; `model`, `device`, `dtype`, `cache_dir` and `offline` are read.
        progress: Takes lines about long steps; None writes them to stderr.

    Raises:
        ConfigError: A device that is not there.
        ModelNotInstalledError: The bundled model is asked for and absent.
        ModelError: The model cannot be found or read.
        UnsupportedModelError: The model cannot be served exactly.

    Warns:
        RuntimeWarning: The cache folder cannot be written, so that a GGUF file was dequantized into memory and will be
            again next time.
    """
    device, dtype = resolve_device_and_dtype(config.device, config.dtype)
    source = _locate(config)
    if source.is_gguf:
        return _load_gguf(source.path, source.name, config, device, dtype, progress)
    return _load_folder(source.path, source.name, config, device, dtype)


def load_tokenizer(config: EngineConfig) -> tuple[PreTrainedTokenizerBase, ModelIdentity]:
    """The tokenizer of what `config.model` names, and whose it is; no weight is read and nothing is converted.

    Raises:
        ModelNotInstalledError: The bundled model is asked for and absent.
        ModelError: The model cannot be found or read.
        UnsupportedModelError: The model cannot be served exactly.
    """
    source = _locate(config)
    if source.is_gguf:
        file = read_gguf(source.path)
        model_config, tokenizer = gguf_config(file), gguf_tokenizer(file)
        _check_served(model_config, config)
    else:
        model_config, tokenizer = _read_folder(source.path, config)
    return tokenizer, ModelIdentity.of(source.name, model_config, tokenizer)


class _Source(NamedTuple):
    """Where a model lies: a folder or a GGUF file, and what people call it."""

    path: Path
    name: str
    is_gguf: bool


def _locate(config: EngineConfig) -> _Source:
    """Finds what `config.model` names; a hub is asked if it must."""
    if config.model is None:
        return _Source(bundled_model(cache_folder(config.cache_dir)), BUNDLED_NAME, True)
    path = Path(config.model).expanduser()
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").is_file() or not ggufs:
            _refuse_adapter(path)
            return _Source(path.absolute(), path.absolute().name, False)
        if len(ggufs) > 1:
            raise ModelError(f"{path} has {len(ggufs)} GGUF files, {ggufs[0].name} first: give the path of one of them")
        path = ggufs[0]
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{path} is not a GGUF file: give a .gguf file, a Hugging Face folder or a hub id")
        return _Source(path.absolute(), path.stem, True)
    name = str(config.model)
    if isinstance(config.model, Path) or name.lower().endswith(".gguf") or not is_hub_id(name):
        raise ModelError(f"{path} does not exist: give a Hugging Face folder, a GGUF file or a hub id (owner/name)")
    return _Source(fetch_from_hub(name, offline=config.offline), name, False)


def _load_gguf(
    source: Path, name: str, config: EngineConfig, device: torch.device, dtype: torch.dtype, progress: Say | None
) -> LoadedModel:
    try:
        folder = dense_copy(source, cache_folder(config.cache_dir), progress)
    except CacheFolderError as error:
        warnings.warn(
            f"{error}. Until then {source.name} is dequantized into memory on every start",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        return _load_folder(folder, name, config, device, dtype)
    gguf = load_in_memory(source, dtype, progress)
    _check_served(gguf.config, config)
    model = _from_pretrained(None, str(source), dtype, config=gguf.config, state_dict=gguf.weights)
    model.generation_config = gguf.generation
    return LoadedModel(_placed(model, device), gguf.tokenizer, source, name)


def _load_folder(
    folder: Path, name: str, config: EngineConfig, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    _, tokenizer = _read_folder(folder, config)
    return LoadedModel(_placed(_from_pretrained(folder, str(folder), dtype), device), tokenizer, folder, name)


def _read_folder(folder: Path, config: EngineConfig) -> tuple[Any, PreTrainedTokenizerBase]:
    """The model's configuration and tokenizer, once everything about them is known to be served."""
    check_folder(folder)
    read: Any = AutoConfig.from_pretrained
    try:
        model_config = read(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything for values that it does not expect
        raise ModelError(f"{folder / 'config.json'} cannot be read ({error}): download it again") from error
    _check_served(model_config, config)
    load: Any = AutoTokenizer.from_pretrained
    try:
        tokenizer: PreTrainedTokenizerBase = load(folder, local_files_only=True)
    except Exception as error:  # tokenizers and transformers raise anything for broken files
        raise ModelError(f"the tokenizer in {folder} cannot be read ({error}): download its files again") from error
    return model_config, tokenizer


def _check_served(model_config: Any, config: EngineConfig) -> None:
    """Refuse what the decoder would refuse, before any weight is read."""
    check_config(model_config)
    rope_spec(model_config, config.max_context_tokens)


def _from_pretrained(folder: Path | None, named: str, dtype: torch.dtype, **given: Any) -> PreTrainedModel:
    """Load by transformers' own loader, quiet and strict: weights that are absent would else be drawn at random."""
    auto: Any = AutoModelForCausalLM
    # the auto class wants a folder; without one the config says which class it is
    load = auto.from_pretrained if folder is not None else auto._model_mapping[type(given["config"])].from_pretrained
    with _no_progress_bars():
        try:
            model, found = load(
                folder,
                dtype=dtype,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **given,
            )
        except Exception as error:
            raise ModelError(f"the model {named} cannot be loaded ({error})") from error
    for key, what in (("missing_keys", "lack"), ("mismatched_keys", "have another shape for")):
        if wrong := sorted(str(name) for name in found.get(key, ())):
            raise ModelError(
                f"the weights of {named} {what} {len(wrong)} tensors that its config.json needs, {wrong[0]} first: "
                "the checkpoint is incomplete or config.json belongs to another model"
            )
    loaded: PreTrainedModel = model
    return loaded


def _placed(model: Any, device: torch.device) -> PreTrainedModel:
    try:
        placed: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit on {device} ({error}): choose device='cpu' or a smaller model"
        ) from error
    return placed


def _refuse_adapter(folder: Path) -> None:
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter, not a model: merge it into its base model first (peft: merge_and_unload)"
        )


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Silence transformers' bars for a load of seconds, and leave the setting as it was."""
    bars: Any = transformers_logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
