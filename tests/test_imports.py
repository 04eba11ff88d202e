"""What may import what, and what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import cacheslide_agents
from cacheslide_agents import adapters, engine, templates

ROOT = Path(__file__).parents[1]
LAYERS = ("engine", "templates", "adapters", "cacheslide_agents")
"""Each may import those before it, never those after it."""

FRAMEWORKS = ("langchain", "langchain_core", "langgraph", "llama_index")
HEAVY = ("torch", "transformers", "langchain_core", "llama_index", "gguf", "matplotlib", "torchmetrics")


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    level: int
    at_run_time: bool

    @property
    def layer(self) -> str:
        return self.file.parts[0]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {'.' * self.level}{self.module}"


def _source_files() -> list[Path]:
    files = [file.relative_to(ROOT) for layer in LAYERS for file in (ROOT / layer).rglob("*.py")]
    return [file for file in files if not (ROOT / file.parts[0] / file.parts[1]).is_symlink()]


def _imports(file: Path) -> Iterator[Import]:
    def visit(node: ast.AST, at_run_time: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for body, runs in ((node.body, False), (node.orelse, at_run_time)):
                for statement in body:
                    yield from visit(statement, runs)
            return
        if isinstance(node, ast.Import):
            for name in node.names:
                yield Import(file, node.lineno, name.name, 0, at_run_time)
        elif isinstance(node, ast.ImportFrom):
            if node.module in (None, "cacheslide_agents"):
                for name in node.names:
                    module = f"{node.module}.{name.name}" if node.module else name.name
                    yield Import(file, node.lineno, module, node.level, at_run_time)
            else:
                yield Import(file, node.lineno, node.module, node.level, at_run_time)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_run_time)

    yield from visit(ast.parse((ROOT / file).read_text(encoding="utf-8")), True)


ALL_IMPORTS = [found for file in _source_files() for found in _imports(file)]


def _target_layer(found: Import) -> str | None:
    """The layer that an absolute import of ours goes to."""
    if found.level or found.package != "cacheslide_agents":
        return None
    parts = found.module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else "cacheslide_agents"


def test_imports_go_one_way_when_a_layer_imports_another() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if (target := _target_layer(found)) and LAYERS.index(target) > LAYERS.index(found.layer)
    ]
    assert wrong == []


def test_imports_are_relative_when_they_stay_in_the_folder() -> None:
    wrong = [str(found) for found in ALL_IMPORTS if _target_layer(found) == found.layer]
    assert wrong == []


def test_imports_are_absolute_when_they_leave_the_folder() -> None:
    wrong = [str(found) for found in ALL_IMPORTS if found.level > len(found.file.parts) - 1]
    wrong += [
        str(found)
        for found in ALL_IMPORTS
        if found.layer == "cacheslide_agents" and found.level and found.package in LAYERS
    ]
    assert wrong == []


def test_folders_keep_their_installed_name_when_imported() -> None:
    wrong = [str(found) for found in ALL_IMPORTS if not found.level and found.package in LAYERS[:-1]]
    assert wrong == []


def test_engine_knows_no_framework_when_it_is_imported() -> None:
    wrong = [
        str(found) for found in ALL_IMPORTS if found.layer in ("engine", "templates") and found.package in FRAMEWORKS
    ]
    assert wrong == []


def test_only_engine_model_touches_transformers_when_code_runs() -> None:
    wrong = [
        str(found)
        for found in ALL_IMPORTS
        if found.at_run_time
        and found.layer == "engine"
        and not found.level
        and found.package == "transformers"
        and found.file.parts[:2] != ("engine", "model")
    ]
    assert wrong == []


def _modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize("package", ["", ".engine", ".adapters", ".templates", ".cli"])
def test_nothing_heavy_is_imported_when_a_package_is(package: str) -> None:
    assert not _modules_after(f"import cacheslide_agents{package}").intersection(HEAVY)


@pytest.mark.parametrize("command", [[], ["bench", "quality"]])
def test_nothing_heavy_is_imported_when_help_is_shown(command: list[str]) -> None:
    words = [*command, "--help"]
    code = f"from cacheslide_agents.cli import main\nsys.argv[1:] = {words}\ntry: main()\nexcept SystemExit: pass"
    modules = _modules_after(code)
    assert "cacheslide_agents.cli" in modules
    assert not modules.intersection(HEAVY)


def test_every_module_is_imported_when_the_extras_are_absent() -> None:
    needs_an_extra = {"cacheslide_agents.adapters.llamaindex"}
    names = {
        ".".join((() if file.parts[0] == "cacheslide_agents" else ("cacheslide_agents",)) + file.with_suffix("").parts)
        for file in _source_files()
    }
    names = {name.removesuffix(".__init__") for name in names} - needs_an_extra
    absent = (
        "llama_index",
        "matplotlib",
        "torchmetrics",
        "langgraph",
        "langchain",
        "langchain_openai",
        "fastapi",
        "flash_attn",
    )
    code = (
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"import importlib\nfor name in {sorted(names)!r}: importlib.import_module(name)"
    )
    assert names <= _modules_after(code)


def test_public_names_are_these_when_listed() -> None:
    assert cacheslide_agents.__all__ == [
        "CacheSlideChat",
        "CacheSlideError",
        "CacheSlideLLM",
        "Engine",
        "EngineConfig",
        "Prompt",
        "Receipt",
        "SamplingParams",
        "Segment",
        "__version__",
    ]
    assert adapters.__all__ == ["CacheSlideChat", "CacheSlideLLM"]
    assert templates.__all__ == [
        "ChatMessage",
        "ChatRenderer",
        "ChatTemplate",
        "MemoryTemplate",
        "TextPart",
        "ToolCall",
    ]
    assert engine.__all__ == [
        "CacheFolderError",
        "CacheSlideError",
        "ConfigError",
        "ContextLengthError",
        "Drift",
        "Engine",
        "EngineClosedError",
        "EngineConfig",
        "EngineStats",
        "ModelError",
        "ModelNotInstalledError",
        "Output",
        "PaperSettings",
        "Piece",
        "Prompt",
        "PromptError",
        "Receipt",
        "RequestCancelledError",
        "SamplingParams",
        "Segment",
        "Trace",
        "UnsupportedModelError",
    ]


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in (cacheslide_agents, adapters, templates, engine) for name in package.__all__],
)
def test_public_name_is_there_when_asked_for(package: object, name: str) -> None:
    assert getattr(package, name) is not None
    assert name in dir(package)


def test_attribute_error_names_the_module_when_a_name_does_not_exist() -> None:
    with pytest.raises(AttributeError, match=r"module 'cacheslide_agents' has no attribute 'Engin'"):
        _ = cacheslide_agents.Engin  # type: ignore[attr-defined]
