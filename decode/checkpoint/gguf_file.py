"""The GGUF container: a header of typed metadata and a table of tensors, then aligned tensor data.

Owns the parsing of versions 2 and 3, little endian. Does not know what the metadata means (`gguf`).
PERF: the `gguf` package's reader makes an array object of every vocabulary entry: 3.4 s to open a file with 49,152
tokens and 12.4 s with 262,144, here 0.1 and 0.3 s. Its dequantisation is what we use the package for.
Source: the format description "GGUF" of the ggml project.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.checkpoint.config import CheckpointError
from decode.checkpoint.stored import StoredTensor

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_TENSOR_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufFile:
    metadata: dict[str, Any]
    """Numbers, booleans, text; arrays are lists."""
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header only. Raises CheckpointError: not GGUF, another version or byte order, truncated, damaged."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _Header(path, data).read()
            except struct.error as error:
                raise CheckpointError(f"{path}: truncated: the header goes beyond the file's end") from error
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: damaged: text in the header is not UTF-8") from error


class _Header:
    """A cursor over the header. Reading beyond the end raises struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 4

    def read(self) -> GgufFile:
        version = self._scalar("I")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path}: GGUF version {version} is not supported (2 and 3 are, little endian)"
            )
        num_tensors, num_fields = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"), depth=0)
        table = [self._tensor_row() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self._path}: general.alignment is {alignment!r}")
        start = math.ceil(self._at / alignment) * alignment
        return GgufFile(
            metadata,
            {name: StoredTensor(name, self._path, type_, shape, start + at) for name, type_, shape, at in table},
        )

    def _tensor_row(self) -> tuple[str, str, tuple[int, ...], int]:
        name, num_dims = self._string(), self._scalar("I")
        self._need(num_dims * 8)
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]  # stored innermost first
        type_id = self._scalar("I")
        return name, _TENSOR_TYPES.get(type_id, f"number {type_id}"), shape, self._scalar("Q")

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        if kind not in _SCALARS:
            raise CheckpointError(f"{self._path}: damaged: metadata of unknown kind {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            self._need(struct.calcsize(layout))
            values = struct.unpack_from(layout, self._data, self._at)
            self._at += struct.calcsize(layout)
            return list(values)
        self._need(count * 8)  # every string and every inner array takes at least that
        if kind == _STRING:
            return self._strings(count)
        if depth == _MAX_NESTING:
            raise CheckpointError(f"{self._path}: damaged: arrays nested deeper than {_MAX_NESTING}")
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        data, at, size_of = self._data, self._at, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (size,) = size_of(data, at)
            at += 8
            strings.append(data[at : at + size].decode())
            at += size
        self._at = at
        self._need(0)
        return strings

    def _string(self) -> str:
        size = self._scalar("Q")
        self._need(size)
        text = self._data[self._at : self._at + size].decode()
        self._at += size
        return text

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _need(self, size: int) -> None:
        if self._at + size > len(self._data):
            raise struct.error(f"{size} bytes from {self._at}")
