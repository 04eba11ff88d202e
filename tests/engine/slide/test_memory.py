from __future__ import annotations

import os
from pathlib import Path

import pytest

from cacheslide_agents.engine.slide.memory import UNKNOWN_FREE_BYTES, free_host_bytes

MIB = 2**20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {900 * 1024} kB\nMemAvailable:   {500 * 1024} kB\n"}


def test_the_kernels_figure_is_taken_when_there_is_no_limit(tmp_path: Path) -> None:
    unlimited = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}
    assert free_host_bytes(machine(tmp_path, {**MEMINFO, **unlimited})) == 500 * MIB


def test_the_tightest_group_counts_when_version_2_groups_are_limited(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/box/job\n",
            "sys/fs/cgroup/box/memory.max": str(100 * MIB),
            "sys/fs/cgroup/box/memory.current": str(70 * MIB),
            "sys/fs/cgroup/box/memory.stat": f"anon {50 * MIB}\ninactive_file {20 * MIB}\n",
            "sys/fs/cgroup/box/job/memory.max": str(80 * MIB),
            "sys/fs/cgroup/box/job/memory.current": str(10 * MIB),
        },
    )
    assert free_host_bytes(root) == 50 * MIB


def test_the_limit_counts_when_version_1_groups_are_limited(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "5:cpu:/\n4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(64 * MIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(80 * MIB),
        },
    )
    assert free_host_bytes(root) == 0


def test_half_of_the_memory_is_assumed_when_the_system_tells_nothing(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) > 0


def test_a_stated_default_is_taken_when_even_the_memory_size_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert free_host_bytes(tmp_path) == UNKNOWN_FREE_BYTES


def test_this_machine_has_free_memory_when_asked() -> None:
    assert free_host_bytes() > 0
