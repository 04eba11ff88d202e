"""Position profiles as a file: readable JSON of one model, written whole or not at all, shared between processes.

A profile belongs to a namespace and a chat template. It holds lengths and counts, never text; still, lengths tell
something about a tenant, so namespaces are kept apart here as everywhere. Whoever may read the file sees them all.

A file that is broken, of another model or of a later release is refused and never written over. What two processes
observe is added up: each adds its own observations to what the file holds by then.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from ..errors import ConfigError
from ..model.cache_folder import scratch_prefix, write_text
from ..model.identity import ModelIdentity
from .ccpe import LengthHistogram, PositionProfile

FORMAT = "cacheslide positions"
VERSION = 1

SAVE_OBSERVATIONS = 32
SAVE_SECONDS = 30.0
"""A book is saved after so many observed prompts or so much time, whichever comes first, and when it is closed."""

LOCK_WAIT_SECONDS = 5.0


class ProfileKey(NamedTuple):
    """Whose profile it is.

    Attributes:
        namespace: The tenant.
        template: Identity of the chat template, or None for plain text.
    """

    namespace: str
    template: str | None


Profiles = dict[ProfileKey, PositionProfile]


class ProfileFileError(ConfigError):
    """A profile file that cannot be used; it is left as it is."""


def read_profiles(path: Path, identity: ModelIdentity) -> Profiles:
    """The profiles of a file; none if there is no file.

    Raises:
        ProfileFileError: The file cannot be read, is broken, of a later version or of another model.
    """
    remedy = "move it away or name another file"
    try:
        if path.exists() and not path.is_file():  # reading a device or a pipe might never end
            raise ProfileFileError(f"{path} is a folder or a device, no position profile: {remedy}")
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ProfileFileError(f"{path} cannot be read ({error.strerror}): make it readable, or {remedy}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested without end
        raise ProfileFileError(f"{path} is no position profile ({error}): {remedy}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ProfileFileError(f"{path} is no position profile (its format is not {FORMAT!r}): {remedy}")
    version = content.get("version")
    if version != VERSION:
        raise ProfileFileError(
            f"{path} is a position profile of version {version!r}, this release reads version {VERSION}: "
            f"upgrade the package, or {remedy}"
        )
    for name, value in identity._asdict().items():
        if content.get(name) != value:
            raise ProfileFileError(
                f"{path} was learned with {name} {content.get(name)!r}, this engine has {value!r}: positions are "
                f"learned for one model, so {remedy}"
            )
    try:
        return {_key(entry): _profile(entry) for entry in content["profiles"]}
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProfileFileError(f"{path} is a broken position profile ({error!r}): {remedy}") from error


def add_to_file(path: Path, identity: ModelIdentity, observed: Profiles) -> Profiles:
    """Adds observations to a file, which is made if there is none.

    Returns:
        All that the file holds now.

    Raises:
        ProfileFileError: See `read_profiles`; the file is left as it is.
        OSError: The file cannot be written; it is left as it is.
        Timeout: Another process held the file's lock for `LOCK_WAIT_SECONDS`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock"), timeout=LOCK_WAIT_SECONDS):
        profiles = read_profiles(path, identity)
        # Of a killed process: the lock's holder alone writes.
        for leftover in path.parent.glob(scratch_prefix(path) + "*"):
            leftover.unlink(missing_ok=True)
        merge(profiles, observed)
        write_text(path, as_json(profiles, identity))
    return profiles


def merge(profiles: Profiles, observed: Profiles) -> None:
    """Adds the observations to the profiles, in place."""
    for key, profile in observed.items():
        profiles.setdefault(key, PositionProfile()).merge(profile)


def as_json(profiles: Profiles, identity: ModelIdentity) -> str:
    """The text of a file."""
    entries = [
        {
            **key._asdict(),
            "slots": [
                {"lengths": {str(length): slot.counts[length] for length in sorted(slot.counts)}}
                for slot in profile.slots
            ],
        }
        for key, profile in sorted(profiles.items(), key=lambda item: (item[0].namespace, item[0].template or ""))
    ]
    content = {"format": FORMAT, "version": VERSION, **identity._asdict(), "profiles": entries}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    # Half a character in a namespace has no UTF-8; JSON can escape it, and no other tenant's lengths are lost for it.
    return text if _is_encodable(text) else json.dumps(content, indent=1) + "\n"


class ProfileBook:
    """The profiles of one engine as they grow; kept in a file if one is given. Belongs to one thread at a time."""

    def __init__(self, identity: ModelIdentity, path: Path | None = None) -> None:
        """Reads what is known.

        Raises:
            ProfileFileError: The file cannot be used.
        """
        self._identity = identity
        self._path = path
        self._profiles: Profiles = {} if path is None else read_profiles(path, identity)
        self._unsaved: Profiles = {}
        self._num_unsaved = 0
        self._tried_at = time.monotonic()
        self._process_id = os.getpid()
        self._warned = False

    def get(self, key: ProfileKey) -> PositionProfile:
        """A profile as it is known now; empty if nothing is."""
        return self._profiles.get(key, PositionProfile())

    def observe(self, key: ProfileKey, lengths: tuple[int, ...]) -> None:
        """Notes the lengths of a prompt's updates, by slot, in tokens."""
        if not lengths:
            return
        for profiles in (self._profiles, self._unsaved) if self._path else (self._profiles,):
            profiles.setdefault(key, PositionProfile()).observe(lengths)
        self._num_unsaved += 1

    def save_if_due(self) -> None:
        """Saves if enough has come together; see `save`."""
        waited = time.monotonic() - self._tried_at
        if self._num_unsaved >= SAVE_OBSERVATIONS or (self._num_unsaved and waited >= SAVE_SECONDS):
            self.save()

    def save(self) -> None:
        """Adds what was observed since the last time to the file, and takes over what others added.

        What cannot be saved stays in memory and is tried again later.

        Warns:
            RuntimeWarning: The file cannot be written, or somebody made something else of it. Said once.
        """
        if self._path is None or not self._unsaved or os.getpid() != self._process_id:
            return
        self._tried_at, self._num_unsaved = time.monotonic(), 0
        try:
            self._profiles = add_to_file(self._path, self._identity, self._unsaved)
            self._unsaved = {}
        except (OSError, Timeout, ProfileFileError) as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"learned positions are not saved to {self._path} ({error}); they are used from memory",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _key(entry: dict[str, Any]) -> ProfileKey:
    namespace, template = entry["namespace"], entry["template"]
    assert isinstance(namespace, str) and isinstance(template, str | None), "a namespace or template is no text"
    return ProfileKey(namespace, template)


def _profile(entry: dict[str, Any]) -> PositionProfile:
    profile = PositionProfile()
    for slot in entry["slots"]:
        counts = {int(length): count for length, count in slot["lengths"].items()}
        assert all(
            length >= 0 and isinstance(count, int) and not isinstance(count, bool) and count > 0
            for length, count in counts.items()
        ), "a length or count is no whole number"
        profile.slots.append(LengthHistogram(counts))
    return profile
