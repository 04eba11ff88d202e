"""Engines of the adapter tests are closed when all are done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cacheslide_agents.adapters.registry import ENGINES


@pytest.fixture(scope="package", autouse=True)
def _close_engines() -> Iterator[None]:
    yield
    ENGINES.close_all()
