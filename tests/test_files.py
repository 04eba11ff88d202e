"""Files that commands leave behind: which are refused before the work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cacheslide_agents.engine import ConfigError
from cacheslide_agents.files import check_picture, check_targets


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text("{}")
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "folder").mkdir()
    return path


@pytest.mark.parametrize("same", ["mine.jsonl", "link", "folder/../mine.jsonl"])
def test_target_is_refused_when_it_is_an_input(same: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .* is an input too, which would be lost: name another file"):
        check_targets({"--json": mine.parent / same}, [mine])


def test_target_is_refused_when_another_goes_there_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--csv .*x is the file of --json too"):
        check_targets({"--json": tmp_path / "x", "--csv": tmp_path / "new" / ".." / "x"})


@pytest.mark.parametrize("path", ["folder", "/dev/null"])
def test_target_is_refused_when_it_is_no_file(path: str, mine: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder or a device, which cannot be replaced: name a file"):
        check_targets({"--csv": mine.parent / path})


def test_picture_is_refused_when_its_ending_is_no_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--picture .*q\.docx cannot be drawn as docx: end it in one of .*png.*svg"):
        check_picture("--picture", tmp_path / "q.docx")
    for taken in (tmp_path / "q.SVG", tmp_path / "without", None):
        check_picture("--picture", taken)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    check_picture("--picture", tmp_path / "q.docx")


def test_targets_are_taken_when_they_are_apart(mine: Path) -> None:
    folder = mine.parent
    targets = {"--json": folder / "q.json", "--csv": None, "--picture": folder / "new" / "q.SVG"}
    check_targets(targets, [mine])
