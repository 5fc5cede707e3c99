"""Executes step plans with torch: plan -> batch -> forward -> sampled tokens.

Owns the model, the K/V memory and the thread count of one engine. Does not plan and to change sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from decode.checkpoint.checkpoint import Checkpoint
from decode.engine.sampling import Chosen
from decode.engine.scheduler import StepPlan
from decode.errors import DeviceOutOfMemory
from decode.oracle.attention import CHUNK
from decode.oracle.batch import build_batch
from decode.oracle.kv_cache import KvCache
from decode.oracle.model import Decoder, model_windows
from decode.oracle.sampler import SampleRow, sample
from decode.oracle.weights import Progress

VARIANTS: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYOUT = "torch-1"
"""Rises when the same weights give other bits: part of the fingerprint."""


class TorchModelRunner:
    """A ModelRunner. `variant` is a key of `VARIANTS`; `num_threads` is set for the whole process."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        variant: str,
        device: str,
        kv_cache_tokens: int,
        block_size: int = 16,
        num_threads: int,
        max_model_len: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Raises ValueError: a block size that does not divide the attention chunk."""
        if CHUNK % block_size:
            raise ValueError(f"block_size is {block_size}, must divide {CHUNK}")
        torch.set_num_threads(num_threads)
        config, dtype = checkpoint.config, VARIANTS[variant]
        self._device = torch.device(device)
        self.num_blocks = kv_cache_tokens // block_size
        self._max_len = min(max_model_len or config.max_model_len, config.max_model_len, kv_cache_tokens)
        with torch.inference_mode():
            self._model = Decoder(checkpoint, dtype, self._device, self._max_len, progress)
            self._cache = KvCache(
                config.num_layers,
                config.num_kv_heads,
                config.head_dim,
                self.num_blocks,
                block_size,
                dtype,
                self._device,
            )
        self._windows = model_windows(config)

    def execute(self, plan: StepPlan) -> Chosen:
        """Raises DeviceOutOfMemory; then nothing counts as computed."""
        if not plan.scheduled:
            return Chosen([])
        sequences = [scheduled.sequence for scheduled in plan.scheduled if scheduled.samples]
        rows = [SampleRow(s.sampling, s.num_output_tokens, s.adjustments, s.grammar) for s in sequences]
        try:
            with torch.inference_mode():
                return sample(self.logits(plan), rows)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(str(error)) from error

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run the plan up to the logits of the rows that sample, [num_samples, vocab], float32."""
        with torch.inference_mode():
            batch = build_batch(
                plan,
                counts=self._model.counts,
                head_counts=self._model.head_counts,
                shape=self._model.attention_shape,
                windows=self._windows,
                device=self._device,
            )
            return self._model.forward(batch, self._cache)
