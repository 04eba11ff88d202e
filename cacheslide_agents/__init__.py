"""Reuse the KV cache of an agent's prompt when its memory, tools or history change.

Names are imported on first use, so that `import cacheslide_agents` and `cacheslide --help` load no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheslide_agents.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from cacheslide_agents.adapters import CacheSlideChat, CacheSlideLLM
    from cacheslide_agents.engine import (
        CacheSlideError,
        Engine,
        EngineConfig,
        Prompt,
        Receipt,
        SamplingParams,
        Segment,
    )

__version__ = "0.1.0"

__all__ = [
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

if not TYPE_CHECKING:
    _ADAPTERS = {"CacheSlideChat", "CacheSlideLLM"}
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            name: f"{__name__}.adapters" if name in _ADAPTERS else f"{__name__}.engine"
            for name in __all__
            if name != "__version__"
        },
    )
