"""Rope frequencies and their scalings."""

from __future__ import annotations

import math

import numpy as np

from decode.checkpoint.config import Llama3Scaling, Rope
from decode.checkpoint.rope import rope_frequencies, rope_tables


def test_frequencies_fall_from_one_to_nearly_one_over_theta() -> None:
    np.testing.assert_allclose(rope_frequencies(Rope(10_000.0), 8), [1.0, 0.1, 0.01, 0.001])


def test_linear_scaling_divides_every_frequency() -> None:
    np.testing.assert_allclose(rope_frequencies(Rope(10_000.0, linear_factor=4.0), 4), [0.25, 0.0025])


def test_stored_factors_divide_their_own_frequency() -> None:
    np.testing.assert_allclose(rope_frequencies(Rope(10_000.0, frequency_factors=(1.0, 8.0)), 4), [1.0, 0.00125])


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_joins_them() -> None:
    scaling = Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=100
    )
    plain = rope_frequencies(Rope(10_000.0), 64)
    ratio = rope_frequencies(Rope(10_000.0, llama3=scaling), 64) / plain
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(ratio[wavelength < 100 / 4], 1.0)
    np.testing.assert_allclose(ratio[wavelength > 100 / 1], 1 / 8)
    between = ratio[(wavelength > 100 / 4) & (wavelength < 100)]
    assert len(between) > 2
    assert np.all((between > 1 / 8) & (between < 1))


def test_tables_hold_cosines_and_sines_of_position_times_frequency() -> None:
    angles = np.asarray([[0.0, 0.0], [1.0, 0.01], [2.0, 0.02]])
    cos, sin = rope_tables(Rope(10_000.0), 4, 3)
    np.testing.assert_allclose(cos, np.cos(angles), rtol=1e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=1e-6)
