"""Executes plans with the native decoder: the ModelRunner of the quantised CPU variants.

Owns the translation of a plan into flat arrays and of sampling parameters into draws, and the fingerprint of the
variant. Does not know the kernels (`decode.native.model`) and to plan. No torch: a worker that serves natively
never imports it.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from decode.checkpoint.checkpoint import Checkpoint
from decode.engine.grammar import GrammarMatcher
from decode.engine.sampling import Chosen, TokenLogprobs, uniform
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import IntegrityError
from decode.native.build import NativeUnavailable, build_native
from decode.native.model import CACHE_BLOCK, LOGPROBS, NativeDecoder, Sampling, StepArrays, check_supported
from decode.native.pack import LAYOUT
from decode.native.weights import Progress, load_weights

NativeVariant = Literal["q4", "q8"]
NATIVE_VARIANTS: tuple[NativeVariant, ...] = ("q4", "q8")
"""q4: weights that the checkpoint stores in 4-bit blocks stay so, all others get 8 bits. q8: 8 bits for all.
Both: activations, keys and values in 8 bits, sums in integers and float32."""
NUMERICS = 1
"""Rises with every change of the kernels that changes a bit of the logits."""
MAX_DRAFT_ROWS = 4
"""Rows of a step with drafts, these included.

PERF: on AVX2 a step of 1, 2, 3, 4, 6, 8 rows takes 6.0, 6.1, 7.5, 9.2, 13.3, 17.4 ms on one core.
"""


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
            max_samples=max(max_num_seqs, MAX_DRAFT_ROWS),
            max_positions=max_model_len,
            num_threads=num_threads or len(os.sched_getaffinity(0)),
        )

    def execute(self, plan: StepPlan) -> Chosen:
        """Raises IntegrityError: the logits of a sampled row are not finite."""
        if not plan.scheduled:
            return Chosen([])
        arrays = step_arrays(plan, self.decoder.vocab_size)
        tokens, _ = self.decoder.step(arrays)
        if -1 in tokens:
            raise IntegrityError("logits are not finite: broken weights or a broken cache")
        if arrays.logprobs is None:
            return Chosen(tokens.tolist())
        return Chosen(tokens.tolist(), _logprobs(plan, arrays.logprobs))

    def close(self) -> None:
        self.decoder.close()


def step_arrays(plan: StepPlan, vocab_size: int) -> StepArrays:
    token_ids, row_starts, first_positions = array("i"), array("i", [0]), array("i")
    table_starts, block_tables, sample_rows = array("i"), array("i"), array("i")
    for item in plan.scheduled:
        first = item.num_computed_tokens
        end = first + item.num_scheduled_tokens
        token_ids.extend(item.sequence.token_ids[first:end])
        token_ids.extend(item.draft_token_ids)
        end += len(item.draft_token_ids)
        first_positions.append(first)
        table_starts.append(len(block_tables))
        block_tables.extend(item.sequence.block_table[: -(-end // CACHE_BLOCK)])
        row_starts.append(len(token_ids))
        if item.samples:
            sample_rows.extend(range(len(token_ids) - 1 - len(item.draft_token_ids), len(token_ids)))
    forward = StepArrays(token_ids, row_starts, first_positions, table_starts, block_tables, sample_rows)
    choices = plan.choices()
    if all(_is_plain(sequence) for sequence, _ in choices):
        return forward
    return _with_choices(forward, choices, vocab_size)


def _is_plain(sequence: Sequence) -> bool:
    """Whether its token is simply the likeliest."""
    sampling = sequence.sampling
    return (
        sampling.temperature <= 0
        and sequence.num_output_tokens >= sampling.min_tokens
        and sequence.adjustments is None
        and sequence.grammar is None
        and sampling.num_logprobs is None
    )


def _with_choices(forward: StepArrays, choices: list[tuple[Sequence, int]], vocab_size: int) -> StepArrays:
    samplings: list[Sampling] = []
    banned, adjusted, adjustments = array("i"), array("i"), array("f")
    grammars: list[GrammarMatcher] = []
    for sequence, index in choices:
        params = sequence.sampling
        stops = _banned(sequence, vocab_size)
        sampling = Sampling(
            uniform=uniform(params.seed, index),
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            top_k=params.top_k,
            first_banned=len(banned),
            num_banned=len(stops),
            num_logprobs=-1 if params.num_logprobs is None else params.num_logprobs,
            mask=-1,
        )
        banned.extend(stops)
        if sequence.adjustments is not None:
            sampling.first_adjusted, sampling.num_adjusted = len(adjusted), len(sequence.adjustments.token_ids)
            adjusted.extend(sequence.adjustments.token_ids)
            adjustments.extend(sequence.adjustments.values)
        if sequence.grammar is not None:
            sampling.mask = len(grammars)
            grammars.append(sequence.grammar)
        samplings.append(sampling)
    wants_logprobs = any(sequence.sampling.num_logprobs is not None for sequence, _ in choices)
    return replace(
        forward,
        samplings=samplings,
        banned=banned,
        adjusted=adjusted,
        adjustments=adjustments,
        masks=(lambda: np.stack([grammar.mask() for grammar in grammars])) if grammars else None,
        logprobs=np.empty(len(choices), LOGPROBS) if wants_logprobs else None,
    )


def _banned(sequence: Sequence, vocab_size: int) -> list[int]:
    """Stop tokens while it is too early for one; a grammar's mask takes care of that itself."""
    sampling = sequence.sampling
    if sequence.num_output_tokens >= sampling.min_tokens or sequence.grammar is not None:
        return []
    return [token for token in sampling.stop_token_ids if 0 <= token < vocab_size]


def _logprobs(plan: StepPlan, found: npt.NDArray[np.void]) -> dict[int, TokenLogprobs]:
    """`found`: LOGPROBS of every row that samples."""
    sampled = [sequence.sampling.num_logprobs for sequence, _ in plan.choices()]
    return {
        index: TokenLogprobs(
            float(row["chosen"]),
            tuple(zip(row["top_tokens"][:number].tolist(), row["top"][:number].tolist(), strict=True)),
        )
        for index, (number, row) in enumerate(zip(sampled, found, strict=True))
        if number is not None
    }
