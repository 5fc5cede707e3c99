"""A model without weights: deterministic tokens, declared costs, and a paged memory that shows paging mistakes.

Owns the scripted model (`next_token` is its definition, `ScriptedRunner` its execution) and the builder of an engine
around it. Needs numpy, never torch. It drives the demo, the load tests and the failure tests.

The model: a memory slot holds a value that depends on the token and on *all* values before it, and the next token
depends on all values. The runner reads every earlier value through the block table, as it was before the step, as an
attention layer reads K/V: a block that is shared too early, freed too early or listed in the wrong place changes
the text, and everything that is computed from it afterwards.

Output tokens are 100 to 999. A prompt asks for an end: among its last 64 tokens, `SCRIPTED_STOP_AFTER` (3, in ASCII
"end of text") followed by a token `n` makes output token `n` (counted from 0) the EOS, `SCRIPTED_EOS_TOKEN_ID`.
So with a text edge that encodes bytes, the JSON string "hello\\u0003\\u0005" gets five tokens and the EOS. Without
it there is never an EOS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from decode.engine import Engine, EngineConfig
from decode.sampling import Chosen, SamplingParams
from decode.scheduler import ScheduledSequence, StepPlan
from decode.sequence import Sequence

SCRIPTED_MODEL = "scripted"
SCRIPTED_FINGERPRINT = "scripted-1"
SCRIPTED_EOS_TOKEN_ID = 2
SCRIPTED_STOP_AFTER = 3
SCRIPTED_MAX_MODEL_LEN = 8192
_STOP_WINDOW = 64


@dataclass(frozen=True, slots=True)
class ScriptedCosts:
    """What a step is declared to take; the runner sleeps for the sum."""

    step_ms: float = 0.0
    prefill_ms_per_token: float = 0.0
    """For every token of a step beyond one a sequence."""
    decode_ms_per_sequence: float = 0.0

    def of(self, plan: StepPlan) -> float:
        """Milliseconds for one step."""
        num_tokens = sum(scheduled.num_scheduled_tokens for scheduled in plan.scheduled)
        num_sequences = len(plan.scheduled)
        return (
            self.step_ms
            + self.prefill_ms_per_token * (num_tokens - num_sequences)
            + self.decode_ms_per_sequence * num_sequences
        )


def next_token(token_ids: Tokens[int], num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """The scripted model without a cache: the token after `token_ids`. The specification of `ScriptedRunner`."""
    _, digest = _run(token_ids, 0)
    return _choose(digest, token_ids, num_prompt_tokens, sampling)


def generate(prompt_token_ids: Tokens[int], sampling: SamplingParams, max_len: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of one request, computed without a cache: the oracle for tests."""
    sequence = Sequence("oracle", prompt_token_ids, sampling)
    while (reason := sequence.finish_reason(max_len)) is None:
        sequence.token_ids.append(next_token(sequence.token_ids, sequence.num_prompt_tokens, sampling))
    return sequence.output_token_ids, reason


class ScriptedRunner:
    """A `decode.engine.ModelRunner` over a paged memory of `num_blocks` blocks. `sleep` takes seconds."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        costs: ScriptedCosts = ScriptedCosts(),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._memory = np.full((num_blocks, block_size), 0xDEADBEEF, dtype=np.uint32)  # [block, offset]
        self._slots = self._memory.reshape(-1)  # [block * block_size + offset], the same memory
        self._costs = costs
        self._sleep = sleep

    def execute(self, plan: StepPlan) -> Chosen:
        if (cost_ms := self._costs.of(plan)) > 0:
            self._sleep(cost_ms / 1000)
        # Every read comes before every write: what this step computes can be reached from the next step on.
        digests = [
            crc32(self._read(scheduled.sequence, scheduled.num_computed_tokens)) for scheduled in plan.scheduled
        ]
        chosen = []
        for scheduled, context in zip(plan.scheduled, digests, strict=True):
            digest = self._compute(scheduled, context)
            if scheduled.samples:
                sequence = scheduled.sequence
                chosen.append(_choose(digest, sequence.token_ids, sequence.num_prompt_tokens, sequence.sampling))
        return Chosen(chosen)

    def _read(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The values of the first `num_tokens` tokens, through the block table."""
        block_size = self._memory.shape[1]
        blocks = sequence.block_table[: -(-num_tokens // block_size)]
        return self._memory[blocks].tobytes()[: 4 * num_tokens]

    def _compute(self, scheduled: ScheduledSequence, context: int) -> int:
        """Write the values of the scheduled tokens into their slots; the digest of all values so far."""
        sequence, first = scheduled.sequence, scheduled.num_computed_tokens
        last = first + scheduled.num_scheduled_tokens
        values, digest = _run(sequence.token_ids[first:last], context)
        block_size, block_table = self._memory.shape[1], sequence.block_table
        for position, value in enumerate(values, first):
            self._slots[block_table[position // block_size] * block_size + position % block_size] = value
        return digest


def scripted_engine(
    *,
    kv_cache_tokens: int,
    max_model_len: int = SCRIPTED_MAX_MODEL_LEN,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    costs: ScriptedCosts = ScriptedCosts(),
    sleep: Callable[[float], None] = time.sleep,
    block_size: int = 16,
) -> Engine:
    """An engine around the scripted model, with the limits of a real one."""
    config = EngineConfig(
        block_size=block_size,
        num_blocks=kv_cache_tokens // block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        fingerprint=SCRIPTED_FINGERPRINT,
    )
    runner = ScriptedRunner(num_blocks=config.num_blocks, block_size=block_size, costs=costs, sleep=sleep)
    return Engine(runner, config)


def _run(token_ids: Tokens[int], digest: int) -> tuple[list[int], int]:
    """The values of tokens that follow a context with `digest`, and the digest of all values after them."""
    values = []
    for token_id in token_ids:
        value = (digest * 0x9E3779B1 + token_id * 0x85EBCA6B + 1) & 0xFFFFFFFF
        values.append(value)
        digest = crc32(value.to_bytes(4, "little"), digest)
    return values, digest


def _choose(digest: int, token_ids: Tokens[int], num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """The token after `token_ids`, whose values have this digest."""
    if not sampling.ignore_eos:
        tail = token_ids[max(0, num_prompt_tokens - _STOP_WINDOW) : num_prompt_tokens]
        if SCRIPTED_STOP_AFTER in tail[:-1]:
            wanted = tail[tail.index(SCRIPTED_STOP_AFTER) + 1]
            if len(token_ids) - num_prompt_tokens >= max(wanted, sampling.min_tokens):
                return SCRIPTED_EOS_TOKEN_ID
    return 100 + digest % 900
