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

A prompt dictates its output: the bytes between the last `SCRIPTED_SAY` (14, in ASCII "shift out") and the
`SCRIPTED_SAID` (15, "shift in") after it come back one token a byte, as ids `SCRIPTED_FIRST_BYTE` + byte, and then
the EOS. So the JSON string "\\u000ehello\\u000f" is answered with "hello".

A grammar sees those 256 byte tokens and the EOS, no others. What was dictated is chosen as far as the grammar allows
it. Otherwise the output gets to its end: the EOS if it is allowed, else a `"`, a `}` or a `]`, else one of the
allowed tokens, depending on the digest.

Of the sampling parameters the model honours `max_tokens`, `min_tokens`, `ignore_eos`, `grammar` and the two ends of
`logit_bias`: at 100 a token takes the place of every token that is made up (the first such in the list), at -100 it
is never made up (the next id is). Temperature, filters, seed, penalties and other biases change nothing. Log
probabilities are made up: the chosen token is the likeliest, at one of 64 values above -1, each next one has 1 less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from decode.checkpoint.names import SCRIPTED_EOS_TOKEN_ID, SCRIPTED_FIRST_BYTE, SCRIPTED_VOCAB_SIZE
from decode.checkpoint.vocabulary import Vocabulary
from decode.engine.engine import Engine, EngineConfig
from decode.engine.grammar import GrammarMatcher, Grammars, Mask
from decode.engine.sampling import MAX_LOGPROBS, Chosen, SamplingParams, TokenLogprobs
from decode.engine.scheduler import ScheduledSequence, StepPlan
from decode.engine.sequence import Sequence

SCRIPTED_FINGERPRINT = "scripted-2"
SCRIPTED_STOP_AFTER = 3
SCRIPTED_SAY = 14
SCRIPTED_SAID = 15
SCRIPTED_MAX_MODEL_LEN = 8192
_STOP_WINDOW = 64
_FIRST, _NUM_TOKENS = 100, 900
_ENDS = (SCRIPTED_EOS_TOKEN_ID, *(SCRIPTED_FIRST_BYTE + byte for byte in b'"}]'))


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


def next_token(
    token_ids: Tokens[int], num_prompt_tokens: int, sampling: SamplingParams, grammar: GrammarMatcher | None = None
) -> int:
    """The scripted model without a cache: the token after `token_ids`. The specification of `ScriptedRunner`."""
    _, digest = _run(token_ids, 0)
    return _choose(digest, token_ids, num_prompt_tokens, sampling, grammar)


def generate(prompt_token_ids: Tokens[int], sampling: SamplingParams, max_len: int) -> tuple[list[int], str]:
    """Output tokens and finish reason of one request, computed without a cache: the oracle for tests."""
    sequence = Sequence("oracle", prompt_token_ids, sampling)
    grammars = Grammars(scripted_vocabulary) if sampling.grammar else None
    while (reason := sequence.finish_reason(max_len)) is None:
        grammar = grammars.matcher("oracle", sampling, sequence.output_token_ids) if grammars else None
        sequence.token_ids.append(next_token(sequence.token_ids, sequence.num_prompt_tokens, sampling, grammar))
    return sequence.output_token_ids, reason


def scripted_vocabulary() -> Vocabulary:
    """What a grammar sees."""
    token_bytes = [b""] * SCRIPTED_FIRST_BYTE + [bytes([byte]) for byte in range(256)]
    return Vocabulary(token_bytes, {SCRIPTED_EOS_TOKEN_ID: "<eos>"}, (SCRIPTED_EOS_TOKEN_ID,))


class ScriptedRunner:
    """A `decode.engine.engine.ModelRunner` over a paged memory of `num_blocks` blocks. `sleep` takes seconds."""

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
        chosen: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for scheduled, context in zip(plan.scheduled, digests, strict=True):
            digests_of_rows = self._compute(scheduled, context)
            if scheduled.samples:
                sequence, drafts = scheduled.sequence, scheduled.draft_token_ids
                sampling, num_prompt_tokens = sequence.sampling, sequence.num_prompt_tokens
                for number, digest in enumerate(digests_of_rows):
                    token_ids = [*sequence.token_ids, *drafts[:number]] if number else sequence.token_ids
                    token = _choose(digest, token_ids, num_prompt_tokens, sampling, sequence.grammar)
                    if sampling.num_logprobs is not None:
                        logprobs[len(chosen)] = _logprobs(digest, token, sampling.num_logprobs)
                    chosen.append(token)
        return Chosen(chosen, logprobs)

    def _read(self, sequence: Sequence, num_tokens: int) -> bytes:
        """The values of the first `num_tokens` tokens, through the block table."""
        block_size = self._memory.shape[1]
        blocks = sequence.block_table[: -(-num_tokens // block_size)]
        return self._memory[blocks].tobytes()[: 4 * num_tokens]

    def _compute(self, scheduled: ScheduledSequence, digest: int) -> list[int]:
        """Write the values of the scheduled tokens and drafts into their slots, behind those with `digest`.

        The digests of all values up to the last token, and up to each draft.
        """
        sequence, position = scheduled.sequence, scheduled.num_computed_tokens
        last = position + scheduled.num_scheduled_tokens
        block_size, block_table = self._memory.shape[1], sequence.block_table
        digests = []
        for token_ids in (sequence.token_ids[position:last], *([draft] for draft in scheduled.draft_token_ids)):
            values, digest = _run(token_ids, digest)
            for value in values:
                self._slots[block_table[position // block_size] * block_size + position % block_size] = value
                position += 1
            digests.append(digest)
        return digests


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
    return Engine(runner, config, Grammars(scripted_vocabulary))


def _run(token_ids: Tokens[int], digest: int) -> tuple[list[int], int]:
    """The values of tokens that follow a context with `digest`, and the digest of all values after them."""
    values = []
    for token_id in token_ids:
        value = (digest * 0x9E3779B1 + token_id * 0x85EBCA6B + 1) & 0xFFFFFFFF
        values.append(value)
        digest = crc32(value.to_bytes(4, "little"), digest)
    return values, digest


def _choose(
    digest: int,
    token_ids: Tokens[int],
    num_prompt_tokens: int,
    sampling: SamplingParams,
    grammar: GrammarMatcher | None,
) -> int:
    """The token after `token_ids`, whose values have this digest."""
    wish = _dictated(token_ids, num_prompt_tokens, sampling)
    if grammar is not None:
        return _allowed(grammar.mask(), wish, digest)
    return _made_up(digest, sampling) if wish is None else wish


def _dictated(token_ids: Tokens[int], num_prompt_tokens: int, sampling: SamplingParams) -> int | None:
    """What the prompt asks for at this place, if anything."""
    num_output_tokens = len(token_ids) - num_prompt_tokens
    said = _said(token_ids, num_prompt_tokens)
    if said is not None and num_output_tokens < len(said):
        return SCRIPTED_FIRST_BYTE + said[num_output_tokens]
    if sampling.ignore_eos:
        return None
    wanted = None if said is None else len(said)
    tail = token_ids[max(0, num_prompt_tokens - _STOP_WINDOW) : num_prompt_tokens]
    if said is None and SCRIPTED_STOP_AFTER in tail[:-1]:
        wanted = tail[tail.index(SCRIPTED_STOP_AFTER) + 1]
    if wanted is not None and num_output_tokens >= max(wanted, sampling.min_tokens):
        return SCRIPTED_EOS_TOKEN_ID
    return None


def _said(token_ids: Tokens[int], num_prompt_tokens: int) -> Tokens[int] | None:
    """The bytes of the prompt that are to come back."""
    try:
        token_ids.index(SCRIPTED_SAY, 0, num_prompt_tokens)
    except ValueError:
        return None
    prompt = token_ids[:num_prompt_tokens]
    begin = num_prompt_tokens - prompt[::-1].index(SCRIPTED_SAY)
    said = prompt[begin:]
    if SCRIPTED_SAID not in said:
        return None
    said = said[: said.index(SCRIPTED_SAID)]
    return said if all(byte < 256 for byte in said) else None


def _made_up(digest: int, sampling: SamplingParams) -> int:
    token = _FIRST + digest % _NUM_TOKENS
    if not sampling.logit_bias:
        return token
    forced = [biased for biased, bias in sampling.logit_bias if bias >= 100]
    banned = {biased for biased, bias in sampling.logit_bias if bias <= -100}
    cycle = (_FIRST + (digest + step) % _NUM_TOKENS for step in range(_NUM_TOKENS))
    return forced[0] if forced else next((other for other in cycle if other not in banned), token)


def _allowed(mask: Mask, wish: int | None, digest: int) -> int:
    allowed = np.unpackbits(mask.view(np.uint8), count=SCRIPTED_VOCAB_SIZE, bitorder="little").nonzero()[0].tolist()
    for token in (wish, *_ENDS):
        if token in allowed:
            return int(token)
    return int(allowed[digest % len(allowed)])


def _logprobs(digest: int, token: int, number: int) -> TokenLogprobs:
    logprob = -(digest % 64) / 64
    others = (_FIRST + (token + step) % _NUM_TOKENS for step in range(MAX_LOGPROBS))
    likeliest = [token, *(other for other in others if other != token)][:number]
    return TokenLogprobs(logprob, tuple((other, logprob - rank) for rank, other in enumerate(likeliest)))
