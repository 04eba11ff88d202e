"""The wheel holds what the tree holds, under one name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("adapters", "cacheslide_agents", "engine", "templates")
LINKED = ("adapters", "engine", "templates")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a copy of the tree, so that no build output lands in it."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "dist"), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_wheel_has_the_trees_modules_when_built(wheel_names: set[str]) -> None:
    tree = {
        str(Path("cacheslide_agents", *(file.parts if file.parts[0] in LINKED else file.parts[1:])))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".typed", ".jinja")
        for file in [path.relative_to(ROOT)]
        if not file.is_relative_to("cacheslide_agents") or file.parts[1] not in LINKED
    }
    wheel = {name for name in wheel_names if ".dist-info/" not in name}
    assert wheel == tree


def test_wheel_has_one_top_level_name_when_built(wheel_names: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cacheslide_agents"}


def test_wheel_carries_licence_and_command_when_built(wheel_names: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel_names)
    assert any(name.endswith(".dist-info/entry_points.txt") for name in wheel_names)


@pytest.mark.parametrize("folder", LINKED)
def test_link_is_relative_when_in_the_tree(folder: str) -> None:
    link = ROOT / "cacheslide_agents" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_is_a_package_when_it_holds_modules(folder: str) -> None:
    missing = {str(file.parent) for file in (ROOT / folder).rglob("*.py") if not (file.parent / "__init__.py").exists()}
    assert missing == set()
