"""The row-wise operations of the decoder: linear layers, norms, activations, rotation.

Owns batch invariance of everything that treats rows alike: a row's result never depends on how many rows are computed
with it, nor on its place among them.

Measured (torch 2.13, AVX-512): a float linear gives a row other bits at 1, 2 and 4 or more rows, on other machines at
more than 32; so `RowCounts` finds out which numbers of rows agree, and only those are ever run. Fused silu, sigmoid
and gelu compute the last few elements of a thread's share with another exponential than the rest, so an element's
bits depend on its place; exp and tanh alone do not, so the activations here are built from those two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TILE = 16
"""The number of rows that defines a result; others are used where they give the same bits."""
_MAX_STAND_IN = 65_536
"""Outputs of the stand-in that is measured for a large vocabulary: beyond that many, no kernel divides them anew."""
_CANDIDATES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

torch_mkldnn = torch.ops.mkldnn


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The numbers of rows, ascending, with which every linear of a model gives a row the same bits."""

    allowed: tuple[int, ...]

    def padded(self, num_rows: int) -> int:
        """The smallest number of rows, at least `num_rows`, that `pieces` can cut."""
        whole, rest = divmod(num_rows, self.allowed[-1])
        return whole * self.allowed[-1] + (next(n for n in self.allowed if n >= rest) if rest else 0)

    def common(self, other: RowCounts) -> RowCounts:
        return RowCounts(tuple(n for n in self.allowed if n in other.allowed))

    @staticmethod
    def measure(function: Callable[[Tensor], Tensor], rows: Tensor) -> RowCounts:
        """Run `function` on `rows`, [at least a tile, inputs], in tiles, and see which counts agree with that.

        If not even the place within a tile is without influence, only single rows are safe.
        """
        tiled = torch.cat([function(tile) for tile in torch.split(rows, _TILE)])
        turned = torch.cat([function(tile) for tile in torch.split(rows.roll(1, 0), _TILE)]).roll(-1, 0)
        if not torch.equal(tiled, turned):
            return RowCounts((1,))
        return RowCounts(tuple(n for n in _CANDIDATES if n <= len(rows) and _agrees(function, rows, tiled, n)))


def _agrees(function: Callable[[Tensor], Tensor], rows: Tensor, expected: Tensor, n: int) -> bool:
    turn = n // 2 + 1  # every row at another place than in its tile
    return torch.equal(function(rows[:n].roll(turn, 0)).roll(-turn, 0), expected[:n])


class Linear:
    """y = x W^T + b for [rows, inputs]; `counts` says which numbers of rows the caller may use.

    On the CPU the weight is kept packed for oneDNN. PERF: all linears of one SmolLM2 step, one thread: packed bf16
    14 ms against 28 ms plain at 1 and 4 rows, 26 against 45 at 16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """`weight` [outputs, inputs] and `bias` [outputs] on their device and in the type to compute with."""
        self.out_features, self.in_features = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.counts = RowCounts(_CANDIDATES)
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and can_pack(weight.dtype)
        self._weight = torch_mkldnn._reorder_linear_weight(weight, _TILE) if self._is_packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]; rows must be `counts.padded(rows)`."""
        largest = self.counts.allowed[-1]
        if x.shape[0] <= largest:
            return self._run(x)
        return torch.cat([self._run(piece) for piece in torch.split(x, largest)])

    def measure(self, max_rows: int) -> RowCounts:
        """Which numbers of rows agree for this shape, type and device; the caller puts the result in `counts`.

        Runs a stand-in of the same shape on sums that cancel: what is left of them is rounding, so that any other
        order of summation shows. With plain random numbers one row in twenty would show it.
        """
        out_features = min(self.out_features, _MAX_STAND_IN)
        rows, weight = cancelling(max_rows, out_features, self.in_features, self.dtype)
        bias = None if self._bias is None else torch.zeros_like(self._bias[:out_features])
        stand_in = Linear(weight.to(self.device), bias)
        return RowCounts.measure(stand_in._run, rows.to(self.device))

    def _run(self, x: Tensor) -> Tensor:
        if self._is_packed:
            y: Tensor = torch_mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return y
        return torch.nn.functional.linear(x, self._weight, self._bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN takes packed weights of this type here: for bf16 the processor needs AVX-512."""
    return bool(torch._C._has_mkldnn and (dtype != torch.bfloat16 or torch_mkldnn._is_mkldnn_bf16_supported()))


def cancelling(
    num_rows: int, num_columns: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """[rows, inner] and [columns, inner] whose products are sums of pairs that cancel, the pairs scattered."""
    generator = torch.Generator().manual_seed(0)
    order, half = torch.randperm(inner, generator=generator), inner // 2
    left, right = torch.zeros(num_rows, inner), torch.zeros(min(num_columns, 512), inner)
    values = torch.randn(num_rows, half, generator=generator)
    left[:, order[:half]], left[:, order[half : 2 * half]] = values, -values
    weights = torch.randn(len(right), half, generator=generator)
    right[:, order[:half]], right[:, order[half : 2 * half]] = weights, weights
    repeats = -(-num_columns // len(right))
    return left.to(dtype), right.to(dtype).repeat(repeats, 1)[:num_columns]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """float32 [..., size], normed over the last dimension."""
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), float32."""
    return x / (torch.exp(-x) + 1.0)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU (Hendrycks, Gimpel, 2016), float32."""
    inner = (x * x * 0.044715 + 1.0) * x * math.sqrt(2.0 / math.pi)
    return (torch.tanh(inner) + 1.0) * x * 0.5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of float32 [rows, heads, head_dim]; pairs are (i, i + head_dim / 2).

    `cos` and `sin`: [rows, 1, head_dim], each half repeated, the first half of `sin` negated.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
