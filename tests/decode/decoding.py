"""Running an engine in tests, with the logits of every sampled row kept."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from decode.checkpoint.checkpoint import Checkpoint
from decode.engine.engine import Engine, EngineConfig
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.oracle.runner import TorchModelRunner

GREEDY = SamplingParams(max_tokens=24, temperature=0)


class RecordingRunner(TorchModelRunner):
    """Keeps (sequence id, output index) -> logits, and every plan's preemptions."""

    def __init__(self, checkpoint: Checkpoint, **settings: Any) -> None:
        defaults: dict[str, Any] = {"variant": "fp32", "device": "cpu", "num_threads": 1}
        super().__init__(checkpoint, **(defaults | settings))
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.num_preempted = 0
        self.max_chunk = 0

    def logits(self, plan: StepPlan) -> torch.Tensor:
        logits = super().logits(plan)
        self.num_preempted += len(plan.preempted)
        self.max_chunk = max(self.max_chunk, *(scheduled.num_scheduled_tokens for scheduled in plan.scheduled))
        sampling = [scheduled.sequence for scheduled in plan.scheduled if scheduled.samples]
        for sequence, row in zip(sampling, logits, strict=True):
            self.rows[sequence.sequence_id, sequence.num_output_tokens] = row.clone()
        return logits


def engine(runner: TorchModelRunner, *, budget: int = 512, max_num_seqs: int = 8) -> Engine:
    """A fresh engine (empty prefix cache) over the runner's memory."""
    config = EngineConfig(
        num_blocks=runner.num_blocks,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        fingerprint="test",
    )
    return Engine(runner, config)


def run(engine: Engine, sequences: Iterable[Sequence] = ()) -> dict[str, list[int]]:
    """Step until nothing is left; output tokens by sequence id, and no block left behind."""
    tokens: dict[str, list[int]] = {}
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(output.sequence_id, []).extend(output.token_ids)
    engine.check_idle()
    return tokens


def generate(runner: TorchModelRunner, prompt: list[int], sampling: SamplingParams = GREEDY) -> list[int]:
    return run(engine(runner), [Sequence("only", prompt, sampling)])["only"]
