"""Loading by setting: what is found, what is refused and what it says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheslide_agents.engine.config import EngineConfig
from cacheslide_agents.engine.errors import ConfigError, ModelError, ModelNotInstalledError, UnsupportedModelError
from cacheslide_agents.engine.model import bundled, gguf, placement
from cacheslide_agents.engine.model.loading import load_model
from cacheslide_agents.engine.model.placement import cpu_has_fast_bfloat16, resolve_device_and_dtype
from tests.engine.model.tiny_gguf import tiny_gguf
from tests.tiny import FAMILIES, tiny_checkpoint, tiny_model

PROMPT = torch.arange(40)[None] * 7 % 300


def _load(model: str | Path | None, **settings: Any) -> Any:
    return load_model(EngineConfig(model=model, **{"device": "cpu", "dtype": "float32", **settings}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "tiny")


@pytest.mark.parametrize("family", FAMILIES)
def test_folder_is_loaded_when_whole(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint(tmp_path / "tiny", family)
    capsys.readouterr()
    loaded = _load(tmp_path / "tiny")
    assert loaded.path == tmp_path / "tiny"
    assert loaded.name == "tiny"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(loaded.model(PROMPT).logits, tiny_model(family)(PROMPT).logits)
    assert loaded.tokenizer("tea")["input_ids"]
    assert capsys.readouterr().err == ""


def test_folder_is_loaded_when_sharded(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "tiny")
    tiny_model().save_pretrained(tmp_path / "tiny", max_shard_size="200KB")
    (tmp_path / "tiny" / "model.safetensors").unlink(missing_ok=True)
    shards = sorted((tmp_path / "tiny").glob("*.safetensors"))
    assert len(shards) > 1
    torch.testing.assert_close(_load(tmp_path / "tiny").model(PROMPT).logits, tiny_model()(PROMPT).logits)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks 1 of {len(shards)} weight files, {shards[1].name} first"):
        _load(tmp_path / "tiny")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_have_the_dtype_when_one_is_set(dtype: str, folder: Path) -> None:
    model = _load(folder, dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("named", ["file", "folder", "string"])
def test_gguf_is_converted_when_a_file_or_its_folder_is_named(named: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    tiny_gguf(home / "tiny.gguf")
    choices: dict[str, str | Path] = {"file": home / "tiny.gguf", "folder": home, "string": str(home / "tiny.gguf")}
    loaded = _load(choices[named], cache_dir=tmp_path / "cache")
    assert loaded.name == "tiny"
    assert loaded.path.parent == tmp_path / "cache" / "models"
    torch.testing.assert_close(loaded.model(PROMPT).logits, tiny_model()(PROMPT).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_gguf_is_held_in_memory_when_the_cache_folder_cannot_be_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf, "write_safetensors", fail)
    cache = tmp_path / "cache"
    with pytest.warns(RuntimeWarning, match=f"{cache}.*{os.strerror(number)}.*CACHESLIDE_CACHE.*into memory"):
        loaded = _load(tmp_path / "tiny.gguf", cache_dir=cache)
    assert loaded.path == tmp_path / "tiny.gguf"
    assert loaded.model.generation_config.eos_token_id == 2
    assert loaded.tokenizer.chat_template
    torch.testing.assert_close(loaded.model(PROMPT).logits, tiny_model()(PROMPT).logits, atol=1e-5, rtol=0)
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_gguf_is_held_in_memory_when_the_home_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        loaded = _load(tmp_path / "tiny.gguf", cache_dir=tmp_path / "cache")
    assert loaded.path == tmp_path / "tiny.gguf"
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], r"no weights \(model.safetensors"),
        (["tokenizer.json"], "no tokenizer"),
    ],
)
def test_error_names_the_file_when_one_is_missing(removed: list[str], message: str, folder: Path) -> None:
    for name in removed:
        (folder / name).unlink()
    with pytest.raises(ModelError, match=message):
        _load(folder)


def test_error_names_the_pickle_when_there_are_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"convert pytorch_model\.bin to safetensors"):
        _load(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 600, 0.5, 0.999])
def test_error_names_the_weights_when_half_downloaded(kept: float, folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(ModelError, match=r"model\.safetensors.*delete it and download it again"):
        _load(folder)


def test_error_says_git_lfs_when_the_weights_are_a_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="git lfs pull"):
        _load(folder)


def test_error_names_the_tensor_when_weights_are_incomplete(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors.*model\.layers\.1\.mlp\.down_proj\.weight"):
        _load(folder)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_error_names_the_config_when_it_is_broken(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        _load(folder)


def test_model_is_refused_when_its_config_holds_odd_values(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": 5, "architectures": true}')
    with pytest.raises(ModelError, match="of type 5"):
        _load(folder)


def test_error_names_the_tokenizer_when_it_is_broken(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        _load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized by 'gptq'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantized by 'unknown'"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba'.*supported are.*llama"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "BertModel, which does not generate text"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": None}, "type None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_model_is_refused_before_its_weights_are_read_when_it_cannot_be_served(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModelError, match=message):
        _load(folder)


def test_error_says_merge_when_the_folder_is_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge"):
        _load(tmp_path)


def test_error_asks_which_when_a_folder_has_several_gguf_files(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files, a\.gguf first"):
        _load(tmp_path)


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "missing.gguf", "a b", "x/y/z", ""])
def test_error_says_it_does_not_exist_when_a_path_is_wrong(name: str) -> None:
    with pytest.raises((ModelError, ConfigError)):
        _load(name)


def test_error_says_what_is_accepted_when_the_file_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="not a GGUF file"):
        _load(tmp_path / "model.bin")


def test_error_names_the_command_when_the_bundled_model_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "_in_distribution", lambda: None)
    monkeypatch.setattr(bundled, "_in_package", lambda: None)
    with pytest.raises(ModelNotInstalledError, match="cacheslide model install"):
        _load(None, cache_dir=tmp_path)


def test_error_gives_the_remedy_when_cuda_is_absent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cpu' or 'auto'"):
        _load(folder, device="cuda")


def test_error_gives_the_limit_when_the_cuda_index_is_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="cuda:0 to cuda:1"):
        resolve_device_and_dtype("cuda:2", "float32")


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_dtype_follows_the_cpu_when_auto(fast: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "cpu_has_fast_bfloat16", lambda: fast)
    assert resolve_device_and_dtype("cpu", "auto") == (torch.device("cpu"), dtype)
    assert resolve_device_and_dtype("cpu", "float16") == (torch.device("cpu"), torch.float16)


@pytest.mark.parametrize(("capability", "dtype"), [((9, 0), torch.bfloat16), ((7, 5), torch.float16)])
def test_dtype_follows_the_gpu_when_auto(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_device_and_dtype("auto", "auto") == (torch.device("cuda"), dtype)


def test_bfloat16_is_slow_when_torch_has_no_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name, raising=False)
    assert cpu_has_fast_bfloat16() is False
