from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from cacheslide_agents.engine import attention
from cacheslide_agents.engine.attention import select_attention
from cacheslide_agents.engine.attention.flash import FlashAttention
from cacheslide_agents.engine.attention.sdpa import SdpaAttention
from cacheslide_agents.engine.errors import ConfigError
from tests.reference.flash_varlen import flash_attn_varlen_func

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(attention, "find_spec", lambda name: name)


def test_flash_is_taken_when_installed_and_the_device_is_cuda(monkeypatch):
    pretend_installed(monkeypatch)
    assert isinstance(select_attention("auto", CUDA, torch.bfloat16), FlashAttention)
    assert isinstance(select_attention("flash", CUDA, torch.float16), FlashAttention)


@pytest.mark.parametrize(
    ("name", "device", "dtype"),
    [
        ("auto", CPU, torch.bfloat16),
        ("sdpa", CPU, torch.float32),
        ("auto", CUDA, torch.float32),
        ("sdpa", CUDA, torch.float16),
    ],
)
def test_torch_is_taken_when_flash_does_not_fit(monkeypatch, name, device, dtype):
    pretend_installed(monkeypatch)
    assert isinstance(select_attention(name, device, dtype), SdpaAttention)


def test_flash_is_refused_when_it_cannot_run(monkeypatch):
    with pytest.raises(ConfigError, match=r"CUDA only.*cpu.*sdpa"):
        select_attention("flash", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"16 bit only.*float32"):
        select_attention("flash", CUDA, torch.float32)
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: pip install"):
        select_attention("flash", CUDA, torch.bfloat16)
    assert isinstance(select_attention("auto", CUDA, torch.bfloat16), SdpaAttention)


def test_name_is_refused_when_it_does_not_exist():
    with pytest.raises(ConfigError, match="'eager' does not exist: use auto, sdpa or flash"):
        select_attention("eager", CPU, torch.float32)
