"""One step as tensors: what a plan says, in the shapes that the decoder reads.

Owns the translation from `StepPlan` to tensors. Does not compute anything and to change a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.engine.scheduler import StepPlan
from decode.oracle.attention import AttentionPlan, AttentionShape, Span, plan_attention
from decode.oracle.layers import RowCounts


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The first `num_tokens` of `num_rows` rows are real; the others bring the count to an allowed one."""

    input_ids: Tensor
    """[num_rows], int64"""
    positions: Tensor
    """[num_rows]"""
    slot_mapping: Tensor
    """[num_tokens]: where the K and V of each token go."""
    sample_rows: Tensor
    """[num_samples, padded to an allowed count]: the rows whose logits are wanted, in plan order."""
    num_samples: int
    attention: dict[int, AttentionPlan]
    """By window; 0 is none."""

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


def build_batch(
    plan: StepPlan,
    *,
    counts: RowCounts,
    head_counts: RowCounts,
    shape: AttentionShape,
    windows: frozenset[int],
    device: torch.device,
) -> StepTensors:
    """`windows`: those that the model's layers use."""
    block_size = plan.block_size
    spans: list[Span] = []
    token_ids: list[int] = []
    positions, slots, sample_rows = [], [], []
    for scheduled in plan.scheduled:
        sequence, start = scheduled.sequence, scheduled.num_computed_tokens
        stop = start + scheduled.num_scheduled_tokens
        spans.append(Span(len(token_ids), start, stop - start, sequence.block_table))
        token_ids += sequence.token_ids[start:stop]
        span_positions = np.arange(start, stop)
        table = np.asarray(sequence.block_table[: (stop - 1) // block_size + 1])
        positions.append(span_positions)
        slots.append(table[span_positions // block_size] * block_size + span_positions % block_size)
        if scheduled.samples:
            sample_rows.append(len(token_ids) - 1)
    num_rows = counts.padded(len(token_ids))
    padding = num_rows - len(token_ids)
    sample_padding = head_counts.padded(len(sample_rows)) - len(sample_rows)
    return StepTensors(
        input_ids=torch.tensor(token_ids + [0] * padding, device=device),
        positions=torch.from_numpy(np.concatenate((*positions, np.zeros(padding, np.int64)))).to(device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        sample_rows=torch.tensor(sample_rows + [0] * sample_padding, dtype=torch.int64, device=device),
        num_samples=len(sample_rows),
        attention={window: plan_attention(spans, shape, window, block_size, num_rows, device) for window in windows},
    )
