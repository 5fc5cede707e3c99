"""Tensors as they lie in a checkpoint file: type, shape, place, and their bytes or values on request.

Owns the table of storage types. No torch: a tensor is read through numpy, mapped
from the file, so opening a checkpoint reads no weights. Quantised blocks stay reachable as they are (`rows`), for
execution variants that compute with them directly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decode.checkpoint.config import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

BLOCKS: Mapping[str, tuple[int, int]] = {  # type -> (values in a block, bytes of a block)
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` is row-major (a linear layer is [outputs, inputs]); `offset` counts from the file's start."""

    name: str
    path: Path
    type: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        values, size = BLOCKS[self.type]
        return math.prod(self.shape) // values * size

    def rows(self) -> npt.NDArray[np.uint8]:
        """The stored bytes, [num_rows, bytes of a row]; a row is whole blocks along the last dimension."""
        import numpy as np  # not at the top: whoever only opens a checkpoint does without

        num_rows = math.prod(self.shape[:-1])
        flat = np.memmap(self.path, np.uint8, "r", offset=self.offset, shape=(self.num_bytes,))
        return np.asarray(flat).reshape(num_rows, -1)  # PERF: slices of a plain array cost a third of a memmap's

    def values(self) -> npt.NDArray[np.float32]:
        """The values as float32, [*shape]; a fresh array."""
        import numpy as np

        raw = self.rows()
        match self.type:
            case "F32":
                values = raw.view("<f4").astype(np.float32)
            case "F16":
                values = raw.view("<f2").astype(np.float32)
            case "BF16":  # the upper half of a float32
                values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
            case _:
                import gguf  # PERF: 0.4 s to import; the web process opens checkpoints and never needs values

                values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[self.type])
        return values.reshape(self.shape)


def check_stored(tensor: StoredTensor, shape: tuple[int, ...], file_size: int) -> None:
    """Raises CheckpointError: type not supported, another shape, broken blocks, or bytes beyond the file's end."""
    if tensor.type not in BLOCKS:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has the unsupported type {tensor.type} "
            f"(supported: {', '.join(BLOCKS)})"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name} has shape {list(tensor.shape)}, "
            f"the configuration needs {list(shape)}"
        )
    if tensor.shape[-1] % BLOCKS[tensor.type][0]:
        raise CheckpointError(f"{tensor.path}: tensor {tensor.name} has rows that are no whole {tensor.type} blocks")
    if tensor.offset + tensor.num_bytes > file_size:
        raise CheckpointError(
            f"{tensor.path}: truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, "
            f"the file has {file_size}"
        )
