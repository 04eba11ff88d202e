"""`cacheslide bench quality`: every policy on a person's own prompts, as tables, files and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from cacheslide_agents.engine import Engine
from cacheslide_agents.engine.config import DtypeName
from cacheslide_agents.engine.errors import ConfigError, ModelError, PromptError

from ..environment import environment
from ..files import WantedFile, check_picture, check_targets, image_format, write_files
from ..tables import standard_console
from .answers import require_metrics
from .comparison import Comparison, Measurement, measuring_config
from .figures import as_csv, as_json
from .picture import draw
from .records import input_path, read_inputs
from .samples import samples
from .summary import Summary, summarize
from .table import LEGEND, show_summaries
from .turns import TurnSet
from .variants import Variant, all_policies, variants

Measured = dict[str, list[list[Measurement]]]
"""For each set of turns, and each pair of turns in it, the variants' measurements."""


def run(
    inputs: Sequence[str] = (),
    *,
    policies: Sequence[str] = (),
    budgets: Sequence[float] = (),
    limit: int | None = None,
    repeats: int = 3,
    answer_tokens: int = 24,
    model: str | None = None,
    dtype: DtypeName = "float32",
    json_file: Path | None = None,
    csv_file: Path | None = None,
    picture_file: Path | None = None,
    console: Console | None = None,
    engine: Engine | None = None,
) -> None:
    """Measures and shows.

    Args:
        inputs: JSONL files or families of the agent data; none takes the samples.
        policies: Names; none takes all.
        budgets: Correction shares to measure besides each policy's own settings.
        limit: Prompts of each input; None takes all.
        repeats: Timed repetitions of each prompt.
        answer_tokens: Longest answer.
        model: A model folder, hub id or GGUF file; None is the bundled one.
        dtype: What the model computes in.
        json_file: Where everything that was measured goes.
        csv_file: Where the summaries go.
        picture_file: Where the picture goes; its ending names the format.
        console: Where it is shown; standard output by default.
        engine: Measured instead of a model that is loaded for it, and not closed.

    Raises:
        ConfigError: An input, a policy or a budget does not exist, no record can be used, or a file to write is refused
            (`files.check_targets`, `files.check_picture`).
        CacheSlideError: The model cannot be loaded, or a package of the extra `bench` is absent.
        OSError: Standard output cannot be written; the files are there.
        typer.Exit: With 1 if a record was left out or a file cannot be written, after everything was shown; with 130
            after Ctrl-C while it measured, when what was measured until then is written and shown.
        KeyboardInterrupt: While the picture was drawn or the tables shown; the JSON and CSV files are there by then.
    """
    require_metrics()
    console = console or standard_console()
    compared = variants(policies or all_policies(), budgets)
    check_targets({"--json": json_file, "--csv": csv_file, "--picture": picture_file}, map(input_path, inputs))
    check_picture("--picture", picture_file)
    sets, problems = read_inputs(inputs, limit) if inputs else ([_cut(samples(), limit)], [])
    for problem in problems:
        _fail(problem)
    loaded = engine or Engine.load(measuring_config(dtype, model))
    interrupted = False
    measured: Measured = {}
    try:
        comparison = Comparison(loaded, compared, repeats=repeats, answer_tokens=answer_tokens)
        try:
            measure_sets(comparison, sets, measured, problems, _fail)
        except KeyboardInterrupt:
            interrupted = True
        where = environment(loaded.stats())
    finally:
        if engine is None:
            loaded.close()
    summaries: list[Summary] = []
    try:
        summaries = [summary for name, turns in measured.items() if turns for summary in summarize(name, turns)]
    except KeyboardInterrupt:
        interrupted = True
    if not summaries and not interrupted:
        raise ConfigError(f"no prompt could be measured. {problems[-1]}")
    settings = {
        "variants": [asdict(variant) for variant in compared],
        "repeats": repeats,
        "answer_tokens": answer_tokens,
    }
    wanted = _wanted(summaries, compared, where, settings, problems, measured, json_file, csv_file, picture_file)
    told: list[str] = []
    written = write_files(wanted, told.append, _fail, "bench")  # before standard output, which may fail
    _show(console, summaries, told)
    if interrupted:
        _fail(f"stopped after {sum(map(len, measured.values()))} of {sum(len(one.turns) for one in sets)} prompts")
        raise typer.Exit(130)
    if problems:
        left_out = "1 record was" if len(problems) == 1 else f"{len(problems)} records were"
        _fail(f"{left_out} left out; the figures are of the others")
    if problems or not written:
        raise typer.Exit(1)


def measure_sets(
    comparison: Comparison,
    sets: Sequence[TurnSet],
    measured: Measured,
    problems: list[str],
    fail: Callable[[str], None],
) -> None:
    """Measures every pair of turns; those that the model cannot take or gives no numbers for are reported and left out.

    Args:
        comparison: What measures.
        sets: The turns.
        measured: Filled as it goes, so that an interruption loses nothing.
        problems: What is wrong with turns that are left out is added here.
        fail: Takes the same, one at a time.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("warming up", total=sum(len(one.turns) for one in sets))
        warm = False
        for turn_set in sets:
            measured[turn_set.name] = []
            for turns in turn_set.turns:
                try:
                    if not warm:
                        comparison.warm_up(turns)
                        warm = True
                    progress.update(task, description=f"{turn_set.name}: {turns.id}")
                    measured[turn_set.name].append(comparison.measure(turns))
                except (PromptError, ModelError) as error:
                    problems.append(f"{turn_set.name}: {turns.id}: {error}")
                    fail(problems[-1])
                progress.advance(task)


def _wanted(
    summaries: Sequence[Summary],
    compared: Sequence[Variant],
    where: dict[str, Any],
    settings: dict[str, Any],
    problems: Sequence[str],
    measured: Measured,
    json_file: Path | None,
    csv_file: Path | None,
    picture_file: Path | None,
) -> list[WantedFile]:
    """The files that there is something for: after Ctrl-C there may be measurements without summaries, or neither."""
    files = []
    if json_file is not None and any(measured.values()):
        files.append(
            WantedFile("figures", json_file, lambda: as_json(where, settings, problems, summaries, measured).encode())
        )
    if csv_file is not None and summaries:
        files.append(WantedFile("summaries", csv_file, lambda: as_csv(summaries).encode()))
    if picture_file is not None and summaries:
        kind = image_format(picture_file)
        files.append(WantedFile("picture", picture_file, lambda: draw(summaries, compared, str(where["model"]), kind)))
    return files


def _show(console: Console, summaries: Sequence[Summary], files: Sequence[str]) -> None:
    """Shows the tables, what they mean, and where the files are."""
    show_summaries(console, summaries)
    if summaries:
        console.print(LEGEND, style="dim", soft_wrap=True)
    for file in files:
        console.print(Text(file), soft_wrap=True)


def _cut(turn_set: TurnSet, limit: int | None) -> TurnSet:
    return TurnSet(turn_set.name, turn_set.turns[:limit])


def _fail(text: str) -> None:
    typer.secho(f"cacheslide: {' '.join(text.split())}", fg="red", err=True)
