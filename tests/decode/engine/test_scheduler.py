"""`decode.engine.scheduler`: what a plan holds, who goes first, who is preempted and who is passed over."""

from __future__ import annotations

from decode.engine.block_manager import BlockManager
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import MAX_OVERTAKEN, Scheduler, StepPlan
from decode.engine.sequence import Sequence
from tests.decode.guesses import Guesses

SIZE = 4


class Turns:
    """A scheduler whose plans are committed by hand; every sampled token is 7."""

    def __init__(
        self,
        *,
        num_blocks: int = 100,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_draft_rows: int = 0,
    ) -> None:
        self.blocks = BlockManager(num_blocks, SIZE, "f")
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_draft_rows=max_draft_rows,
        )
        self.num_made = 0

    def add(self, sequence_id: str, num_tokens: int) -> Sequence:
        """A prompt that shares no block with any other."""
        self.num_made += 1
        first = 1000 * self.num_made
        return self.add_tokens(sequence_id, list(range(first, first + num_tokens)))

    def add_tokens(self, sequence_id: str, token_ids: list[int]) -> Sequence:
        sequence = Sequence(sequence_id, token_ids, SamplingParams(max_tokens=100))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Scheduled tokens by sequence id, after they have been committed."""
        return tokens_of(self.commit(self.scheduler.schedule()))

    def commit(self, plan: StepPlan) -> StepPlan:
        for scheduled in plan.scheduled:
            self.blocks.commit(scheduled.sequence, scheduled.num_scheduled_tokens)
            if scheduled.samples:
                scheduled.sequence.append_token(7)
        self.blocks.check(s.block_table for s in [*self.scheduler.admitted, *self.scheduler.waiting])
        return plan


def tokens_of(plan: StepPlan) -> dict[str, int]:
    return {scheduled.sequence.sequence_id: scheduled.num_scheduled_tokens for scheduled in plan.scheduled}


def test_there_is_nothing_to_do_without_sequences() -> None:
    assert Turns().scheduler.schedule().scheduled == ()


def test_a_prompt_longer_than_the_budget_is_prefilled_in_chunks_and_samples_with_the_last() -> None:
    turns = Turns(max_num_batched_tokens=16)
    turns.add("a", 40)
    chunks = []
    for _ in range(4):
        (scheduled,) = turns.commit(turns.scheduler.schedule()).scheduled
        chunks.append((scheduled.num_computed_tokens, scheduled.num_scheduled_tokens, scheduled.samples))
    assert chunks == [(0, 16, False), (16, 16, False), (32, 8, True), (40, 1, True)]


def test_decodes_come_first_and_prefill_gets_the_rest_of_the_budget() -> None:
    turns = Turns(max_num_batched_tokens=10)
    turns.add("a", 2)
    turns.add("b", 2)
    turns.step()
    turns.add("c", 30)
    plan = turns.commit(turns.scheduler.schedule())
    assert [scheduled.sequence.sequence_id for scheduled in plan.scheduled] == ["a", "b", "c"]
    assert tokens_of(plan) == {"a": 1, "b": 1, "c": 8}


def test_a_plan_never_exceeds_the_token_budget_or_the_sequence_limit() -> None:
    turns = Turns(max_num_seqs=3, max_num_batched_tokens=12)
    for number in range(6):
        turns.add(str(number), 5)
    for _ in range(10):
        tokens = turns.step()
        assert sum(tokens.values()) <= 12
        assert len(tokens) <= 3
    assert len(turns.scheduler.admitted) == 3


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    turns = Turns(max_num_batched_tokens=16)
    turns.add("long", 200)
    turns.step()
    turns.add("short", 6)
    assert turns.step() == {"long": 10, "short": 6}


def test_a_long_prompt_keeps_half_of_the_budget_under_a_stream_of_short_ones() -> None:
    turns = Turns(max_num_seqs=16, max_num_batched_tokens=100)
    turns.add("long", 300)
    for _ in range(6):
        shorts = [turns.add("short", 12) for _ in range(10)]
        assert turns.step()["long"] == 50
        for short in shorts:
            turns.scheduler.remove(short)


def test_equal_prompts_are_prefilled_one_after_the_other() -> None:
    turns = Turns(max_num_batched_tokens=16)
    for name in ("a", "b"):
        turns.add(name, 24)
    assert turns.step() == {"a": 16}
    assert turns.step() == {"a": 8, "b": 8}


def test_a_sequence_gets_a_block_when_its_next_token_needs_one() -> None:
    turns = Turns()
    one = turns.add("a", 4)
    turns.step()
    assert len(one.block_table) == 1
    turns.step()
    assert len(one.block_table) == 2


def test_the_latest_arrival_gives_way_when_blocks_run_out() -> None:
    turns = Turns(num_blocks=4)
    first, second = turns.add("a", 7), turns.add("b", 3)
    turns.step()
    assert second.is_admitted
    turns.step()  # both fill their last block
    plan = turns.scheduler.schedule()
    assert plan.preempted == ("b",)
    assert tokens_of(plan) == {"a": 1}
    assert (second.num_computed_tokens, second.block_table) == (0, [])
    assert turns.scheduler.waiting == [second]
    assert turns.scheduler.admitted == [first]


def test_a_sequence_can_be_the_one_that_gives_way() -> None:
    turns = Turns(num_blocks=4)
    turns.add("a", 9)
    turns.step()
    second = turns.add_tokens("b", [1, 2, 3])
    turns.scheduler.admitted.append(second)
    turns.scheduler.waiting.remove(second)
    assert turns.blocks.allocate(second, [], 0)
    turns.step()
    turns.step()
    assert tokens_of(plan := turns.scheduler.schedule()) == {"a": 1}
    assert plan.preempted == ("b",)


def test_a_preempted_sequence_waits_in_front_of_later_arrivals_and_recomputes() -> None:
    turns = Turns(num_blocks=4)
    first, second = turns.add("a", 7), turns.add("b", 3)
    turns.step()
    third = turns.add("c", 20)
    turns.step()
    turns.step()
    assert turns.scheduler.waiting == [second, third]
    turns.scheduler.remove(first)
    plan = turns.commit(turns.scheduler.schedule())
    assert [(s.sequence, s.num_computed_tokens, s.num_scheduled_tokens) for s in plan.scheduled] == [(second, 4, 1)]


def test_nothing_is_admitted_in_the_step_that_preempts() -> None:
    turns = Turns(num_blocks=6, max_num_batched_tokens=32)
    turns.add("a", 7)
    turns.add("b", 11)
    turns.step()
    turns.step()
    turns.add("c", 1)
    assert turns.step() == {"a": 1}
    assert turns.blocks.num_free_blocks == 3
    assert turns.step() == {"a": 1, "c": 1}


def test_admission_leaves_a_block_for_every_sequence_that_runs() -> None:
    turns = Turns(num_blocks=3)
    turns.add("a", 7)
    turns.step()
    turns.add("b", 2)
    assert turns.step() == {"a": 1}


def test_one_that_does_not_fit_is_passed_over() -> None:
    turns = Turns(num_blocks=6, max_num_batched_tokens=64)
    turns.add("runs", 10)
    turns.step()
    big, small = turns.add("big", 16), turns.add("small", 3)
    assert turns.step() == {"runs": 1, "small": 3}
    assert big.waits_for_blocks
    assert not small.waits_for_blocks


def test_one_that_was_passed_over_often_enough_is_waited_for() -> None:
    turns = Turns(num_blocks=40, max_num_batched_tokens=256)
    running = turns.add("runs", 10)
    turns.step()
    big = turns.add("big", 156)
    for number in range(MAX_OVERTAKEN):
        small = turns.add(f"small {number}", 1)
        turns.step()
        assert small.is_admitted
        turns.scheduler.remove(small)
    late = turns.add("late", 1)
    turns.step()
    assert not late.is_admitted
    assert big.waits_for_blocks
    turns.scheduler.remove(running)
    turns.step()
    assert big.is_admitted
    assert not big.waits_for_blocks


def test_the_latest_arrival_gives_way_even_if_it_was_admitted_first() -> None:
    turns = Turns(num_blocks=6, max_num_batched_tokens=64)
    running = turns.add("runs", 10)
    turns.step()
    big, small = turns.add("big", 16), turns.add("small", 3)
    turns.step()
    turns.scheduler.remove(running)
    turns.step()
    assert turns.scheduler.admitted == [big, small]
    assert turns.scheduler.preempt_latest() is small


def test_a_block_that_another_prefill_is_computing_is_waited_for_not_computed_again() -> None:
    turns = Turns(max_num_seqs=16, max_num_batched_tokens=16)
    shared = list(range(40))
    sequences = [turns.add_tokens(str(number), [*shared, 100 + number]) for number in range(16)]
    num_prefilled = 0
    while not all(sequence.num_output_tokens for sequence in sequences):
        plan = turns.scheduler.schedule()
        num_prefilled += sum(s.num_scheduled_tokens for s in plan.scheduled if not s.sequence.num_output_tokens)
        turns.commit(plan)
    assert num_prefilled == 40 + 16
    assert [sequence.num_cached_tokens for sequence in sequences] == [0] + 15 * [40]


def test_a_waiting_sequence_stops_waiting_for_a_prefill_that_was_aborted() -> None:
    turns = Turns(max_num_batched_tokens=16)
    first = turns.add_tokens("a", list(range(40)))
    turns.step()
    turns.add_tokens("b", [*range(40), 99])
    assert turns.step() == {"a": 16}
    turns.scheduler.remove(first)
    assert turns.step() == {"b": 9}


def test_a_block_that_was_computed_long_ago_and_cannot_be_found_is_not_waited_for() -> None:
    turns = Turns(num_blocks=6)
    first, second = turns.add_tokens("a", [1, 2, 3, 4, 5]), turns.add_tokens("b", [1, 2, 3, 4, 5])
    for sequence in (first, second):
        assert turns.blocks.allocate(sequence, [], 0)
        turns.scheduler.waiting.remove(sequence)
        turns.scheduler.admitted.append(sequence)
    turns.step()
    turns.scheduler.remove(first)  # its first block had the name, the second's equal one has none
    evicting = Sequence("c", [9] * 16, SamplingParams(max_tokens=1))
    assert turns.blocks.allocate(evicting, [], 0)
    turns.blocks.free(evicting)
    turns.add_tokens("d", [1, 2, 3, 4, 6])
    assert turns.step() == {"b": 1, "d": 5}


def test_removing_frees_the_blocks_wherever_the_sequence_is() -> None:
    turns = Turns(max_num_seqs=2, max_num_batched_tokens=16)
    decoding, prefilling, waiting = turns.add("a", 3), turns.add("b", 90), turns.add("c", 95)
    turns.step()
    assert [one.num_computed_tokens for one in (decoding, prefilling)] == [3, 13]
    assert not waiting.is_admitted
    for sequence in (decoding, prefilling, waiting):
        turns.scheduler.remove(sequence)
    assert turns.blocks.num_free_blocks == 100
    assert turns.step() == {}


def with_drafts(turns: Turns, **drafts: int) -> None:
    """Sequences of these names are drafted so many tokens from now on, if there is room."""
    for sequence in turns.scheduler.admitted:
        if num_tokens := drafts.get(sequence.sequence_id):
            sequence.lookup = Guesses(lambda _, wanted, num=num_tokens: [5] * min(num, wanted))  # type: ignore[misc]


def drafts_of(plan: StepPlan) -> dict[str, int]:
    return {scheduled.sequence.sequence_id: len(scheduled.draft_token_ids) for scheduled in plan.scheduled}


def test_the_rows_left_are_shared_among_the_decodes() -> None:
    turns = Turns(max_draft_rows=8)
    for name in ("a", "b", "c"):
        turns.add(name, 1)
    turns.step()
    with_drafts(turns, a=9, c=9)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 2, "b": 0, "c": 3}
    with_drafts(turns, a=1, b=9, c=9)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 1, "b": 2, "c": 2}


def test_drafts_stay_below_the_token_budget() -> None:
    turns = Turns(max_draft_rows=8, max_num_batched_tokens=5)
    for name in ("a", "b"):
        turns.add(name, 1)
    turns.step()
    with_drafts(turns, a=9, b=9)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 2, "b": 1}
    turns.scheduler.max_num_batched_tokens = 2
    assert drafts_of(turns.scheduler.schedule()) == {"a": 0, "b": 0}


def test_as_many_decodes_as_rows_leave_none_for_drafts() -> None:
    turns = Turns(max_draft_rows=2)
    for name in ("a", "b"):
        turns.add(name, 1)
    turns.step()
    with_drafts(turns, a=1, b=1)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 0, "b": 0}


def test_there_are_no_drafts_beside_a_prefill() -> None:
    turns = Turns(max_draft_rows=8)
    turns.add("a", 1)
    turns.step()
    turns.add("b", 30)
    with_drafts(turns, a=3)
    assert drafts_of(turns.commit(turns.scheduler.schedule())) == {"a": 0, "b": 0}
    assert drafts_of(turns.commit(turns.scheduler.schedule())) == {"a": 0, "b": 0}
    assert drafts_of(turns.commit(turns.scheduler.schedule())) == {"a": 3, "b": 0}


def test_drafts_get_blocks_that_nobody_needs() -> None:
    turns = Turns(num_blocks=4, max_draft_rows=20)
    one = turns.add("a", 3)
    turns.step()
    with_drafts(turns, a=19)
    # Four of four tokens are there, and one block for the next token of each sequence stays spare.
    assert drafts_of(turns.scheduler.schedule()) == {"a": 8}
    assert (len(one.block_table), turns.blocks.num_free_blocks) == (3, 1)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 8}


def test_while_somebody_waits_drafts_get_no_blocks() -> None:
    turns = Turns(num_blocks=4, max_draft_rows=20)
    one = turns.add("a", 1)
    turns.step()
    waiting = turns.add("b", 14)
    with_drafts(turns, a=19)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 2}
    assert (len(one.block_table), waiting.is_admitted) == (1, False)


def test_drafts_preempt_nobody() -> None:
    turns = Turns(num_blocks=4, max_draft_rows=20)
    for name in ("a", "b"):
        turns.add(name, 3)
    turns.step()
    with_drafts(turns, a=19, b=19)
    plan = turns.scheduler.schedule()
    assert plan.preempted == ()
    assert drafts_of(plan) == {"a": 0, "b": 0}


def test_drafts_that_fit_get_no_block() -> None:
    turns = Turns(max_draft_rows=20)
    one = turns.add("a", 1)
    turns.step()
    with_drafts(turns, a=2)
    assert drafts_of(turns.scheduler.schedule()) == {"a": 2}
    assert len(one.block_table) == 1
