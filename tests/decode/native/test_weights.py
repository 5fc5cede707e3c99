"""The cache of repacked weights: used when whole, made again when not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from decode.native.weights import NativeWeights, load_weights
from tests.decode.native.reference import tiny_checkpoint


def load(folder: Path, content_hash: str = "x", *, eight_bit: bool = False) -> tuple[NativeWeights, int]:
    """The weights, and how many tensors had to be packed for them."""
    packed: list[int] = []
    checkpoint = tiny_checkpoint("qwen2")
    weights = load_weights(
        checkpoint, content_hash, folder, eight_bit=eight_bit, progress=lambda done, _: packed.append(done)
    )
    return weights, len(packed)


def test_a_second_load_packs_nothing_and_reads_the_same(tmp_path: Path) -> None:
    first, num_packed = load(tmp_path)
    second, num_packed_again = load(tmp_path)
    assert num_packed > 0
    assert num_packed_again == 0
    assert first.matrices.keys() == second.matrices.keys()
    for key, matrix in first.matrices.items():
        assert np.array_equal(matrix.data, second.matrices[key].data)
    for key, vector in first.vectors.items():
        assert np.array_equal(vector, second.vectors[key])


def test_other_content_is_packed_on_its_own(tmp_path: Path) -> None:
    load(tmp_path)
    assert load(tmp_path, "y")[1] > 0
    assert load(tmp_path, eight_bit=True)[1] > 0


def flip(data: bytearray) -> None:
    data[-100] ^= 1


def cut(data: bytearray) -> None:
    del data[-100:]


def garble(data: bytearray) -> None:
    data[:4] = b"\xff\xff\xff\xff"


def shorten(data: bytearray) -> None:
    del data[100:]


@pytest.mark.parametrize("damage", [flip, cut, garble, shorten])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: Callable[[bytearray], None]) -> None:
    wanted = {key: matrix.data.copy() for key, matrix in load(tmp_path)[0].matrices.items()}
    (path,) = tmp_path.glob("weights-*.bin")
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    weights, num_packed = load(tmp_path)
    assert num_packed > 0
    assert all(np.array_equal(weights.matrices[key].data, value) for key, value in wanted.items())


def test_every_array_begins_at_a_cache_line(tmp_path: Path) -> None:
    weights, _ = load(tmp_path)
    arrays = [matrix.data for matrix in weights.matrices.values()] + list(weights.vectors.values())
    assert all(array.ctypes.data % 64 == 0 for array in arrays)
