"""`decode.sampling`: draws that depend on (seed, index) alone, and look random along both."""

from __future__ import annotations

import statistics

import pytest

from decode.sampling import uniform


def test_a_draw_is_a_function_of_seed_and_index() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_draws_are_in_the_unit_interval_for_every_64_bit_seed(seed: int) -> None:
    draws = [uniform(seed, index) for index in range(500)]
    assert all(0 <= draw < 1 for draw in draws)
    assert 0.45 < statistics.mean(draws) < 0.55


@pytest.mark.parametrize(
    "pairs",
    [
        [(uniform(5, index), uniform(5, index + 1)) for index in range(4000)],
        [(uniform(seed, 0), uniform(seed + 1, 0)) for seed in range(4000)],
        [(uniform(seed, 1), uniform(seed + 1, 0)) for seed in range(4000)],
    ],
    ids=["indices", "seeds", "diagonal"],
)
def test_neighbouring_draws_are_not_correlated(pairs: list[tuple[float, float]]) -> None:
    assert abs(statistics.correlation([a for a, _ in pairs], [b for _, b in pairs])) < 0.05


def test_draws_fill_the_interval_evenly() -> None:
    counts = [0] * 10
    for index in range(10_000):
        counts[int(10 * uniform(11, index))] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 27.9  # chi-square, 9 degrees, p = 0.001


def test_draws_stay_what_they_are() -> None:
    """A request that moves to a worker of another version must repeat its draws."""
    keys = [(0, 0), (42, 0), (42, 1), (-5, 1000)]
    assert [uniform(*key) for key in keys] == [
        0.8017307411242155,
        0.6745414783694937,
        0.7862350588316112,
        0.7833257798482393,
    ]
