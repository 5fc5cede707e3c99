"""All weights of a model as the native decoder reads them: one mapped file, made once per checkpoint.

Owns the cache file: its name (content, layout, variant), its header, its check sum, and that it is rebuilt when it is
missing or damaged. The file is a JSON line (padded), then every array 64-byte aligned.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.families import TensorSpec, computed_values, stored_row_order, tensor_specs
from decode.native.pack import LAYOUT, PANEL, Packed, pack

_ALIGN = 64
_HEADER = 1 << 18
Progress = Callable[[int, int], None]
"""Called with (matrices done, matrices in all)."""


@dataclass(frozen=True, slots=True)
class Matrix:
    kind: int
    n: int
    k: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """By (role, layer): matrices, and vectors as float32 (padded with zeros to a multiple of 16)."""

    matrices: dict[tuple[str, int | None], Matrix]
    vectors: dict[tuple[str, int | None], npt.NDArray[np.float32]]


def load_weights(
    checkpoint: Checkpoint, content_hash: str, cache_dir: Path, *, eight_bit: bool, progress: Progress | None = None
) -> NativeWeights:
    """From the cache file, which is made (or made again, if damaged) when necessary."""
    name = hashlib.sha256(f"{content_hash} layout {LAYOUT} {'q8' if eight_bit else 'q4'}".encode()).hexdigest()[:24]
    path = cache_dir / f"weights-{name}.bin"
    weights = _open(path)
    if weights is None:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _write(path, _packed(checkpoint, eight_bit=eight_bit, progress=progress))
        weights = _open(path)
    if weights is None:
        raise OSError(f"{path}: cannot be read back after writing")
    return weights


def _packed(
    checkpoint: Checkpoint, *, eight_bit: bool, progress: Progress | None
) -> Iterator[tuple[TensorSpec, Packed | npt.NDArray[np.float32]]]:
    config = checkpoint.config
    specs = list(tensor_specs(config, checkpoint.naming))
    for done, spec in enumerate(specs):
        tensor = checkpoint.tensors[spec.name]
        if len(spec.shape) == 2:
            yield spec, pack(tensor, stored_row_order(config, checkpoint.naming, spec), eight_bit=eight_bit)
        else:
            values = computed_values(config, checkpoint.naming, spec, tensor.values())
            yield spec, np.pad(values, (0, -len(values) % PANEL))
        if progress:
            progress(done + 1, len(specs))


def _write(path: Path, entries: Iterator[tuple[TensorSpec, Packed | npt.NDArray[np.float32]]]) -> None:
    index: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.seek(_HEADER)
            offset = 0
            for spec, entry in entries:
                entry_index: dict[str, Any] = {"role": spec.role, "layer": spec.layer, "offset": offset}
                if isinstance(entry, Packed):
                    data = entry.data
                    entry_index |= {"kind": entry.kind, "n": entry.n, "k": entry.k}
                else:
                    data = entry.view(np.uint8)
                blob = data.tobytes() + bytes(-data.nbytes % _ALIGN)
                index.append(entry_index | {"bytes": data.nbytes})
                digest.update(blob)
                file.write(blob)
                offset += len(blob)
            header = json.dumps({"layout": LAYOUT, "index": index, "bytes": offset, "sha256": digest.hexdigest()})
            if len(header) > _HEADER:
                raise OSError(f"{path}: too many tensors for the header")
            file.seek(0)
            file.write(header.encode().ljust(_HEADER))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _open(path: Path) -> NativeWeights | None:
    """None: missing, truncated or damaged."""
    if not path.exists() or path.stat().st_size < _HEADER:
        return None
    file = np.memmap(path, np.uint8, "r")
    try:
        header = json.loads(bytes(file[:_HEADER]))
        body = file[_HEADER:]
        if header["layout"] != LAYOUT or len(body) != header["bytes"]:
            return None
        if hashlib.sha256(body.data).hexdigest() != header["sha256"]:
            return None
        return _read(header["index"], body)
    except (ValueError, KeyError, TypeError):
        return None


def _read(index: list[dict[str, Any]], body: npt.NDArray[np.uint8]) -> NativeWeights:
    weights = NativeWeights({}, {})
    for entry in index:
        data = body[entry["offset"] : entry["offset"] + entry["bytes"]]
        key = (entry["role"], entry["layer"])
        if "kind" in entry:
            weights.matrices[key] = Matrix(entry["kind"], entry["n"], entry["k"], data)
        else:
            weights.vectors[key] = data.view(np.float32)
    return weights
