"""Public names that are imported when they are first used, so that importing a package costs nothing (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes a package's `__getattr__` and `__dir__`.

    Packages keep these two behind `if not TYPE_CHECKING`, since a type checker that sees a module's `__getattr__`
    believes in every name.

    Args:
        package: The package's `__name__`; each name is stored in it after its first use.
        homes: For each public name the module that defines it.
    """

    def get_attribute(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get_attribute, list_names
