"""Frequencies of the rotary position embedding, with the kinds of scaling that checkpoints ask for.

Owns the formulas. Does not rotate anything: executors make their own tables from the frequencies. numpy only.
Sources: "RoFormer" (Su et al., 2021); linear scaling (Chen et al., 2023); the llama3 ramp of Meta's reference code.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from decode.checkpoint.config import Rope


def rope_frequencies(rope: Rope, head_dim: int) -> npt.NDArray[np.float64]:
    """Radians per position of every pair, [head_dim / 2], scaling applied."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim) / rope.linear_factor
    if rope.frequency_factors:
        frequencies = frequencies / np.asarray(rope.frequency_factors)
    if (scaling := rope.llama3) is not None:
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        spread = scaling.high_freq_factor - scaling.low_freq_factor
        kept = np.clip((turns - scaling.low_freq_factor) / spread, 0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return frequencies


def rope_tables(
    rope: Rope, head_dim: int, max_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(cosines, sines), each [max_positions, head_dim / 2]."""
    angles = np.outer(np.arange(max_positions), rope_frequencies(rope, head_dim))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
