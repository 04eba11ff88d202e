"""Agent frameworks on one side, the engine on the other: messages become prompts, answers become messages.

Names are imported on first use: `CacheSlideLLM` needs the extra `llamaindex`, `CacheSlideChat` does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheslide_agents.engine.lazy_names import lazy_names

if TYPE_CHECKING:
    from .langchain import CacheSlideChat
    from .llamaindex import CacheSlideLLM

__all__ = ["CacheSlideChat", "CacheSlideLLM"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(
        __name__, {"CacheSlideChat": f"{__name__}.langchain", "CacheSlideLLM": f"{__name__}.llamaindex"}
    )
