"""A plan as tensors."""

from __future__ import annotations

import torch

from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import ScheduledSequence, StepPlan
from decode.engine.sequence import Sequence
from decode.oracle.attention import AttentionShape
from decode.oracle.batch import StepTensors, build_batch
from decode.oracle.layers import RowCounts


def scheduled(tokens: list[int], table: list[int], start: int, count: int, samples: bool) -> ScheduledSequence:
    sequence = Sequence("s", tokens, SamplingParams(max_tokens=1))
    sequence.block_table = table
    return ScheduledSequence(sequence, start, count, samples)


def batch(*sequences: ScheduledSequence) -> StepTensors:
    return build_batch(
        StepPlan(sequences, (), 16),
        counts=RowCounts((4, 8)),
        head_counts=RowCounts((2, 3)),
        shape=AttentionShape(2, 1, 4),
        windows=frozenset({0, 8}),
        device=torch.device("cpu"),
    )


LONG = scheduled(list(range(100, 140)), [5, 9, 2], 14, 4, False)
SHORT = scheduled([7, 8], [3], 1, 1, True)


def test_tokens_stand_one_sequence_behind_the_other_and_are_padded_to_an_allowed_count() -> None:
    made = batch(LONG, SHORT)
    assert made.num_tokens == 5
    assert made.input_ids.tolist() == [114, 115, 116, 117, 8, 0, 0, 0]
    assert made.positions.tolist() == [14, 15, 16, 17, 1, 0, 0, 0]


def test_slots_follow_the_block_table() -> None:
    assert batch(LONG, SHORT).slot_mapping.tolist() == [5 * 16 + 14, 5 * 16 + 15, 9 * 16, 9 * 16 + 1, 3 * 16 + 1]


def test_only_the_last_row_of_a_sampling_sequence_is_sampled() -> None:
    made = batch(SHORT, LONG, SHORT, SHORT)
    assert made.num_samples == 3
    assert made.sample_rows.tolist() == [0, 5, 6]


def test_sampled_rows_are_padded_to_an_allowed_count() -> None:
    made = batch(LONG, SHORT)
    assert made.num_samples == 1
    assert made.sample_rows.tolist() == [4, 0]


def test_a_step_that_samples_nothing_wants_no_logits() -> None:
    made = batch(LONG)
    assert (made.num_samples, made.sample_rows.tolist()) == (0, [])


def test_attention_is_planned_for_every_window() -> None:
    assert batch(LONG, SHORT).attention.keys() == {0, 8}
