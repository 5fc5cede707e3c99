"""The paged key/value cache as tensors: where every position's K and V lie.

Owns the memory and its layout. Does not know which block belongs to whom: block tables come with every step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class KvCache:
    """One tensor per layer, [2, num_kv_heads, num_blocks * block_size, head_dim]: keys, then values.

    Heads stand outside the blocks, so that gathered blocks need no transposition before a batched product. Position
    p of a sequence is slot `block_table[p // block_size] * block_size + p % block_size`.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (2, num_kv_heads, num_blocks * block_size, head_dim)
        self._layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """`slots` [tokens]; `keys` and `values` [tokens, num_kv_heads, head_dim] in the cache's type."""
        cache = self._layers[layer]
        cache[0].index_copy_(1, slots, keys.transpose(0, 1))
        cache[1].index_copy_(1, slots, values.transpose(0, 1))

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """`blocks` [n] -> keys and values, each [num_kv_heads, n * block_size, head_dim], blocks in order."""
        cache = self._layers[layer]
        _, heads, _, head_dim = cache.shape
        by_block = cache.view(2 * heads, self.num_blocks, self.block_size * head_dim)
        gathered = by_block.index_select(1, blocks).view(2, heads, -1, head_dim)
        return gathered[0], gathered[1]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy takes zero pages from the system, which cost memory only once they are written; torch would fill them
    zeros = np.zeros(shape, np.uint8 if dtype.itemsize == 1 else f"u{dtype.itemsize}")
    return torch.from_numpy(zeros.view(f"i{dtype.itemsize}")).view(dtype)
