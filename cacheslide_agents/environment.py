"""Where figures were measured: what whoever reads them later needs to know."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

from cacheslide_agents.engine import EngineStats

from . import __version__


def environment(stats: EngineStats) -> dict[str, Any]:
    """Packages, machine, load, device and model, as plain JSON values.

    Args:
        stats: Of the engine that was measured.
    """
    return {
        **machine(),
        "device": stats.device,
        "dtype": stats.dtype,
        "model": stats.model,
        "context_tokens": stats.context_tokens,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """Packages, machine and load, whatever the model."""
    return {
        "cacheslide_agents": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def processor() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
