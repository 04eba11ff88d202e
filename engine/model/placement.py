"""On which device and in which dtype a model is served."""

from __future__ import annotations

import torch

from ..errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Turn the settings `device` and `dtype` into what torch understands.

    `auto` is CUDA where there is one; its dtype is bfloat16 where the device multiplies bfloat16 matrices natively
    (CUDA from compute capability 8, CPUs with AVX512_BF16 or AMX), since emulated bfloat16 is slower. Elsewhere it is
    float16 on CUDA and float32 on a CPU.

    Raises:
        ConfigError: CUDA is asked for and absent, or the index is beyond the devices there are.
    """
    chosen = torch.device(_device(device))
    if dtype != "auto":
        return chosen, _DTYPES[dtype]
    if chosen.type == "cuda":
        native = torch.cuda.get_device_capability(chosen)[0] >= 8
        return chosen, torch.bfloat16 if native else torch.float16
    return chosen, torch.bfloat16 if cpu_has_fast_bfloat16() else torch.float32


def cpu_has_fast_bfloat16() -> bool:
    """Whether this CPU has bfloat16 matrix instructions, by torch's own account."""
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(probe()) for probe in probes if probe is not None)


def _device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    name, _, index = device.partition(":")
    if name != "cuda":
        return device
    if not torch.cuda.is_available():
        built = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        raise ConfigError(
            f"EngineConfig.device = {device!r}, but {built}: use device='cpu' or 'auto', or install torch with CUDA"
        )
    if index and int(index) >= torch.cuda.device_count():
        raise ConfigError(
            f"EngineConfig.device = {device!r}, but there are {torch.cuda.device_count()} CUDA devices: "
            f"use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    return device
