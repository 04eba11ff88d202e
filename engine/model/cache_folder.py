"""Where converted models lie, and how a folder gets there whole or not at all.

Knows nothing of models: it names the folder, writes beside the target, syncs and renames.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from tenacity import RetryError, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from ..errors import CacheFolderError

LOCK_WAIT_SECONDS = 1800.0
"""How long one process waits for another that converts the same model."""

_CHUNK_BYTES = 1 << 20


def cache_folder(chosen: str | Path | None = None) -> Path:
    """The folder for converted models; it may not exist yet.

    Args:
        chosen: The setting `EngineConfig.cache_dir`; it wins over `$CACHESLIDE_CACHE`, `$XDG_CACHE_HOME/cacheslide`
            and the platform's own cache folder, in that order.

    Raises:
        CacheFolderError: There is no home folder to derive one from.
    """
    if chosen is not None:
        return Path(chosen).expanduser().absolute()
    if named := os.environ.get("CACHESLIDE_CACHE"):
        return Path(named).expanduser().absolute()
    if (xdg := os.environ.get("XDG_CACHE_HOME")) and Path(xdg).is_absolute():
        return Path(xdg) / "cacheslide"
    try:
        home = Path.home()
    except RuntimeError:
        raise CacheFolderError(
            "no cache folder: the home folder is unknown; set CACHESLIDE_CACHE or EngineConfig.cache_dir to a folder"
        ) from None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local")) / "cacheslide"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "cacheslide"
    return home / ".cache" / "cacheslide"


def unwritable(folder: Path, error: BaseException) -> CacheFolderError:
    """The error for a folder that cannot be written: what, why and the remedy."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space"
    else:
        remedy = "make it writable"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return CacheFolderError(
        f"the cache folder {folder} cannot be written ({reason}): {remedy}, "
        "or set CACHESLIDE_CACHE or EngineConfig.cache_dir to another folder"
    )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Check for room before anything is written; `folder` exists.

    Raises:
        CacheFolderError: Less than `needed_bytes` is free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CacheFolderError(
            f"the cache folder {folder} has {free_bytes / 1e6:.0f} MB free, but the converted model needs "
            f"{needed_bytes / 1e6:.0f} MB: free some space, or set CACHESLIDE_CACHE or EngineConfig.cache_dir "
            "to another folder"
        )


@contextmanager
def exclusive(target: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of `target` between processes; the lock dies with its process.

    Args:
        target: What is being written; the lock file lies beside it and stays.
        on_wait: Called once when another process holds the lock.

    Raises:
        CacheFolderError: The lock file cannot be written, or another process held it for `LOCK_WAIT_SECONDS`.
    """
    lock = FileLock(target.with_name(target.name + ".lock"))
    waiting = False

    def acquire() -> None:
        nonlocal waiting
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if not waiting and on_wait is not None:
                on_wait()
            waiting = True
            raise

    retrying = Retrying(
        retry=retry_if_exception_type(Timeout),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=stop_after_delay(LOCK_WAIT_SECONDS),
    )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        retrying(acquire)
    except RetryError:
        raise CacheFolderError(
            f"another process has been writing {target} for {LOCK_WAIT_SECONDS:.0f} s: wait for it, "
            "or set EngineConfig.cache_dir to another folder"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise unwritable(target.parent, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """An empty folder on the disk of `target`, gone after the block.

    Call it while holding `exclusive(target)`: the lock's holder alone writes there, so whatever lies there under a
    scratch name was left by a killed process and is removed.

    Raises:
        CacheFolderError: The disk is full or the folder cannot be written.
    """
    try:
        for leftover in target.parent.glob(scratch_prefix(target) + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=scratch_prefix(target), dir=target.parent))
    except OSError as error:
        raise unwritable(target.parent, error) from error
    try:
        yield scratch
    except CacheFolderError:
        raise
    except OSError as error:
        raise unwritable(target.parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` by one rename if the block ends well and vanishes if it does not.

    Call it while holding `exclusive(target)`; an old `target` is discarded.

    Raises:
        CacheFolderError: The disk is full or the folder cannot be written.
    """
    with scratch_beside(target) as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        for path in [*sorted(fresh.iterdir()), fresh]:
            sync(path)
        if target.exists():
            target.rename(scratch / "old")
        fresh.rename(target)
        sync(target.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all (temporary file beside it, then rename)."""
    handle, scratch = tempfile.mkstemp(prefix=scratch_prefix(path), dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Flush a file or folder to the disk; platforms that cannot sync a folder are left alone."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def source_digest(source: Path, cache: Path) -> str:
    """SHA-256 of a model file; remembered in the cache folder by path, size and time of change, as hashing takes long.

    An unwritable cache folder only costs the memory of it.
    """
    stat = source.stat()
    key = hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:16]
    stamp = {"path": str(source.resolve()), "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    record = cache / "sources" / f"{key}.json"
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text(encoding="utf-8"))
        if isinstance(known, dict) and known.items() >= stamp.items() and isinstance(known.get("sha256"), str):
            return str(known["sha256"])
    digest = sha256_of(source)
    with suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        write_text(record, json.dumps({**stamp, "sha256": digest}))
    return digest


def scratch_prefix(target: Path) -> str:
    """How the names of what is written beside a target begin until it takes the target's place."""
    return f".{target.name}.tmp-"
