"""Attention over paged keys: the interface, torch's own kernels and flash-attn."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from ..errors import ConfigError
from .interface import Attention, Layout, RowRun, row_runs

__all__ = ["Attention", "Layout", "RowRun", "row_runs", "select_attention"]


def select_attention(name: str, device: torch.device, dtype: torch.dtype) -> Attention:
    """The attention backend of an engine.

    Args:
        name: `auto` (flash-attn on CUDA in 16 bit where it is installed, else torch), `sdpa` or `flash`.
        device: Where the pool lies.
        dtype: The model's.

    Raises:
        ConfigError: flash-attn is asked for but cannot be used, or the name does not exist.
    """
    if name not in ("auto", "sdpa", "flash"):
        raise ConfigError(f"attention = {name!r} does not exist: use auto, sdpa or flash")
    obstacle = _flash_obstacle(device, dtype)
    if name == "flash" and obstacle is not None:
        raise ConfigError(f"attention = 'flash', but {obstacle}, or use attention='sdpa'")
    if name == "sdpa" or obstacle is not None:
        from .sdpa import SdpaAttention

        return SdpaAttention(device)
    from .flash import FlashAttention

    return FlashAttention(device)


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot be used, with the remedy, or None."""
    if device.type != "cuda":
        return f"it runs on CUDA only and the device is {device}: use device='cuda'"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes 16 bit only and the dtype is {dtype}: use dtype='bfloat16'"
    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed: pip install 'cacheslide-agents[cuda]'"
    return None
