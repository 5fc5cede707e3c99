"""Weights in the layout that the native kernels read (see native/linear.hpp).

Owns the packing of one matrix into panels of 16 outputs and tiles of 32 inputs, from the checkpoint's 4-bit blocks
where it has them (nothing is rounded twice), else as 8-bit blocks. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from decode.checkpoint.stored import BLOCKS, StoredTensor

LAYOUT = 1
"""Rises with every change of the layout or of the rounding: part of the cache key and of the fingerprint."""
PANEL, BLOCK = 16, 32
Kind = Literal[4, 8]
Bytes = npt.NDArray[np.uint8]
_FOUR_BIT = ("Q4_0", "Q4_1", "Q4_K")
_ROWS_AT_ONCE = 16384


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix: `data` is [panels, blocks, bytes of a tile]; n outputs, k inputs."""

    kind: Kind
    n: int
    k: int
    data: Bytes


def pack_kind(stored_type: str, *, eight_bit: bool) -> Kind:
    return 4 if stored_type in _FOUR_BIT and not eight_bit else 8


def packed_shape(kind: Kind, n: int, k: int) -> tuple[int, int, int]:
    return (-(-n // PANEL), k // BLOCK, 320 if kind == 4 else 544)


def pack(tensor: StoredTensor, row_order: npt.NDArray[np.int64] | None = None, *, eight_bit: bool = False) -> Packed:
    """`row_order`: which stored row becomes output i. The inputs must be a multiple of 32."""
    n, k = tensor.shape
    kind = pack_kind(tensor.type, eight_bit=eight_bit)
    data = np.zeros(packed_shape(kind, n, k), np.uint8)
    for first in range(0, n, _ROWS_AT_ONCE):
        part = _slice(tensor, first, n) if row_order is None else tensor
        panels = slice(first // PANEL, -(-min(n, first + _ROWS_AT_ONCE) // PANEL))
        rows = None if row_order is None else row_order[first : first + _ROWS_AT_ONCE]
        data[panels] = _pack_four(part, rows) if kind == 4 else _pack_eight(part, rows)
    return Packed(kind, n, k, data)


def _slice(tensor: StoredTensor, first: int, n: int) -> StoredTensor:
    """Rows first .. first + _ROWS_AT_ONCE, so that a large vocabulary never stands in memory as floats."""
    values, size = BLOCKS[tensor.type]
    row_bytes = tensor.shape[1] // values * size
    shape = (min(_ROWS_AT_ONCE, n - first), tensor.shape[1])
    return replace(tensor, shape=shape, offset=tensor.offset + first * row_bytes)


def _pack_four(tensor: StoredTensor, rows: npt.NDArray[np.int64] | None) -> Bytes:
    raw = tensor.rows()
    if rows is not None:
        raw = raw[rows]
    match tensor.type:
        case "Q4_0":  # d * (q - 8)
            blocks = raw.reshape(len(raw), -1, 18)
            d = _halves(blocks[..., :2])
            return _tiles(blocks[..., 2:], d, (d.astype(np.float32) * -8).astype(np.float16))
        case "Q4_1":  # d * q + m
            blocks = raw.reshape(len(raw), -1, 20)
            return _tiles(blocks[..., 4:], _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))
        case _:
            return _tiles(*_split_q4_k(raw))


def _split_q4_k(raw: Bytes) -> tuple[Bytes, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Q4_K: 256 values share two halves; every 32 have a 6-bit scale and minimum of those. w = d s q - e t."""
    blocks = raw.reshape(len(raw), -1, 144)
    d, e = (_halves(blocks[..., i : i + 2]).astype(np.float32)[..., None] for i in (0, 2))
    packed = blocks[..., 4:16].astype(np.uint8)
    low, mid, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minimum = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=-1)
    nibbles = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)  # 32 bytes: 32 values low, the next 32 high
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=-2).reshape(len(raw), -1, 2, 16)
    quants = values[..., 0, :] | (values[..., 1, :] << 4)
    return (
        quants,
        (d * scale).astype(np.float16).reshape(len(raw), -1),
        (-e * minimum).astype(np.float16).reshape(len(raw), -1),
    )


def _pack_eight(tensor: StoredTensor, rows: npt.NDArray[np.int64] | None) -> Bytes:
    if tensor.type == "Q8_0":
        raw = tensor.rows() if rows is None else tensor.rows()[rows]
        stored = raw.reshape(len(raw), -1, 34)
        return _tiles(stored[..., 2:] ^ np.uint8(128), _halves(stored[..., :2]))
    values: Any = tensor.values()
    if rows is not None:
        values = values[rows]
    blocks: Any = values.reshape(len(values), -1, BLOCK)
    d = (np.abs(blocks).max(axis=-1) / 127).astype(np.float16)
    inverse = np.divide(1, d, out=np.zeros(d.shape, np.float32), where=d != 0, dtype=np.float32)
    quants = np.clip(np.rint(blocks * inverse[..., None]), -127, 127)
    return _tiles((quants + 128).astype(np.uint8), d)


def _tiles(quants: Any, *scales: npt.NDArray[np.float16]) -> Bytes:
    """quants [n, blocks, 16 or 32 bytes] and scales [n, blocks] to [panels, blocks, bytes of a tile]."""
    n, num_blocks, width = quants.shape
    panels = -(-n // PANEL)
    if n % PANEL:
        quants = np.concatenate([quants, np.zeros((panels * PANEL - n, num_blocks, width), np.uint8)])
        scales = tuple(np.concatenate([s, np.zeros((panels * PANEL - n, num_blocks), np.float16)]) for s in scales)
    vectors = quants.reshape(panels, PANEL, num_blocks, width // 4, 4).transpose(0, 2, 3, 1, 4)
    parts = [vectors.reshape(panels, num_blocks, -1)]
    for scale in scales:
        halves = np.ascontiguousarray(scale.reshape(panels, PANEL, num_blocks).transpose(0, 2, 1))
        parts.append(halves.view(np.uint8).reshape(panels, num_blocks, -1))
    return np.concatenate(parts, axis=-1)


def _halves(pairs: Bytes) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(pairs).view(np.float16)[..., 0]
