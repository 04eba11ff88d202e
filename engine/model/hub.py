"""Models of the Hugging Face hub: the config first, the weights only when the model can be served."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from ..errors import ModelError
from .checkpoint import check_config_json, read_config

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_ATTEMPTS = 4
_RETRIED_STATUS = (408, 429, 500, 502, 503, 504)
_Result = TypeVar("_Result")


def is_hub_id(name: str) -> bool:
    """Whether a name could be a hub id, `owner/name`; the hub's few ids without an owner are of unsupported models."""
    return _ID.fullmatch(name) is not None


def hub_is_off() -> bool:
    """Whether the environment forbids asking the hub (`HF_HUB_OFFLINE`, `TRANSFORMERS_OFFLINE`)."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def fetch_from_hub(model_id: str, *, offline: bool) -> Path:
    """The local folder of a hub model, downloaded into huggingface_hub's own cache if it is not there.

    Only network errors and the server's own failures are tried again.

    Raises:
        ModelError: The hub refuses or cannot be reached, or the model is not in the cache while offline.
        UnsupportedModelError: Its config cannot be served; no weights were downloaded.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    offline = offline or hub_is_off()
    config = _asked(model_id, offline, lambda: hf_hub_download(model_id, "config.json", local_files_only=offline))
    check_config_json(read_config(Path(config)), model_id)
    return Path(
        _asked(
            model_id,
            offline,
            lambda: snapshot_download(
                model_id, allow_patterns=_WANTED, ignore_patterns=["*/*", "consolidated*"], local_files_only=offline
            ),
        )
    )


def is_transient(error: BaseException) -> bool:
    """Whether asking again may help: timeouts, broken connections, an overloaded server; never a 404 or a refusal."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):  # raised from the network error that led to it
        return error.__cause__ is not None and is_transient(error.__cause__)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, errors.HfHubHTTPError):
        return getattr(error.response, "status_code", None) in _RETRIED_STATUS
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"TransportError", "RequestException"}:  # httpx's and requests' roots, whichever huggingface_hub uses
        return True
    return isinstance(error, (ConnectionError, TimeoutError))


def _asked(model_id: str, offline: bool, ask: Callable[[], _Result]) -> _Result:
    retrying = Retrying(
        retry=retry_if_exception(lambda error: not offline and is_transient(error)),
        wait=wait_random_exponential(multiplier=0.5, max=8.0),
        stop=stop_after_attempt(_ATTEMPTS),
        reraise=True,
    )
    try:
        return retrying(ask)
    except Exception as error:
        raise _explained(model_id, offline, error) from error


def _explained(model_id: str, offline: bool, error: Exception) -> ModelError:
    from huggingface_hub import errors

    if offline and isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
        reason, remedy = "it is not in the local cache and the hub is off", "go online once, or give a local folder"
    elif isinstance(error, errors.GatedRepoError):
        reason, remedy = "access to it must be granted", f"ask for it at https://huggingface.co/{model_id} and log in"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "there is neither a local file or folder nor a hub model of that name"
        remedy = "check the name; for a private model log in with `hf auth login`"
    elif isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        reason = "it has no config.json"
        remedy = "choose a transformers checkpoint, or download its GGUF file and give the file's path"
    elif isinstance(error, errors.HFValidationError):
        reason, remedy = "that is no hub id", "give owner/name, a folder or a GGUF file"
    elif isinstance(error, errors.LocalEntryNotFoundError) or is_transient(error):
        reason, remedy = (
            f"the hub cannot be reached ({error.__cause__ or error})",
            "check the network, or give a local folder",
        )
    else:
        reason, remedy = (
            str(error).strip().splitlines()[0] if str(error) else type(error).__name__,
            "see the reason above",
        )
    return ModelError(f"the model {model_id!r} cannot be loaded: {reason}; {remedy}")
