"""`decode.engine.sampling`: draws that depend on (seed, index) alone and look random along both, and what logits are
changed
by."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode.engine.sampling import LogitAdjustments, SamplingParams, uniform


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


@given(
    output=st.lists(st.integers(0, 6), max_size=12),
    bias=st.dictionaries(st.integers(0, 8), st.integers(-100, 100)),
    presence=st.sampled_from([0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, 2.0]),
)
def test_adjustments_are_the_formula_over_the_output(
    output: list[int], bias: dict[int, int], presence: float, frequency: float
) -> None:
    sampling = SamplingParams(
        max_tokens=5, presence_penalty=presence, frequency_penalty=frequency, logit_bias=tuple(bias.items())
    )
    stepwise = LogitAdjustments(sampling, ())
    for token in output:
        stepwise.count(token)
    for adjustments in (stepwise, LogitAdjustments(sampling, output)):
        assert len(set(adjustments.token_ids)) == len(adjustments.token_ids) == len(adjustments.values)
        found = dict(zip(adjustments.token_ids, adjustments.values, strict=True))
        for token in range(9):
            count = output.count(token)
            assert found.get(token, 0.0) == bias.get(token, 0) - count * frequency - (count > 0) * presence


def test_parameters_that_change_no_logit_need_no_adjustments() -> None:
    assert LogitAdjustments.of(SamplingParams(max_tokens=5), [1, 2]) is None
    assert LogitAdjustments.of(SamplingParams(max_tokens=5, presence_penalty=0.1), []) is not None


def test_ids_that_no_vocabulary_has_are_passed_over() -> None:
    sampling = SamplingParams(max_tokens=5, logit_bias=((-1, 5.0), (1 << 40, 5.0), (7, 1.0)))
    assert list(LogitAdjustments(sampling, ()).token_ids) == [7]
