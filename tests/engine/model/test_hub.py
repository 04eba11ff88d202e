"""Hub ids: what is asked, when it is asked again, and what a person reads when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from cacheslide_agents.engine.errors import ModelError, UnsupportedModelError
from cacheslide_agents.engine.model import hub
from cacheslide_agents.engine.model.hub import fetch_from_hub, is_hub_id
from tests.tiny import tiny_checkpoint


class FakeHub:
    """Stands for huggingface_hub: answers with a folder, or with the next of its errors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures: list[Exception] = []
        self.asked: list[tuple[str, bool]] = []

    def config(self, model_id: str, name: str, *, local_files_only: bool) -> str:
        self.asked.append((name, local_files_only))
        if self.failures:
            raise self.failures.pop(0)
        return str(self.folder / name)

    def snapshot(self, model_id: str, *, local_files_only: bool, **_: Any) -> str:
        self.asked.append(("*", local_files_only))
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tiny_checkpoint(tmp_path / "tiny"))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fake.config)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot)
    monkeypatch.setattr(hub, "wait_random_exponential", lambda **_: lambda _: 0.0)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    return fake


def _http(kind: Callable[..., Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://huggingface.co/owner/model/resolve/main/config.json")
    return kind("said the hub", response=httpx.Response(status, request=request))


def test_weights_are_fetched_when_the_config_can_be_served(fake: FakeHub) -> None:
    assert fetch_from_hub("owner/model", offline=False) == fake.folder
    assert fake.asked == [("config.json", False), ("*", False)]


def test_weights_are_not_fetched_when_the_config_cannot_be_served(fake: FakeHub) -> None:
    (fake.folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="owner/model is of type 'mamba'"):
        fetch_from_hub("owner/model", offline=False)
    assert fake.asked == [("config.json", False)]


@pytest.mark.parametrize("how", ["setting", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_only_the_local_cache_is_asked_when_offline(how: str, fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "setting":
        monkeypatch.setenv(how, "1")
    fake.failures = [errors.LocalEntryNotFoundError("not cached")]
    with pytest.raises(ModelError, match=r"'owner/model'.*not in the local cache and the hub is off"):
        fetch_from_hub("owner/model", offline=how == "setting")
    assert fake.asked == [("config.json", True)]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http(errors.RepositoryNotFoundError, 404), "neither a local file or folder nor a hub model.*check the name"),
        (_http(errors.GatedRepoError, 403), "access to it must be granted.*log in"),
        (_http(errors.RemoteEntryNotFoundError, 404), "no config.json.*GGUF"),
        (_http(errors.HfHubHTTPError, 401), "said the hub"),
        (errors.HFValidationError("bad"), "no hub id"),
    ],
)
def test_hub_is_asked_once_when_it_refuses(error: Exception, message: str, fake: FakeHub) -> None:
    fake.failures = [error]
    with pytest.raises(ModelError, match=f"'owner/model'.*{message}"):
        fetch_from_hub("owner/model", offline=False)
    assert len(fake.asked) == 1


def _wrapped() -> Exception:
    error = errors.LocalEntryNotFoundError("cannot reach the hub and not cached")
    error.__cause__ = httpx.ConnectError("no route")
    return error


@pytest.mark.parametrize(
    "error",
    [
        httpx.ConnectError("no route"),
        httpx.ReadTimeout("slow"),
        ConnectionResetError("reset"),
        _http(errors.HfHubHTTPError, 503),
        _http(errors.HfHubHTTPError, 429),
        _wrapped(),
    ],
    ids=["connect", "timeout", "reset", "503", "429", "wrapped"],
)
def test_hub_is_asked_again_when_the_failure_passes(error: Exception, fake: FakeHub) -> None:
    fake.failures = [error, error]
    assert fetch_from_hub("owner/model", offline=False) == fake.folder
    assert len(fake.asked) == 4


def test_error_says_network_when_the_failure_stays(fake: FakeHub) -> None:
    fake.failures = [httpx.ConnectError("no route to host") for _ in range(9)]
    with pytest.raises(ModelError, match=r"cannot be reached \(no route to host\).*check the network"):
        fetch_from_hub("owner/model", offline=False)
    assert len(fake.asked) == 4


def test_hub_id_is_told_from_a_path_when_named() -> None:
    assert all(is_hub_id(name) for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "a.b/c_d"))
    assert not any(is_hub_id(name) for name in ("", "gpt-4o", "/abs", "./x", "a/b/c", "a b", "../x", "~/m"))
