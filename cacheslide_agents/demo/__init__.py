"""`cacheslide demo`: an agent whose memory is edited between turns, and what each turn reused, computed and took.

`figures` documents the JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import typer

from cacheslide_agents.adapters import CacheSlideChat
from cacheslide_agents.engine.config import PolicyName
from cacheslide_agents.engine.errors import ConfigError

from ..environment import environment
from ..files import WantedFile, check_picture, check_targets, image_format, write_files
from .figures import as_json
from .measure import POLICIES, Measurement, Turn
from .picture import draw
from .screen import Screen
from .script import WORKSHOP, Script

MAX_TOKENS = 24
STOP = ("\n",)

_ACTIONS: dict[PolicyName, str] = {
    "slide": "answering",
    "prefix": "measuring prefix caching",
    "recompute": "measuring full recomputation",
}


def run(
    *,
    model: str | None = None,
    turns: int | None = None,
    json_file: Path | None = None,
    picture_file: Path | None = None,
    script: Script = WORKSHOP,
    screen: Screen | None = None,
) -> None:
    """Holds the conversation and shows it.

    Args:
        model: A model folder, hub id or GGUF file; None is the bundled one.
        turns: How many turns; None is the whole script.
        json_file: Where the figures go.
        picture_file: Where the picture goes; its ending names the format.
        script: What is said.
        screen: Where it is shown; standard output by default.

    Raises:
        ConfigError: More turns are asked for than the script has, or a file to write is refused
            (`files.check_targets`, `files.check_picture`).
        CacheSlideError: The model cannot be loaded, or its context is too short for the script.
        typer.Exit: With 1 if a file cannot be written, after everything was shown; with 130 after Ctrl-C.
    """
    num_turns = len(script.turns) if turns is None else turns
    if not 2 <= num_turns <= len(script.turns):
        raise ConfigError(
            f"--turns {num_turns}: the conversation has {len(script.turns)} turns; use 2 to {len(script.turns)}"
        )
    check_targets({"--json": json_file, "--picture": picture_file})
    check_picture("--picture", picture_file)
    screen = screen or Screen()
    done: list[Turn] = []
    try:
        _lead(screen, num_turns)
        with closing(_chat(screen, model)) as chat:
            for turn in _hold(screen, chat, script, num_turns):
                done.append(turn)
            where = environment(chat.engine.stats())
        screen.table(done)
        screen.meaning(done)
    except KeyboardInterrupt:
        screen.failure(f"stopped after {len(done)} of {num_turns} turns; nothing was written")
        raise typer.Exit(130) from None
    if not _write(screen, done, where, json_file, picture_file):
        raise typer.Exit(1)


def _lead(screen: Screen, num_turns: int) -> None:
    screen.line(
        f"An agent answers {num_turns} questions. Its memory stands in the middle of the prompt, before the earlier "
        "messages, and is edited between turns."
    )
    screen.line(
        "Each turn shows what CacheSlide did with the prompt, and the time to the first token: here, with prefix "
        "caching, and when everything is computed."
    )
    screen.line()
    screen.legend()
    screen.line()


def _chat(screen: Screen, model: str | None) -> CacheSlideChat:
    screen.progress(f"loading {model or 'SmolLM2-135M-Instruct'}…")
    chat = CacheSlideChat(model=model, max_tokens=MAX_TOKENS, stop=list(STOP))
    stats = chat.engine.stats()
    screen.progress(f"{stats.model} is ready: {stats.dtype} on {stats.device}")
    return chat


def _hold(screen: Screen, chat: CacheSlideChat, script: Script, num_turns: int) -> Iterator[Turn]:
    measurement = Measurement(chat, script)
    screen.progress("warming up…")
    measurement.warm_up()
    for number, scripted in enumerate(script.turns[:num_turns], 1):
        measurement.prepare(scripted)
        screen.before_turn(number, num_turns, scripted)
        with _told(screen) as waiting:
            turn = measurement.turn(number, scripted, waiting)
        screen.after_turn(turn)
        yield turn


@contextmanager
def _told(screen: Screen) -> Iterator[Callable[[PolicyName], None]]:
    """A function that tells the person which policy is running."""
    with screen.waiting() as live:

        def tell(policy: PolicyName) -> None:
            if live is not None:
                live.update(f"  {_ACTIONS[policy]}…", refresh=True)

        yield tell


def _write(
    screen: Screen, turns: Sequence[Turn], where: dict[str, Any], json_file: Path | None, picture_file: Path | None
) -> bool:
    """Writes the files that are wanted, says where they are, and returns whether all could be written."""
    settings = {"max_tokens": MAX_TOKENS, "stop": list(STOP), "policies": list(POLICIES)}
    wanted: list[WantedFile] = []
    if json_file is not None:
        figures = as_json(turns, where, settings)
        wanted.append(WantedFile("figures", json_file, lambda: (json.dumps(figures, indent=2) + "\n").encode()))
    if picture_file is not None:
        kind = image_format(picture_file)
        wanted.append(WantedFile("picture", picture_file, lambda: draw(turns, str(where["model"]), kind)))
    screen.line()
    return write_files(wanted, screen.line, screen.failure, extra="demo")
