"""The supported model families. Adding one is a file here and a line in `FAMILIES`; see CONTRIBUTING.md."""

from __future__ import annotations

from .base import Family, LayerWeights
from .llama import Llama
from .mistral import Mistral
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen3 import Qwen3

FAMILIES: dict[str, Family] = {family.model_type: family for family in (Llama(), Mistral(), Qwen2(), Qwen3(), Phi3())}
"""By transformers' `model_type`."""

__all__ = ["FAMILIES", "Family", "LayerWeights"]
