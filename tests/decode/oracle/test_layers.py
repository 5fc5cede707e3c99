"""Row-wise operations: a row's bits do not depend on the rows beside it; and the formulas are the usual ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.oracle.layers import Linear, RowCounts, cancelling, gelu_tanh, rms_norm, rotate, silu

COUNTS = RowCounts((2, 4, 16))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("num_rows", "padded"), [(0, 0), (1, 2), (2, 2), (3, 4), (5, 16), (16, 16), (17, 18), (35, 36)]
)
def test_padding_goes_to_the_next_allowed_count(num_rows: int, padded: int) -> None:
    assert COUNTS.padded(num_rows) == padded


def test_common_counts_are_those_of_both() -> None:
    assert COUNTS.common(RowCounts((1, 2, 16, 32))) == RowCounts((2, 16))


def test_measuring_drops_the_counts_that_give_other_bits() -> None:
    def function(rows: Tensor) -> Tensor:
        return rows * (2 if len(rows) in (1, 48) else 1)

    counts = RowCounts.measure(function, random(64, 3))
    assert counts == RowCounts((2, 4, 8, 12, 16, 24, 32, 64))


def test_measuring_drops_the_counts_that_favour_a_place() -> None:
    def function(rows: Tensor) -> Tensor:
        place = torch.arange(len(rows)) if len(rows) == 8 else torch.zeros(len(rows))
        return rows + place[:, None]

    assert 8 not in RowCounts.measure(function, random(64, 3)).allowed


def test_only_single_rows_are_safe_where_the_place_in_a_tile_matters() -> None:
    def function(rows: Tensor) -> Tensor:
        return rows + torch.arange(len(rows))[:, None]

    assert RowCounts.measure(function, random(64, 3)) == RowCounts((1,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_allowed_counts_give_a_row_the_same_bits(dtype: torch.dtype, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        linear = Linear(random(208, 304).to(dtype), random(208, seed=1).to(dtype))
        linear.counts = linear.measure(64)
        rows = random(150, 304, seed=2).to(dtype)
        expected = torch.cat([linear(padded(rows[i : i + 1], linear.counts))[:1] for i in range(150)])
        for n in (1, 2, 3, 5, 7, 16, 33, 64, 100, 150):
            assert torch.equal(linear(padded(rows[:n], linear.counts))[:n], expected[:n]), n
    finally:
        torch.set_num_threads(before)


def padded(rows: Tensor, counts: RowCounts) -> Tensor:
    return torch.cat((rows, rows.new_zeros(counts.padded(len(rows)) - len(rows), rows.shape[1])))


def test_cancelling_products_show_another_order_of_summation() -> None:
    left, right = cancelling(4, 6, 304)
    products = left[:, None] * right  # [rows, columns, inner]
    torch.testing.assert_close(products.double().sum(-1), torch.zeros(4, 6).double(), atol=1e-12, rtol=0)
    forwards, backwards = (np.add.accumulate(x.numpy(), -1)[..., -1] for x in (products, products.flip(-1)))
    assert np.mean(forwards != backwards) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_allowed_counts_hold_for_a_shape_whose_single_row_is_special(dtype: torch.dtype) -> None:
    weight = random(576, 1536).to(dtype)
    linear = Linear(weight)
    linear.counts = linear.measure(16)
    rows = random(64, 1536, seed=1).to(dtype)
    whole = torch.cat([linear(piece) for piece in torch.split(rows, 16)])
    for n in linear.counts.allowed:
        assert torch.equal(
            torch.cat([linear(piece) for piece in torch.split(rows[: 64 // n * n], n)]), whole[: 64 // n * n]
        )


def test_linear_is_the_product_with_the_transposed_weight_plus_bias() -> None:
    weight, bias, x = random(7, 5), random(7, seed=1), random(4, 5, seed=2)
    torch.testing.assert_close(Linear(weight, bias)(x), x @ weight.T + bias)
    torch.testing.assert_close(Linear(weight)(x), x @ weight.T)


@pytest.mark.parametrize(
    "function", [silu, gelu_tanh, torch.exp, lambda x: rms_norm(x, torch.ones(x.shape[-1]), 1e-5)]
)
@pytest.mark.parametrize("width", [64, 80, 96, 1000])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_element_has_the_same_bits_at_every_place(function: object, width: int, num_threads: int) -> None:
    assert callable(function)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x = random(300, width) * 3
        expected = torch.cat([function(row) for row in torch.split(x, 1)])
        for n in (2, 3, 5, 47, 171, 299):
            assert torch.equal(function(x[:n]), expected[:n]), n
    finally:
        torch.set_num_threads(before)


def test_activations_are_the_usual_ones() -> None:
    x = torch.cat((random(1000) * 5, torch.tensor([-200.0, 200.0, 0.0])))
    torch.testing.assert_close(silu(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(gelu_tanh(x), torch.nn.functional.gelu(x, approximate="tanh"))


def test_rotation_turns_pairs_of_both_halves() -> None:
    x, angle = random(3, 2, 8), random(3, 1, 4, seed=1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    turned = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), -1))
