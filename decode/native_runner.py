"""Executes plans with the native decoder: the ModelRunner of the quantised CPU variants.

Owns the translation of a plan into flat arrays and of sampling parameters into draws, and the fingerprint of the
variant. Refuses to know the kernels (`decode.native_model`) and to plan. No torch: a worker that serves natively
never imports it.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import Literal

from decode.checkpoint import Checkpoint
from decode.errors import IntegrityError
from decode.native_build import NativeUnavailable, build_native
from decode.native_model import CACHE_BLOCK, NativeDecoder, Sampling, StepArrays, check_supported
from decode.native_pack import LAYOUT
from decode.native_weights import Progress, load_weights
from decode.sampling import SamplingParams, uniform
from decode.scheduler import ScheduledSequence, StepPlan

NativeVariant = Literal["q4", "q8"]
NATIVE_VARIANTS: tuple[NativeVariant, ...] = ("q4", "q8")
"""q4: weights that the checkpoint stores in 4-bit blocks stay so, all others get 8 bits. q8: 8 bits for all.
Both: activations, keys and values in 8 bits, sums in integers and float32."""
NUMERICS = 1
"""Rises with every change of the kernels that changes a bit of the logits."""


def native_execution(variant: NativeVariant) -> str:
    """What the fingerprint says about the execution; the instruction set is left out, it changes no bit."""
    return f"native-{variant}-a8-kv8-layout{LAYOUT}-numerics{NUMERICS}"


class NativeModelRunner:
    """ModelRunner on the CPU. `close` frees the memory and the threads."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        variant: NativeVariant,
        num_blocks: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        cache_dir: Path,
        content_hash: str,
        block_size: int = CACHE_BLOCK,
        num_threads: int = 0,
        portable: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """`num_threads` 0: one for every processor this process may use. `cache_dir` keeps library and weights.

        Raises NativeUnavailable: no compiler, sizes the kernels cannot handle, or not enough memory.
        """
        if block_size != CACHE_BLOCK:
            raise NativeUnavailable(f"block_size {block_size}: the native cache has blocks of {CACHE_BLOCK} tokens")
        check_supported(checkpoint.config)
        library = build_native(cache_dir, portable=portable)
        weights = load_weights(checkpoint, content_hash, cache_dir, eight_bit=variant == "q8", progress=progress)
        self.decoder = NativeDecoder(
            library,
            checkpoint.config,
            weights,
            num_blocks=num_blocks,
            max_rows=max_num_batched_tokens,
            max_samples=max_num_seqs,
            max_positions=max_model_len,
            num_threads=num_threads or len(os.sched_getaffinity(0)),
        )

    def execute(self, plan: StepPlan) -> list[int]:
        """Raises IntegrityError: the logits of a sampled row are not finite."""
        if not plan.scheduled:
            return []
        tokens, _ = self.decoder.step(step_arrays(plan, self.decoder.vocab_size))
        if -1 in tokens:
            raise IntegrityError("logits are not finite: broken weights or a broken cache")
        return tokens.tolist()

    def close(self) -> None:
        self.decoder.close()


def step_arrays(plan: StepPlan, vocab_size: int) -> StepArrays:
    token_ids, row_starts, first_positions = array("i"), array("i", [0]), array("i")
    table_starts, block_tables, sample_rows = array("i"), array("i"), array("i")
    for item in plan.scheduled:
        first = item.num_computed_tokens
        end = first + item.num_scheduled_tokens
        token_ids.extend(item.sequence.token_ids[first:end])
        first_positions.append(first)
        table_starts.append(len(block_tables))
        block_tables.extend(item.sequence.block_table[: -(-end // CACHE_BLOCK)])
        row_starts.append(len(token_ids))
        if item.samples:
            sample_rows.append(len(token_ids) - 1)
    samplings, banned = _samplings([item for item in plan.scheduled if item.samples], vocab_size)
    return StepArrays(
        token_ids, row_starts, first_positions, table_starts, block_tables, sample_rows, samplings, banned
    )


def _samplings(sampled: list[ScheduledSequence], vocab_size: int) -> tuple[list[Sampling], array[int]]:
    banned = array("i")
    if all(item.sequence.sampling.temperature <= 0 and not _banned(item, vocab_size) for item in sampled):
        return [], banned
    samplings = []
    for item in sampled:
        sampling: SamplingParams = item.sequence.sampling
        stops = _banned(item, vocab_size)
        draw = uniform(sampling.seed, item.sequence.num_output_tokens)
        samplings.append(
            Sampling(
                draw, sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k, len(banned), len(stops)
            )
        )
        banned.extend(stops)
    return samplings, banned


def _banned(item: ScheduledSequence, vocab_size: int) -> list[int]:
    sampling = item.sequence.sampling
    if item.sequence.num_output_tokens >= sampling.min_tokens:
        return []
    return [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]
