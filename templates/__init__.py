"""Conversations as prompts: chat messages with segment tags, their rendering, and ready-made agent prompts.

Framework-free: adapters turn their framework's messages into these.
"""

from __future__ import annotations

from .chat import ChatTemplate
from .memory import MemoryTemplate
from .messages import ChatMessage, TextPart, ToolCall
from .render import ChatRenderer

__all__ = ["ChatMessage", "ChatRenderer", "ChatTemplate", "MemoryTemplate", "TextPart", "ToolCall"]
