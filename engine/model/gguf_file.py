"""A GGUF file's keys and tensor entries, read without copying a weight.

The `gguf` package's own reader makes several numpy views per vocabulary entry, seconds for a real file; this one takes
a tenth of that. Dequantization stays with the package.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UnsupportedModelError

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""`struct` letters by the format's numbers for fixed-size values."""
_STRING, _ARRAY = 8, 9
_REMEDY = "delete it and download it again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor that stays on the disk until its data are used.

    Attributes:
        shape: Slowest dimension first, as torch has it.
        kind: The `gguf.GGMLQuantizationType`.
        data: (..., bytes per row) uint8, a read-only view of the file.
    """

    shape: tuple[int, ...]
    kind: Any
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True)
class GgufFile:
    """An opened GGUF file.

    Attributes:
        path: The file.
        fields: Every metadata key and its value, arrays as lists.
        tensors: By their GGUF names.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The file's own name for the model's architecture."""
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of an architecture's own key, such as `attention.head_count`."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        """As `get`.

        Raises:
            ModelError: The key is absent.
        """
        if (value := self.get(key)) is None:
            raise ModelError(
                f"{self.path} lacks the key {self.architecture}.{key}: the file is incomplete or was written by an "
                "old converter; download a newer one"
            )
        return value


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and check that all its tensors are there.

    Raises:
        ModelError: The file is no GGUF, cut short or corrupt.
        UnsupportedModelError: A version or a type of tensor that is not known.
    """
    try:
        content = np.memmap(path, mode="r", dtype=np.uint8) if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from error
    header = _Header(content.data)
    try:
        if header.take(4) != b"GGUF":
            raise ModelError(f"{path} does not begin as a GGUF file does: {_REMEDY}")
        version, num_tensors, num_fields = header.unpack("IQQ")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"{path} is GGUF version {version}; read are versions 2 and 3, little-endian")
        fields = {header.string(): header.value() for _ in range(num_fields)}
        entries = [header.entry() for _ in range(num_tensors)]
        alignment = int(fields.get("general.alignment", 32))
        start = -(-header.position // alignment) * alignment
        tensors = {name: _tensor(content, start, shape, kind, at) for name, shape, kind, at in entries}
    except (struct.error, ValueError, TypeError, KeyError, OverflowError, MemoryError, ZeroDivisionError) as error:
        raise ModelError(f"{path} ({content.size} bytes) is not a whole GGUF file ({error}): {_REMEDY}") from error
    return GgufFile(path, fields, tensors)


class _Header:
    """A position in the file's header that moves on as values are taken."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        taken = bytes(self._content[self.position : self.position + num_bytes])
        if len(taken) != num_bytes:
            raise ValueError("it ends within its header")
        self.position += num_bytes
        return taken

    def unpack(self, letters: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{letters}", self._content, self.position)
        self.position += struct.calcsize(f"<{letters}")
        return values

    def string(self) -> str:
        return self.take(self.unpack("Q")[0]).decode("utf-8", errors="replace")

    def value(self) -> Any:
        (kind,) = self.unpack("I")
        return self._value_of(kind)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the slowest dimension first, type and offset of a tensor."""
        name = self.string()
        (num_dimensions,) = self.unpack("I")
        if num_dimensions > 8:
            raise ValueError(f"a tensor of {num_dimensions} dimensions")
        shape = tuple(reversed(self.unpack(f"{num_dimensions}Q")))
        kind, offset = self.unpack("IQ")
        return name, shape, kind, offset

    def _value_of(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.unpack(_SCALARS[kind])[0]
        element, length = self.unpack("IQ")
        if element in _SCALARS:
            if length > len(self._content):
                raise ValueError(f"an array of {length} values")
            return list(self.unpack(f"{length}{_SCALARS[element]}"))
        return [self._value_of(element) for _ in range(length)]


def _tensor(
    content: np.ndarray[Any, np.dtype[np.uint8]], start: int, shape: tuple[int, ...], kind: int, offset: int
) -> GgufTensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    quantization = GGMLQuantizationType(kind)
    stored_shape = quant_shape_to_byte_shape(shape, quantization)
    data = content[start + offset : start + offset + prod(stored_shape)]
    if data.size != prod(stored_shape):
        raise ValueError("it ends within its tensors")
    return GgufTensor(shape, quantization, data.reshape(stored_shape))
