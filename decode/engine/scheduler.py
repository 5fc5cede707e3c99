"""What runs in the next step: a frozen plan, made from the waiting and the admitted sequences.

Owns the two queues and the policy. Does not know what a block holds and how a plan is executed.
The policy, in the order it is applied:

1. Decode first: every sequence with one token left to compute gets it, in order of arrival. When blocks run out, the
   latest arrival gives up all its blocks and waits again (preemption by recompute, vLLM's first policy); the earliest
   always proceeds, so there is no livelock.
2. Prefill from what is left of `max_num_batched_tokens`, in chunks: the oldest prefill or waiting sequence gets half
   of it, the rest goes to the shortest first. So a short prompt does not wait behind a long one, and a long one is
   not starved by short ones.
3. Admission, when a prefill's turn comes to one that waits: it gets blocks for all its tokens at once, so a prefill
   never stalls half-way. One that does not fit is passed over; after `MAX_OVERTAKEN` times it is waited for.
   One whose next block is just being computed by another sequence is passed over too: it will find it in the cache.
4. Drafts, in a step of a few decodes and nothing else: rows behind a sequence's last token for the tokens that it
   may go on with, up to `max_draft_rows` rows in all. They take free blocks only while nobody waits and one for each
   sequence that runs stays spare, as in admission.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

from decode.engine.block_manager import BlockManager
from decode.engine.sequence import Sequence

MAX_OVERTAKEN = 32


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute tokens [num_computed_tokens, num_computed_tokens + num_scheduled_tokens) of `sequence` in this step.

    `samples`: these are its last tokens, so the logits of the last one give the next token. Only then it may have
    drafts: they are computed as if they followed, and the logits of each of them give a token, too.
    """

    sequence: Sequence
    num_computed_tokens: int
    num_scheduled_tokens: int
    samples: bool
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `preempted` are the ids that lost their blocks while the plan was made."""

    scheduled: tuple[ScheduledSequence, ...]
    preempted: tuple[str, ...]
    block_size: int

    def choices(self) -> list[tuple[Sequence, int]]:
        """Whose token and which index of its output: for every token to choose, in order."""
        return [
            (scheduled.sequence, scheduled.sequence.num_output_tokens + number)
            for scheduled in self.scheduled
            for number in range(scheduled.samples + len(scheduled.draft_token_ids))
        ]


class Scheduler:
    """Sequences wait in `waiting` and run in `admitted`, both in order of arrival."""

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_draft_rows: int = 0
    ) -> None:
        self._blocks = blocks
        self._max_draft_rows = max_draft_rows
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self.num_preemptions = 0
        """Since the start."""
        self._num_arrived = 0

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait behind all others."""
        self._num_arrived += 1
        sequence.arrival = self._num_arrived
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a live sequence; its blocks are free at once."""
        if sequence.is_admitted:
            self.admitted.remove(sequence)
            self._blocks.free(sequence)
        else:
            self.waiting.remove(sequence)

    def preempt_latest(self) -> Sequence:
        """Take the blocks of the latest arrival among the admitted (there must be one); it waits again."""
        victim = self.admitted.pop()
        self.num_preemptions += 1
        self._blocks.free(victim)
        victim.preempt()
        insort(self.waiting, victim, key=_arrival)
        return victim

    def num_blocks_claimed(self) -> int:
        """How many blocks the waiting sequences will take; those that found no room do not count."""
        num_blocks_for = self._blocks.num_blocks_for
        return sum(num_blocks_for(len(seq.token_ids)) for seq in self.waiting if not seq.waits_for_blocks)

    def schedule(self) -> StepPlan:
        """The next step; an empty one when nothing can run. Blocks are allocated, nothing is computed yet."""
        scheduled: list[ScheduledSequence] = []
        prefilling: list[Sequence] = []
        preempted = self._schedule_decodes(scheduled, prefilling)
        num_decodes = len(scheduled)
        budget = self.max_num_batched_tokens - num_decodes
        may_admit = bool(self.waiting) and not preempted and len(self.admitted) < self.max_num_seqs
        if prefilling or may_admit:
            grants = self._grant_prefills(prefilling, self.waiting if may_admit else (), budget)
            for sequence, num_tokens in grants.items():
                computed = sequence.num_computed_tokens
                samples = computed + num_tokens == len(sequence.token_ids)
                scheduled.append(ScheduledSequence(sequence, computed, num_tokens, samples))
        if num_decodes < self._max_draft_rows and len(scheduled) == num_decodes:
            self._add_drafts(scheduled)
        return StepPlan(tuple(scheduled), tuple(preempted), self._blocks.block_size)

    def _schedule_decodes(self, scheduled: list[ScheduledSequence], prefilling: list[Sequence]) -> list[str]:
        """Every decode into `scheduled`, every prefill into `prefilling`; the ids that had to be preempted.

        Victims come from the end of `admitted`, so they have not been looked at yet.
        """
        preempted: list[str] = []
        admitted = self.admitted
        block_size = self._blocks.block_size
        index = 0
        while index < len(admitted):
            sequence = admitted[index]
            num_tokens = len(sequence.token_ids)
            if num_tokens - sequence.num_computed_tokens > 1:
                prefilling.append(sequence)
                index += 1
            elif len(sequence.block_table) * block_size >= num_tokens or self._blocks.append_block(sequence):
                scheduled.append(ScheduledSequence(sequence, num_tokens - 1, 1, True))
                index += 1
            else:
                # The victim may be `sequence` itself, when it is the latest: then `admitted` ends here. Else the loop
                # looks at the same index again, with more blocks free. A victim before `index` would be in
                # `scheduled` already, and the step would write its K/V into blocks that now belong to somebody else.
                preempted.append(self.preempt_latest().sequence_id)
        return preempted

    def _add_drafts(self, decodes: list[ScheduledSequence]) -> None:
        """Share the rows that are left among the decodes, the first ones first."""
        num_rows = min(self._max_draft_rows, self.max_num_batched_tokens) - len(decodes)
        for index, scheduled in enumerate(decodes):
            sequence = scheduled.sequence
            share = -(-num_rows // (len(decodes) - index))
            if sequence.lookup is None or not (draft := sequence.lookup.draft(sequence.token_ids, share)):
                continue
            draft = draft[: self._num_slots_ahead(sequence, len(draft))]
            decodes[index] = replace(scheduled, draft_token_ids=draft)
            num_rows -= len(draft)

    def _num_slots_ahead(self, sequence: Sequence, num_wanted: int) -> int:
        """How many tokens its blocks have room for behind its last one; gives it blocks that nobody else needs."""
        blocks, table, num_tokens = self._blocks, sequence.block_table, len(sequence.token_ids)
        may_take = not self.waiting
        while may_take and len(table) * blocks.block_size < num_tokens + num_wanted:
            may_take = blocks.num_free_blocks > len(self.admitted) and blocks.append_block(sequence)
        return len(table) * blocks.block_size - num_tokens

    def _grant_prefills(
        self, prefilling: list[Sequence], waiting: Iterable[Sequence], budget: int
    ) -> dict[Sequence, int]:
        """How many tokens of each prefill to compute; admits the waiting ones whose turn comes."""
        candidates = sorted([*prefilling, *waiting], key=_arrival)
        half = (budget + 1) // 2
        turns = [candidates[0], *sorted(candidates, key=lambda seq: len(seq.token_ids) - seq.num_computed_tokens)]
        grants: dict[Sequence, int] = {}
        for turn, sequence in enumerate(turns):
            if budget == 0:
                break
            if not sequence.is_admitted and not self._admit(sequence):
                continue
            granted = grants.get(sequence, 0)
            remaining = len(sequence.token_ids) - sequence.num_computed_tokens - granted
            if num_tokens := min(remaining, budget if turn else half):
                grants[sequence] = granted + num_tokens
                budget -= num_tokens
        return grants

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its blocks, if there is a slot, room, and nothing better to wait for.

        One block a sequence that runs stays spare, or the next steps would preempt what was just admitted.
        """
        if len(self.admitted) >= self.max_num_seqs:
            return False
        first = self.waiting[0]
        if sequence is not first and first.num_overtaken >= MAX_OVERTAKEN:
            return False
        prefix = self._blocks.find_prefix(sequence)
        if self._is_being_computed(sequence, len(prefix)):
            return False
        if not self._blocks.allocate(sequence, prefix, len(self.admitted)):
            sequence.waits_for_blocks = True
            return False
        if sequence is not first:
            first.num_overtaken += 1
        self.waiting.remove(sequence)
        insort(self.admitted, sequence, key=_arrival)
        return True

    def _is_being_computed(self, sequence: Sequence, index: int) -> bool:
        """Whether a prefill under way will write the K/V of full block `index` of a waiting sequence."""
        size = self._blocks.block_size
        if index >= (len(sequence.token_ids) - 1) // size:
            return False
        name = self._blocks.block_hash(sequence, index)
        return any(
            other.num_computed_tokens // size <= index < len(other.token_ids) // size
            and self._blocks.block_hash(other, index) == name
            for other in self.admitted
        )


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival
