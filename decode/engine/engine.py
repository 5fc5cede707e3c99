"""Tokens in, tokens out: the engine that a worker drives, one `step()` at a time, from one thread.

Owns the live sequences, their admission to the scheduler and the commit of what a step computed. Does not know how
a plan is executed: that is a `ModelRunner` (`decode.oracle.runner` with torch, `decode.scripted` without).
"""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from decode.engine.block_manager import BlockManager
from decode.engine.grammar import GrammarMatcher, Grammars
from decode.engine.lookup import PromptLookup
from decode.engine.sampling import Chosen, TokenLogprobs
from decode.engine.scheduler import ScheduledSequence, Scheduler, StepPlan
from decode.engine.sequence import FinishReason, Sequence
from decode.errors import (
    DuplicateSequence,
    EmptyPrompt,
    IntegrityError,
    InvalidGrammar,
    PromptTooLong,
    TokenOutOfRange,
)

COMPILE_WAIT_S = 0.005
"""How long a step without anything to run waits for a grammar: whoever turns the engine may have other news."""


class ModelRunner(Protocol):
    """Executes a plan: writes the K/V of the scheduled tokens into their blocks and chooses the next tokens."""

    def execute(self, plan: StepPlan) -> Chosen:
        """A token for each of `plan.choices()`, and what else its sequence asked for.

        A token depends on its own sequence alone: the tokens and `sampling`, `adjustments` and `grammar`, and behind
        drafts on these. The mask of a grammar is asked for when the logits are there, no earlier: it is being
        computed.
        May raise; then nothing counts as computed and the plan's sequences are scheduled again.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The limits of one engine. `fingerprint` names everything that decides what a token is.

    Raises ValueError naming the field.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    fingerprint: str
    block_size: int = 16
    vocab_size: int = 1 << 31
    variant: str = "scripted"
    """The execution variant, for people; the fingerprint covers it."""
    architecture: str = "scripted"
    """The family of the checkpoint, for people; the fingerprint covers it."""
    max_draft_rows: int = 0
    """Tokens are drafted in steps of at most so many rows, drafts included; 0: never. Needs a runner that computes
    drafts, and gives a token the same bits with several rows of its sequence as one after the other."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_model_len", "max_num_seqs", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs, "
                f"{self.max_num_seqs}: every running sequence decodes one token a step"
            )

    @property
    def max_sequence_len(self) -> int:
        """The longest prompt and output together: the context, or the whole K/V pool where that is smaller."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New output tokens `first_index`, ... of one sequence; `finish_reason` is set with the last.

    `failure` is set instead when the sequence cannot go on, for a reason of its own; there are no tokens with it.
    """

    sequence_id: str
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token if its `SamplingParams.num_logprobs` is set."""
    failure: str | None = None


class Shed(NamedTuple):
    """What `Engine.shed` gave up."""

    num_preempted: int
    has_smaller_steps: bool
    """Fewer tokens are scheduled together than before."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """`num_running` sequences hold blocks, `num_waiting` do not; free blocks include the reusable ones."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int


class Engine:
    """Not thread-safe: `add`, `abort` and `step` come from one thread, between steps."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, grammars: Grammars | None = None) -> None:
        """Without `grammars`, sequences that have one are refused."""
        self.config = config
        self._runner = runner
        self._grammars = grammars
        self._blocks = BlockManager(config.num_blocks, config.block_size, config.fingerprint)
        self._scheduler = Scheduler(
            self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_draft_rows=config.max_draft_rows,
        )
        self._sequences: dict[str, Sequence] = {}
        self._compiling: dict[str, tuple[Sequence, Future[GrammarMatcher]]] = {}
        """Live sequences that the scheduler does not know yet."""
        self._complete: list[SequenceOutput] = []
        self.num_draft_tokens = 0
        """Since the start, as those of which were right."""
        self.num_accepted_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; it runs when its turn comes.

        A continuation that is complete already is reported by the next step, without tokens. One with a grammar is
        scheduled when the grammar is compiled; if it cannot be followed, a later step reports that as its `failure`.
        Raises EmptyPrompt, TokenOutOfRange, DuplicateSequence, PromptTooLong if it could never run, InvalidGrammar
        without a vocabulary.
        """
        config, name = self.config, sequence.sequence_id
        if name in self._sequences:
            raise DuplicateSequence(f"{name}: already in the engine")
        if not sequence.num_prompt_tokens:
            raise EmptyPrompt(f"{name}: the prompt holds no token")
        for token_id in (min(sequence.token_ids), max(sequence.token_ids)):
            if not 0 <= token_id < config.vocab_size:
                raise TokenOutOfRange(f"{name}: token id {token_id} is not in [0, {config.vocab_size})")
        reason = sequence.finish_reason(config.max_model_len) if sequence.num_output_tokens else None
        if reason is not None:
            self._complete.append(SequenceOutput(name, sequence.num_output_tokens, (), reason, 0))
            return
        num_slots = config.num_blocks * config.block_size
        for limit, max_tokens in (("context", config.max_model_len), ("K/V cache", num_slots)):
            if sequence.num_tokens + 1 > max_tokens:
                raise PromptTooLong(
                    f"{name}: {sequence.num_tokens} tokens and at least one new one exceed the {limit} of "
                    f"{max_tokens} tokens",
                    fits_elsewhere=sequence.num_output_tokens > 0,  # with a full context it is complete, see above
                )
        if sequence.sampling.grammar and self._grammars is None:
            raise InvalidGrammar(name, "this engine has no vocabulary to follow one with")
        if config.max_draft_rows:
            sequence.lookup = PromptLookup.of(sequence.sampling, sequence.num_prompt_tokens, config.max_sequence_len)
        self._sequences[name] = sequence
        if sequence.sampling.grammar and self._grammars is not None:
            matcher = self._grammars.begin(name, sequence.sampling, sequence.output_token_ids)
            self._compiling[name] = sequence, matcher
        else:
            self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> bool:
        """Drop a sequence, wherever it is; its slot and blocks are free at once. False if it is not here."""
        sequence = self._sequences.pop(sequence_id, None)
        if sequence is None:
            num_complete = len(self._complete)
            self._complete = [output for output in self._complete if output.sequence_id != sequence_id]
            return len(self._complete) < num_complete
        if (compiling := self._compiling.pop(sequence_id, None)) is not None:
            compiling[1].cancel()
        else:
            self._scheduler.remove(sequence)
        return True

    def step(self) -> list[SequenceOutput]:
        """Schedule, execute, commit. Empty when there was nothing to run or only prefill chunks ran.

        Whatever the runner raises passes through, with nothing committed: step again, or `shed` first.
        """
        outputs, self._complete = self._complete, []
        try:
            if self._compiling:
                self._take_compiled(outputs)
            plan = self._scheduler.schedule()
            if plan.scheduled:
                for scheduled in plan.scheduled:
                    if scheduled.samples and scheduled.sequence.grammar is not None:
                        scheduled.sequence.grammar.prepare()
                self._commit(plan, self._runner.execute(plan), outputs)
        except BaseException:
            self._complete = outputs
            raise
        return outputs

    def _take_compiled(self, outputs: list[SequenceOutput]) -> None:
        """Schedule the sequences whose grammar is there; waits a moment for one when there is nothing else to do."""
        if not outputs and len(self._compiling) == len(self._sequences):
            wait([matcher for _, matcher in self._compiling.values()], COMPILE_WAIT_S, FIRST_COMPLETED)
        for sequence, matcher in [one for one in self._compiling.values() if one[1].done()]:
            del self._compiling[sequence.sequence_id]
            try:
                sequence.grammar = matcher.result()
            except InvalidGrammar as error:
                del self._sequences[sequence.sequence_id]
                first_index = sequence.num_output_tokens
                outputs.append(SequenceOutput(sequence.sequence_id, first_index, (), None, 0, failure=str(error)))
            else:
                self._scheduler.add(sequence)

    def _commit(self, plan: StepPlan, step: Chosen, outputs: list[SequenceOutput]) -> None:
        token_ids, logprobs = step.token_ids, step.logprobs
        num_samples = sum(scheduled.samples + len(scheduled.draft_token_ids) for scheduled in plan.scheduled)
        if len(token_ids) != num_samples:
            raise IntegrityError(f"the runner chose {len(token_ids)} tokens for {num_samples} rows that sample")
        commit, max_len = self._blocks.commit, self.config.max_sequence_len
        num_chosen = 0
        for scheduled in plan.scheduled:
            sequence = scheduled.sequence
            commit(sequence, scheduled.num_scheduled_tokens)
            if not scheduled.samples:
                continue
            output = _continued(sequence, token_ids[num_chosen], max_len, logprobs.get(num_chosen))
            num_chosen += 1
            if scheduled.draft_token_ids:
                num_rows = len(scheduled.draft_token_ids)
                output = self._accept(scheduled, output, token_ids[num_chosen : num_chosen + num_rows])
                num_chosen += num_rows
            outputs.append(output)
            if output.finish_reason is not None or output.failure is not None:
                del self._sequences[sequence.sequence_id]
                self._scheduler.remove(sequence)
                self._recover()

    def _accept(self, scheduled: ScheduledSequence, output: SequenceOutput, token_ids: list[int]) -> SequenceOutput:
        """Go on with the token that was chosen behind each draft, as long as the drafts before it were right.

        The K/V of a draft that was wrong is not committed: its place is computed again with the right token.
        """
        sequence, chosen, reason = scheduled.sequence, [*output.token_ids], output.finish_reason
        for draft, token_id in zip(scheduled.draft_token_ids, token_ids, strict=True):
            if reason is not None or chosen[-1] != draft:
                break
            self._blocks.commit(sequence, 1)
            sequence.append_token(token_id)
            chosen.append(token_id)
            reason = sequence.finish_reason(self.config.max_sequence_len)
        num_accepted = len(chosen) - len(output.token_ids)
        self.num_draft_tokens += len(token_ids)
        self.num_accepted_tokens += num_accepted
        assert sequence.lookup is not None
        sequence.lookup.learn(len(token_ids), num_accepted, sequence.num_tokens)
        return replace(output, token_ids=tuple(chosen), finish_reason=reason)

    def shed(self) -> Shed:
        """Give up half of the load after a step that the device could not hold, and say what that was.

        The latest arrivals wait again and fewer sequences and tokens are scheduled together from now on. Every
        sequence that finishes lets one more in. With a single sequence and steps of a single token nothing is left
        to give up.
        """
        scheduler = self._scheduler
        num_admitted = len(scheduler.admitted)
        num_kept = max(1, num_admitted // 2)
        num_preempted = max(0, num_admitted - num_kept)
        for _ in range(num_preempted):
            scheduler.preempt_latest()
        scheduler.max_num_seqs = num_kept
        num_batched_tokens = scheduler.max_num_batched_tokens
        scheduler.max_num_batched_tokens = max(num_kept, num_batched_tokens // 2)
        return Shed(num_preempted, scheduler.max_num_batched_tokens < num_batched_tokens)

    def _recover(self) -> None:
        """Undo a little of an earlier `shed`."""
        scheduler, config = self._scheduler, self.config
        if scheduler.max_num_seqs < config.max_num_seqs:
            scheduler.max_num_seqs += 1
        if scheduler.max_num_batched_tokens < config.max_num_batched_tokens:
            doubled = 2 * scheduler.max_num_batched_tokens
            scheduler.max_num_batched_tokens = min(config.max_num_batched_tokens, doubled)

    @property
    def num_preemptions(self) -> int:
        """How often a sequence lost its blocks, since the start."""
        return self._scheduler.num_preemptions

    @property
    def has_unfinished(self) -> bool:
        return bool(self._sequences or self._complete)

    @property
    def admitted_ids(self) -> tuple[str, ...]:
        """The sequences that have a slot; after a step that failed, those that it may have been about."""
        return tuple(sequence.sequence_id for sequence in self._scheduler.admitted)

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.admitted),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            num_free_blocks=self._blocks.num_free_blocks,
            num_blocks=self._blocks.num_blocks,
        )

    def can_accept(self) -> bool:
        """Whether taking one more request is reasonable: a slot is free, and one slot's fair share of the blocks.

        Sequences that wait for their first turn count as if they had their blocks.
        """
        scheduler, blocks = self._scheduler, self._blocks
        if len(self._sequences) >= scheduler.max_num_seqs:
            return False
        share = max(1, blocks.num_blocks // self.config.max_num_seqs)
        num_compiling = sum(blocks.num_blocks_for(len(seq.token_ids)) for seq, _ in self._compiling.values())
        return blocks.num_free_blocks - scheduler.num_blocks_claimed() - num_compiling >= share

    def check_integrity(self) -> None:
        """Compare the block books with the live sequences. Raises IntegrityError: a block leaked or is used twice."""
        scheduler = self._scheduler
        if len(scheduler.admitted) + len(scheduler.waiting) + len(self._compiling) != len(self._sequences):
            raise IntegrityError("the queues do not hold exactly the live sequences")
        self._blocks.check(sequence.block_table for sequence in self._sequences.values())

    def check_idle(self) -> None:
        """Check the integrity if nothing is live, for the loop to call when it has nothing to do."""
        if not self._sequences:
            self.check_integrity()


def _continued(sequence: Sequence, token_id: int, max_len: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
    """Append the token that was chosen for a sequence; what that is to the outside."""
    grammar, first_index = sequence.grammar, sequence.num_output_tokens
    if grammar is not None and grammar.failure:
        return SequenceOutput(
            sequence.sequence_id, first_index, (), None, sequence.num_cached_tokens, failure=grammar.failure
        )
    sequence.append_token(token_id)
    reason = sequence.finish_reason(max_len)
    if grammar is not None and reason is None:
        grammar.accept(token_id)
    return SequenceOutput(
        sequence.sequence_id,
        first_index,
        (token_id,),
        reason,
        sequence.num_cached_tokens,
        () if logprobs is None else (logprobs,),
    )
