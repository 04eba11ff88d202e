"""How much memory of this machine a process may still take: the kernel's figure, within any container's limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

UNKNOWN_FREE_BYTES = 4 * 2**30
"""Taken as free where the system tells nothing; set `pool_tokens` there."""


def free_host_bytes(root: Path = Path("/")) -> int:
    """Bytes of main memory that can be taken without swapping.

    The least of the kernel's `MemAvailable` and what every control group above this process has left. Where there is
    no `/proc/meminfo` half of the physical memory is assumed to be free.

    Args:
        root: Where `proc` and `sys` lie; tests point it elsewhere.
    """
    limits = list(_control_group_rooms(root))
    available = _meminfo_available(root)
    if available is None and not limits:
        available = _half_of_physical()
    if available is not None:
        limits.append(available)
    return max(0, min(limits))


def _meminfo_available(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _half_of_physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return UNKNOWN_FREE_BYTES


def _control_group_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each limited control group, versions 2 and 1, from this process's own up to the top."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_name, usage_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_name, usage_name = (
                root / "sys/fs/cgroup/memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
        else:
            continue
        own = Path(path.lstrip("/"))
        for group in (own, *own.parents):
            limit, usage = _number(base / group / limit_name), _number(base / group / usage_name)
            if limit is not None and usage is not None:
                yield limit - usage + _droppable(base / group / "memory.stat")


def _droppable(stat: Path) -> int:
    """File cache that the kernel gives up before a limit is hit, bytes; it counts as usage."""
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
