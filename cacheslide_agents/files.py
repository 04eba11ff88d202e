"""Files that commands leave behind: figures and pictures, written whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cacheslide_agents.engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DOTS_PER_INCH = 130


class PictureError(Exception):
    """A picture that cannot be drawn; the message says why and what to do."""


class WantedFile(NamedTuple):
    """A file to write.

    Attributes:
        name: What it holds, for people.
        path: Where it goes.
        content: Makes its bytes; may raise ImportError or PictureError if it is a picture.
    """

    name: str
    path: Path
    content: Callable[[], bytes]


def check_targets(targets: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
    """Refuses files that could not be written or would replace another, before work that they are to hold.

    Args:
        targets: Where files go, by the option that says so; None writes none.
        inputs: Files that are read.

    Raises:
        ConfigError: A target is no file, or is an input or another target too.
    """
    taken = dict.fromkeys(inputs, "an input")
    for option, path in targets.items():
        if path is None:
            continue
        if os.path.exists(path) and not os.path.isfile(path):
            raise ConfigError(f"{option} {path} is a folder or a device, which cannot be replaced: name a file")
        for other, what in taken.items():
            if _are_one(path, other):
                raise ConfigError(f"{option} {path} is {what} too, which would be lost: name another file")
        taken[path] = f"the file of {option}"


def check_picture(option: str, path: Path | None) -> None:
    """Refuses a picture whose ending matplotlib has no format for; without matplotlib nothing is known.

    Raises:
        ConfigError: It has none.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return
    known = FigureCanvasBase.filetypes
    if path is not None and image_format(path) not in known:
        raise ConfigError(
            f"{option} {path} cannot be drawn as {image_format(path)}: end it in one of {', '.join(sorted(known))}"
        )


def _are_one(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file, through links, or in letters whose case their disk does not tell apart."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def write_files(
    wanted: Sequence[WantedFile], tell: Callable[[str], None], fail: Callable[[str], None], extra: str
) -> bool:
    """Writes files, tells where they are, and returns whether all could be written.

    A picture that there is no library for is no failure.

    Args:
        wanted: What to write.
        tell: Takes where a file is.
        fail: Takes why one is not written.
        extra: The extra that brings the library.
    """
    whole = True
    for name, path, content in wanted:
        try:
            replace_file(path, content())
        except ImportError:
            fail(f"the {name} needs matplotlib: pip install 'cacheslide-agents[{extra}]'")
        except PictureError as error:
            whole = False
            fail(str(error))
        except OSError as error:
            whole = False
            fail(f"the {name} cannot be written to {path}: {error.strerror or error}; name another file")
        else:
            tell(f"{name}: {path}")
    return whole


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all; missing folders are made.

    Raises:
        OSError: It cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def image_format(path: Path) -> str:
    """The image format that a file's name asks for; PNG without one."""
    return path.suffix[1:].lower() or "png"


def image_bytes(figure: Figure, kind: str) -> bytes:
    """A drawn figure as an image file's bytes.

    Args:
        figure: Of matplotlib.
        kind: The image format, such as `png` or `svg`.

    Raises:
        PictureError: Matplotlib does not know the format.
    """
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=kind, dpi=_DOTS_PER_INCH)
    except ValueError as error:
        raise PictureError(f"the picture cannot be drawn as {kind}: {error}") from None
    return drawn.getvalue()
