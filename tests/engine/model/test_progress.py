"""What a long step shows on a terminal."""

from __future__ import annotations

import sys

import pytest

from cacheslide_agents.engine.model.progress import long_step


def test_title_is_shown_as_it_is_when_it_looks_like_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with long_step("converting [/x] :dog: (once)", 1) as advance:
        advance(1)
    assert "converting [/x] :dog: (once)" in capsys.readouterr().err
