"""The engine: paged KV, reuse across turns, generation. It knows no agent framework.

Names are imported on first use, so `import cacheslide_agents.engine` loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy_names import lazy_names

if TYPE_CHECKING:
    from .config import EngineConfig, PaperSettings, SamplingParams
    from .engine import Engine
    from .errors import (
        CacheFolderError,
        CacheSlideError,
        ConfigError,
        ContextLengthError,
        EngineClosedError,
        ModelError,
        ModelNotInstalledError,
        PromptError,
        RequestCancelledError,
        UnsupportedModelError,
    )
    from .receipt import Receipt
    from .run.comparison import Trace
    from .run.drift import Drift
    from .run.request import Output, Piece
    from .segments import Prompt, Segment
    from .stats import EngineStats

__all__ = [
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

if not TYPE_CHECKING:
    _HOMES = {
        "Drift": f"{__name__}.run.drift",
        "Engine": f"{__name__}.engine",
        "EngineConfig": f"{__name__}.config",
        "EngineStats": f"{__name__}.stats",
        "Output": f"{__name__}.run.request",
        "PaperSettings": f"{__name__}.config",
        "Piece": f"{__name__}.run.request",
        "Prompt": f"{__name__}.segments",
        "Receipt": f"{__name__}.receipt",
        "SamplingParams": f"{__name__}.config",
        "Segment": f"{__name__}.segments",
        "Trace": f"{__name__}.run.comparison",
    }
    __getattr__, __dir__ = lazy_names(__name__, {name: _HOMES.get(name, f"{__name__}.errors") for name in __all__})
