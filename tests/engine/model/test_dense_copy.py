"""The converted copy in the cache folder: made once, whole or not at all, made again when damaged."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cacheslide_agents.engine.errors import CacheFolderError
from cacheslide_agents.engine.model import cache_folder as cache_folder_module
from cacheslide_agents.engine.model import gguf
from cacheslide_agents.engine.model.cache_folder import cache_folder, exclusive, scratch_beside, source_digest
from cacheslide_agents.engine.model.gguf import dense_copy, is_whole
from tests.engine.model.tiny_gguf import tiny_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tiny_gguf(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def _left_behind(cache: Path) -> list[str]:
    """What lies among the models besides whole copies and lock files."""
    models = cache / "models"
    return [path.name for path in models.iterdir() if path.suffix != ".lock" and not is_whole(path)]


def test_conversion_happens_once_when_loaded_twice(source: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = dense_copy(source, tmp_path / "cache", lines.append)
    assert any("converting tiny.gguf (once)" in line for line in lines)
    lines.clear()
    assert dense_copy(source, tmp_path / "cache", lines.append) == first
    assert lines == []


def test_conversion_is_found_again_when_the_file_moved(source: Path, tmp_path: Path) -> None:
    first = dense_copy(source, tmp_path / "cache")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    source.rename(moved / "tiny.gguf")
    lines: list[str] = []
    assert dense_copy(moved / "tiny.gguf", tmp_path / "cache", lines.append) == first
    assert lines == []


def test_conversion_happens_again_when_the_source_changed(source: Path, tmp_path: Path) -> None:
    first = dense_copy(source, tmp_path / "cache")
    tiny_gguf(source, seed=1)
    assert dense_copy(source, tmp_path / "cache") != first


def test_source_is_hashed_once_when_it_did_not_change(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = source_digest(source, tmp_path / "cache")
    monkeypatch.setattr(cache_folder_module, "sha256_of", lambda path: pytest.fail("hashed again"))
    assert source_digest(source, tmp_path / "cache") == digest


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "manifest"])
def test_copy_is_made_again_when_damaged(damage: str, source: Path, tmp_path: Path) -> None:
    folder = dense_copy(source, tmp_path / "cache")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    match damage:
        case "cut":
            weights.write_bytes(whole[:-1000])
        case "flip":
            weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "remove":
            (folder / "tokenizer.json").unlink()
        case "manifest":
            (folder / "manifest.json").write_text('{"conversion"')
    lines: list[str] = []
    assert dense_copy(source, tmp_path / "cache", lines.append) == folder
    assert any("damaged" in line for line in lines)
    assert weights.read_bytes() == whole
    assert _left_behind(tmp_path / "cache") == []


def test_copy_is_kept_when_only_its_times_changed(source: Path, tmp_path: Path) -> None:
    folder = dense_copy(source, tmp_path / "cache")
    os.utime(folder / "model.safetensors", (1, 1))
    lines: list[str] = []
    assert dense_copy(source, tmp_path / "cache", lines.append) == folder
    assert lines == []


def test_manifest_names_source_and_files_when_written(source: Path, tmp_path: Path) -> None:
    folder = dense_copy(source, tmp_path / "cache")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["sha256"] == source_digest(source, tmp_path / "cache")
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= manifest["files"].keys()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("at", ["write_safetensors", "_save_tokenizer", "sync"])
def test_nothing_is_left_when_writing_fails(
    at: str, number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(cache_folder_module if at == "sync" else gguf, at, fail)
        with pytest.raises(CacheFolderError, match=r"CACHESLIDE_CACHE") as caught:
            dense_copy(source, tmp_path / "cache")
    assert os.strerror(number) in str(caught.value)
    assert _left_behind(tmp_path / "cache") == []
    assert is_whole(dense_copy(source, tmp_path / "cache"))


def test_error_names_the_sizes_when_the_disk_is_too_small(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SimpleNamespace(total=10**9, used=10**9 - 5_000_000, free=5_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: small)
    with pytest.raises(CacheFolderError, match=r"5 MB free, but the converted model needs 3[0-9] MB"):
        dense_copy(source, tmp_path / "cache")
    assert _left_behind(tmp_path / "cache") == []


def test_error_is_clear_when_rust_reports_the_full_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr(gguf, "gguf_tokenizer", lambda _: FullDisk())
    with pytest.raises(CacheFolderError, match="free some space"):
        dense_copy(source, tmp_path / "cache")


def test_error_is_clear_when_the_cache_folder_is_a_file(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(CacheFolderError, match="cannot be written"):
        dense_copy(source, tmp_path / "cache")


def test_error_is_clear_when_a_real_disk_is_full(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "small"
    cache.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(cache)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gguf, "require_space", lambda *_: None)
            with pytest.raises(CacheFolderError, match="No space left on device"):
                dense_copy(source, cache)
        with pytest.raises(CacheFolderError, match="MB free"):
            dense_copy(source, cache)
        assert _left_behind(cache) == []
    finally:
        subprocess.run(["umount", str(cache)], check=True)


def test_leftovers_are_removed_when_their_process_died(source: Path, tmp_path: Path) -> None:
    folder = dense_copy(source, tmp_path / "cache")
    leftover = folder.with_name(f".{folder.name}.tmp-dead")
    leftover.mkdir()
    (leftover / "half").write_bytes(b"x")
    with exclusive(folder), scratch_beside(folder):
        assert not leftover.exists()


def test_waiting_gives_up_with_the_remedy_when_the_lock_stays_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_folder_module, "LOCK_WAIT_SECONDS", 0.1)
    waits: list[str] = []
    with (
        exclusive(tmp_path / "target"),
        pytest.raises(CacheFolderError, match="another process"),
        exclusive(tmp_path / "target", on_wait=lambda: waits.append("waiting")),
    ):
        pass
    assert waits == ["waiting"]


_CONVERT = """
    import sys, time
    from pathlib import Path
    from cacheslide_agents.engine.model import gguf

    source, cache, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    write = gguf.write_safetensors

    def slow_write(path, shapes, tensors):
        if mode == "hang":
            path.write_bytes(b"half of the weights")
            print("writing", flush=True)
            time.sleep(600)
        time.sleep(1.0)
        write(path, shapes, tensors)

    gguf.write_safetensors = slow_write
    print("ready", flush=True)
    sys.stdin.readline()
    print(gguf.dense_copy(source, cache), flush=True)
"""


def _start(source: Path, cache: Path, mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_CONVERT), str(source), str(cache), mode],
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_one_process_converts_when_two_start_together(source: Path, tmp_path: Path) -> None:
    processes = [_start(source, tmp_path / "cache", "slow") for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ends = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        ends.append((*process.communicate(timeout=120), process.returncode))
    assert [end[2] for end in ends] == [0, 0], ends
    assert ends[0][0] == ends[1][0]
    assert sum("done in" in end[1] for end in ends) == 1, ends
    assert sum("waiting for it" in end[1] for end in ends) == 1, ends
    assert _left_behind(tmp_path / "cache") == []


@pytest.mark.slow
def test_next_start_converts_when_the_first_was_killed_midway(source: Path, tmp_path: Path) -> None:
    with _start(source, tmp_path / "cache", "hang") as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.stdout.readline() != "writing\n":
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    assert _left_behind(tmp_path / "cache") != []
    started = time.monotonic()
    assert is_whole(dense_copy(source, tmp_path / "cache"))
    assert time.monotonic() - started < 60
    assert _left_behind(tmp_path / "cache") == []


def test_cache_folder_is_the_chosen_one_when_several_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESLIDE_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(tmp_path / "chosen") == tmp_path / "chosen"
    assert cache_folder(str(tmp_path / "chosen")) == tmp_path / "chosen"
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("CACHESLIDE_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "cacheslide"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / ".cache" / "cacheslide"
