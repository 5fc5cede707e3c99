"""`decode.engine.engine`: refusals, commit, abort, errors of the runner, and what it says about its load."""

from __future__ import annotations

import pytest

from decode.engine.engine import Engine, EngineConfig, EngineLoad, SequenceOutput
from decode.engine.sampling import Chosen, SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import (
    DeviceOutOfMemory,
    DuplicateSequence,
    EmptyPrompt,
    IntegrityError,
    PromptTooLong,
    TokenOutOfRange,
)
from decode.scripted import SCRIPTED_EOS_TOKEN_ID, ScriptedRunner, generate
from tests.decode.guesses import Guesses, guesses_of, repeated

SIZE = 4


class Runner:
    """The scripted model, except where a test makes one step fail."""

    def __init__(self, num_blocks: int) -> None:
        self.model = ScriptedRunner(num_blocks=num_blocks, block_size=SIZE)
        self.plans: list[StepPlan] = []
        self.fail: Exception | None = None
        self.extra_tokens: list[int] = []

    def execute(self, plan: StepPlan) -> Chosen:
        self.plans.append(plan)
        token_ids = self.model.execute(plan).token_ids
        if self.fail is not None:
            raise self.fail
        return Chosen(token_ids + self.extra_tokens)


def engine_and_runner(
    *,
    num_blocks: int = 100,
    max_model_len: int = 200,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    max_draft_rows: int = 0,
) -> tuple[Engine, Runner]:
    runner = Runner(num_blocks)
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        fingerprint="f",
        block_size=SIZE,
        vocab_size=1000,
        max_draft_rows=max_draft_rows,
    )
    return Engine(runner, config), runner


def sequence(name: str, prompt: list[int], outputs: list[int] | None = None, **sampling: object) -> Sequence:
    params = {"max_tokens": 6, "stop_token_ids": (SCRIPTED_EOS_TOKEN_ID,)} | sampling
    return Sequence(name, prompt, SamplingParams(**params), outputs or [])  # type: ignore[arg-type]


def prompt_of(num_tokens: int, first: int = 100) -> list[int]:
    return list(range(first, first + num_tokens))


def run(engine: Engine) -> dict[str, list[SequenceOutput]]:
    """All outputs until nothing is left, by sequence."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(1000):
        for output in engine.step():
            outputs.setdefault(output.sequence_id, []).append(output)
        engine.check_integrity()
        if not engine.has_unfinished:
            break
    engine.check_idle()
    assert engine.load().num_free_blocks == engine.load().num_blocks
    return outputs


def text(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_a_sequence_gets_the_tokens_of_the_model_one_a_step() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(10)))
    outputs = run(engine)["a"]
    expected, _ = generate(prompt_of(10), SamplingParams(max_tokens=6), 200)
    assert text(outputs) == expected
    assert [output.first_index for output in outputs] == [0, 1, 2, 3, 4, 5]
    assert [output.finish_reason for output in outputs] == [None] * 5 + ["length"]


def test_the_eos_token_is_part_of_the_output() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", [*prompt_of(4), 3, 2]))
    outputs = run(engine)["a"]
    assert len(text(outputs)) == 3
    assert text(outputs)[-1] == SCRIPTED_EOS_TOKEN_ID
    assert outputs[-1].finish_reason == "stop"


def test_the_end_of_the_context_ends_a_sequence_with_length() -> None:
    engine, _ = engine_and_runner(max_model_len=12)
    engine.add(sequence("a", prompt_of(10)))
    outputs = run(engine)["a"]
    assert (len(outputs), outputs[-1].finish_reason) == (2, "length")


def test_the_end_of_the_whole_pool_ends_a_sequence_with_length() -> None:
    engine, _ = engine_and_runner(num_blocks=3)
    engine.add(sequence("a", prompt_of(8), max_tokens=50))
    outputs = run(engine)["a"]
    assert (len(outputs), outputs[-1].finish_reason) == (4, "length")


def test_a_continuation_goes_on_at_the_next_index_with_the_same_tokens() -> None:
    expected, _ = generate(prompt_of(10), SamplingParams(max_tokens=6), 200)
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(10), expected[:4]))
    outputs = run(engine)["a"]
    assert outputs[0].first_index == 4
    assert text(outputs) == expected[4:]


@pytest.mark.parametrize(
    ("outputs", "reason"), [([9, SCRIPTED_EOS_TOKEN_ID], "stop"), ([9, 9, 9, 9, 9, 9], "length")]
)
def test_a_continuation_that_is_complete_is_reported_without_tokens(outputs: list[int], reason: str) -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(10), outputs))
    assert engine.has_unfinished
    assert [(o.first_index, o.token_ids, o.finish_reason) for o in engine.step()] == [(len(outputs), (), reason)]
    assert not engine.has_unfinished


def test_a_complete_continuation_is_reported_even_if_the_step_fails() -> None:
    engine, runner = engine_and_runner()
    engine.add(sequence("a", prompt_of(4)))
    engine.add(sequence("b", prompt_of(4), [SCRIPTED_EOS_TOKEN_ID]))
    runner.fail = DeviceOutOfMemory()
    with pytest.raises(DeviceOutOfMemory):
        engine.step()
    runner.fail = None
    assert {output.sequence_id for output in engine.step()} == {"a", "b"}


def test_a_complete_continuation_can_be_aborted() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("b", prompt_of(4), [SCRIPTED_EOS_TOKEN_ID]))
    assert engine.abort("b")
    assert not engine.has_unfinished


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    engine, _ = engine_and_runner(max_model_len=20)
    with pytest.raises(PromptTooLong, match=r"a: 20 tokens .* context of 20 tokens"):
        engine.add(sequence("a", prompt_of(20)))
    engine.add(sequence("a", prompt_of(19)))


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_request_is_not_delayed() -> None:
    engine, _ = engine_and_runner(num_blocks=5)
    with pytest.raises(PromptTooLong, match=r"big: 21 tokens .* K/V cache of 20 tokens"):
        engine.add(sequence("big", prompt_of(21)))
    engine.add(sequence("small", prompt_of(3)))
    assert engine.step()[0].sequence_id == "small"


def test_what_another_worker_began_with_more_room_is_told_from_what_fits_nowhere() -> None:
    engine, _ = engine_and_runner(num_blocks=5, max_model_len=30)
    for prompt, outputs, limit, fits_elsewhere in (
        (15, 6, "K/V cache", True),
        (21, 0, "K/V cache", False),
        (30, 0, "context", False),
    ):
        with pytest.raises(PromptTooLong, match=limit) as refusal:
            engine.add(sequence("a", prompt_of(prompt), prompt_of(outputs), max_tokens=50))
        assert refusal.value.fits_elsewhere == fits_elsewhere


def test_one_that_does_not_fit_now_does_not_hold_up_those_behind_it() -> None:
    engine, _ = engine_and_runner(num_blocks=8, max_num_batched_tokens=64)
    engine.add(sequence("runs", prompt_of(12), max_tokens=8))
    engine.step()
    engine.add(sequence("big", prompt_of(27, 300)))
    engine.add(sequence("small", prompt_of(3, 500)))
    assert {output.sequence_id for output in engine.step()} == {"runs", "small"}
    assert len(text(run(engine)["big"])) == 5


def test_an_empty_prompt_is_refused() -> None:
    engine, _ = engine_and_runner()
    with pytest.raises(EmptyPrompt, match="a: "):
        engine.add(sequence("a", []))
    assert not engine.has_unfinished


@pytest.mark.parametrize("token_id", [-1, 1000])
def test_a_token_that_the_model_does_not_have_is_refused(token_id: int) -> None:
    engine, _ = engine_and_runner()
    with pytest.raises(TokenOutOfRange, match=rf"a: token id {token_id} is not in \[0, 1000\)"):
        engine.add(sequence("a", [5, token_id, 6]))
    assert not engine.has_unfinished


def test_a_live_sequence_id_is_refused_and_a_finished_one_is_not() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(3)))
    with pytest.raises(DuplicateSequence, match="a: "):
        engine.add(sequence("a", prompt_of(3)))
    run(engine)
    engine.add(sequence("a", prompt_of(3)))


def test_identical_prompts_at_once_from_a_cold_cache_get_the_same_text() -> None:
    expected, _ = generate(prompt_of(50), SamplingParams(max_tokens=6), 200)
    engine, _ = engine_and_runner(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256)
    for number in range(16):
        engine.add(sequence(str(number), prompt_of(50)))
    outputs = run(engine)
    assert [text(outputs[str(number)]) for number in range(16)] == 16 * [expected]


def test_a_prompt_that_was_prefilled_in_chunks_is_found_by_the_next_one() -> None:
    engine, _ = engine_and_runner(max_num_batched_tokens=16)
    for name in ("a", "b"):
        engine.add(sequence(name, prompt_of(50)))
        outputs = run(engine)[name]
    assert outputs[0].num_cached_tokens == 48


def test_what_was_generated_is_found_by_the_next_turn_of_the_conversation() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(10)))
    answer = text(run(engine)["a"])
    engine.add(sequence("b", [*prompt_of(10), *answer, 50, 51]))
    # 10 + 6 tokens, of which the last has no K/V: three full blocks.
    assert run(engine)["b"][0].num_cached_tokens == 12


def test_recomputing_after_preemption_is_not_reported_as_cached() -> None:
    engine, runner = engine_and_runner(num_blocks=6, max_num_batched_tokens=32)
    engine.add(sequence("a", prompt_of(7), max_tokens=12))
    engine.add(sequence("b", prompt_of(7, 300), max_tokens=12))
    outputs = run(engine)
    assert any(plan.preempted == ("b",) for plan in runner.plans)
    assert any(
        scheduled.num_computed_tokens and scheduled.num_scheduled_tokens > 1
        for plan in runner.plans
        for scheduled in plan.scheduled
    ), "nothing was restored when b was admitted again"
    assert {output.num_cached_tokens for output in outputs["b"]} == {0}
    assert text(outputs["b"]) == generate(prompt_of(7, 300), SamplingParams(max_tokens=12), 200)[0]


def test_abort_frees_slot_and_blocks_of_a_waiting_a_prefilling_and_a_decoding_sequence() -> None:
    engine, _ = engine_and_runner(max_num_seqs=2, max_num_batched_tokens=16)
    for name, num_tokens in (("decoding", 3), ("prefilling", 90), ("waiting", 95)):
        engine.add(sequence(name, prompt_of(num_tokens)))
    engine.step()
    assert engine.load() == EngineLoad(num_running=2, num_waiting=1, num_free_blocks=76, num_blocks=100)
    for name in ("waiting", "prefilling", "decoding"):
        assert engine.abort(name)
        engine.check_integrity()
    assert engine.load() == EngineLoad(num_running=0, num_waiting=0, num_free_blocks=100, num_blocks=100)
    assert engine.step() == []


def test_abort_of_an_unknown_or_finished_sequence_says_so() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(3), max_tokens=1))
    engine.step()
    assert not engine.abort("a")
    assert not engine.abort("b")


def test_a_step_that_raises_commits_nothing_and_is_repeated() -> None:
    engine, runner = engine_and_runner()
    for name, first in (("a", 100), ("b", 300)):
        engine.add(sequence(name, prompt_of(10, first)))
    engine.step()
    runner.fail = RuntimeError("device lost")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        engine.check_integrity()
    runner.fail = None
    assert runner.plans[1].scheduled == runner.plans[-1].scheduled
    outputs = run(engine)
    assert text(outputs["b"]) == generate(prompt_of(10, 300), SamplingParams(max_tokens=6), 200)[0]


def test_blocks_of_a_step_that_raised_cannot_be_found() -> None:
    engine, runner = engine_and_runner()
    engine.add(sequence("a", prompt_of(10)))
    runner.fail = RuntimeError()
    with pytest.raises(RuntimeError):
        engine.step()
    engine.abort("a")
    runner.fail = None
    engine.add(sequence("b", prompt_of(10)))
    assert run(engine)["b"][0].num_cached_tokens == 0


def test_a_runner_that_answers_out_of_shape_commits_nothing() -> None:
    engine, runner = engine_and_runner()
    engine.add(sequence("a", prompt_of(3)))
    runner.extra_tokens = [5]
    with pytest.raises(IntegrityError, match="2 tokens for 1"):
        engine.step()
    runner.extra_tokens = []
    assert engine.step()[0].first_index == 0


def test_shedding_preempts_the_later_half_and_schedules_less_until_sequences_finish() -> None:
    engine, runner = engine_and_runner(max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(8):
        engine.add(sequence(str(number), prompt_of(5, 100 * number), max_tokens=6 if number else 2))
    engine.step()
    assert engine.shed() == (4, True)
    assert engine.load().num_running == 4
    assert engine.load().num_waiting == 4
    engine.check_integrity()
    engine.step()
    assert {s.sequence.sequence_id for s in runner.plans[-1].scheduled} == {"0", "1", "2", "3"}
    engine.step()  # "0" has finished: its slot and one more are free
    assert {s.sequence.sequence_id for s in runner.plans[-1].scheduled} == {"1", "2", "3", "4", "5"}
    outputs = run(engine)
    for number in range(4, 8):
        expected, _ = generate(prompt_of(5, 100 * number), SamplingParams(max_tokens=6), 200)
        assert text(outputs[str(number)]) == expected[6 - len(outputs[str(number)]) :]


def test_after_a_shed_the_limits_come_back_to_the_configured_ones() -> None:
    engine, runner = engine_and_runner(max_num_seqs=4, max_num_batched_tokens=16)
    for number in range(4):
        engine.add(sequence(str(number), prompt_of(3, 100 * number)))
    engine.step()
    for _ in range(8):
        engine.shed()
    run(engine)
    for number in range(8):
        engine.add(sequence(str(number), prompt_of(10, 10 + 100 * number)))
    runner.plans.clear()
    run(engine)
    assert max(len(plan.scheduled) for plan in runner.plans) == 4
    assert max(sum(s.num_scheduled_tokens for s in plan.scheduled) for plan in runner.plans) == 16


def test_shedding_a_single_sequence_halves_its_chunks_and_says_that_nobody_was_preempted() -> None:
    engine, runner = engine_and_runner(max_num_batched_tokens=16)
    engine.add(sequence("a", prompt_of(40)))
    engine.step()
    assert engine.shed() == (0, True)
    engine.step()
    assert [plan.scheduled[0].num_scheduled_tokens for plan in runner.plans] == [16, 8]


def test_a_single_sequence_in_steps_of_one_token_has_nothing_left_to_give_up() -> None:
    engine, _ = engine_and_runner(max_num_batched_tokens=16)
    engine.add(sequence("a", prompt_of(40)))
    engine.step()
    assert [engine.shed().has_smaller_steps for _ in range(5)] == [True, True, True, True, False]


def test_shedding_an_idle_engine_leaves_it_able_to_run() -> None:
    engine, _ = engine_and_runner()
    assert engine.shed().num_preempted == 0
    engine.add(sequence("a", prompt_of(3)))
    assert len(text(run(engine)["a"])) == 6


def test_another_request_is_acceptable_while_a_slot_is_free() -> None:
    engine, _ = engine_and_runner(max_num_seqs=2)
    assert engine.can_accept()
    engine.add(sequence("a", prompt_of(3)))
    assert engine.can_accept()
    engine.add(sequence("b", prompt_of(3)))
    assert not engine.can_accept()
    engine.abort("a")
    assert engine.can_accept()


def test_another_request_is_not_acceptable_while_its_fair_share_of_blocks_is_taken() -> None:
    engine, _ = engine_and_runner(num_blocks=16, max_num_seqs=4)
    engine.add(sequence("a", prompt_of(48)))
    assert engine.can_accept()
    engine.add(sequence("b", prompt_of(3)))
    assert not engine.can_accept()
    engine.step()
    assert not engine.can_accept()
    engine.abort("b")
    assert engine.can_accept()


def test_another_request_is_acceptable_behind_one_that_does_not_fit_now() -> None:
    engine, _ = engine_and_runner(num_blocks=16, max_num_seqs=4)
    engine.add(sequence("a", prompt_of(30)))
    engine.step()
    engine.add(sequence("big", prompt_of(48, 200)))
    assert not engine.can_accept()
    engine.step()
    assert engine.can_accept()


def test_the_idle_check_finds_a_leaked_block() -> None:
    engine, _ = engine_and_runner()
    leaked = sequence("a", prompt_of(3))
    engine.add(leaked)
    engine.step()
    del engine._sequences["a"]
    with pytest.raises(IntegrityError):
        engine.check_idle()


def test_the_integrity_check_finds_a_sequence_that_nobody_will_run() -> None:
    engine, _ = engine_and_runner()
    engine.add(sequence("a", prompt_of(3)))
    engine._scheduler.waiting.clear()
    with pytest.raises(IntegrityError, match="queues"):
        engine.check_integrity()


@pytest.mark.parametrize("field", ["num_blocks", "max_model_len", "max_num_seqs", "block_size", "vocab_size"])
def test_a_limit_below_one_is_refused_by_name(field: str) -> None:
    limits = {"num_blocks": 4, "max_model_len": 9, "max_num_seqs": 2, "block_size": 4, "vocab_size": 9} | {field: 0}
    with pytest.raises(ValueError, match=f"{field} is 0"):
        EngineConfig(fingerprint="f", max_num_batched_tokens=8, **limits)  # type: ignore[arg-type]


def test_a_token_budget_below_one_token_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 7, must be at least max_num_seqs, 8"):
        EngineConfig(num_blocks=4, max_model_len=9, max_num_seqs=8, max_num_batched_tokens=7, fingerprint="f")


def drafting(
    *wrong: int, prompt: list[int] | None = None, limits: dict[str, int] | None = None, **sampling: object
) -> tuple[Engine, Runner, Guesses, list[int]]:
    """An engine with sequence "a", whose 8 drafts a step are the text of the model, but for the indices `wrong`."""
    engine, runner = engine_and_runner(**({"max_draft_rows": 9} | (limits or {})))
    one = sequence("a", prompt or prompt_of(10), **sampling)
    text, _ = generate(one.token_ids, SamplingParams(max_tokens=100, ignore_eos=True), 1000)
    engine.add(one)
    one.lookup = guesses = guesses_of(one, text, is_wrong_at=frozenset(wrong))
    return engine, runner, guesses, text


def test_drafts_that_are_right_are_kept_with_the_token_behind_them() -> None:
    engine, _, guesses, expected = drafting(max_tokens=20)
    outputs = run(engine)["a"]
    assert [(output.first_index, len(output.token_ids)) for output in outputs] == [(0, 1), (1, 9), (10, 9), (19, 1)]
    assert text(outputs) == expected[:20]
    assert guesses.learned == [(8, 8, 20), (8, 8, 29), (8, 0, 30)]
    assert (engine.num_draft_tokens, engine.num_accepted_tokens) == (24, 16)


def test_the_token_in_place_of_the_first_wrong_draft_is_kept_and_what_is_behind_it_is_not() -> None:
    engine, _, guesses, expected = drafting(4, 6, max_tokens=10)
    outputs = run(engine)["a"]
    assert [output.token_ids for output in outputs] == [
        tuple(expected[first:last]) for first, last in ((0, 1), (1, 5), (5, 7), (7, 10))
    ]
    assert guesses.learned == [(8, 3, 15), (8, 1, 17), (8, 2, 20)]


def test_a_token_that_is_drafted_too_late_is_not_kept() -> None:
    engine, _, guesses, expected = drafting(max_tokens=10)
    guesses._guess = lambda token_ids, _: [9, *expected[len(token_ids) - 10 :]]
    assert text(run(engine)["a"]) == expected[:10]
    assert engine.num_accepted_tokens == 0


def test_a_stop_token_among_the_drafts_ends_the_sequence() -> None:
    _, _, _, expected = drafting()
    assert expected[5] not in expected[:5]
    engine, _, _, _ = drafting(max_tokens=20, stop_token_ids=(expected[5],))
    outputs = run(engine)["a"]
    assert text(outputs) == expected[:6]
    assert [output.finish_reason for output in outputs] == [None, "stop"]


def test_a_stop_token_behind_the_last_draft_ends_the_sequence() -> None:
    _, _, _, expected = drafting()
    engine, _, _, _ = drafting(limits={"max_draft_rows": 5}, max_tokens=20, stop_token_ids=(expected[5],))
    outputs = run(engine)["a"]
    assert (text(outputs), outputs[-1].finish_reason) == (expected[:6], "stop")
    assert len(outputs) == 2


@pytest.mark.parametrize("max_tokens", [2, 5, 10, 11])
def test_max_tokens_among_the_drafts_end_the_sequence(max_tokens: int) -> None:
    engine, _, _, expected = drafting(max_tokens=max_tokens)
    outputs = run(engine)["a"]
    assert (text(outputs), outputs[-1].finish_reason) == (expected[:max_tokens], "length")


@pytest.mark.parametrize("limits", [{"max_model_len": 14}, {"num_blocks": 4}])
def test_the_end_of_the_context_among_the_drafts_ends_the_sequence(limits: dict[str, int]) -> None:
    engine, _, _, expected = drafting(limits=limits, max_tokens=50)
    outputs = run(engine)["a"]
    num_tokens = 4 if "max_model_len" in limits else 6
    assert (text(outputs), outputs[-1].finish_reason) == (expected[:num_tokens], "length")


@pytest.mark.parametrize("wrong", [(), (6,), (4,), range(20)])
def test_the_same_blocks_are_found_afterwards_as_without_drafts(wrong: tuple[int, ...]) -> None:
    num_cached = []
    for limits in ({"max_draft_rows": 0}, {}):
        engine, _, _, expected = drafting(*wrong, limits=limits, max_tokens=7)
        run(engine)
        for number in range(3):
            engine.add(sequence("next", [*prompt_of(10), *expected[: 5 + number], *[9] * 20]))
            num_cached.append(run(engine)["next"][0].num_cached_tokens)
    assert num_cached == [12, 16, 16] * 2


def test_what_was_drafted_wrongly_is_never_restored() -> None:
    engine, _, _, expected = drafting(3, max_tokens=30)
    engine.step()
    engine.step()
    engine.add(sequence("b", [*prompt_of(10), *expected[:3], expected[3] ^ 1, *expected[4:9], 5]))
    outputs = run(engine)
    assert outputs["b"][0].num_cached_tokens == 12
    assert (
        text(outputs["b"])
        == generate(
            [*prompt_of(10), *expected[:3], expected[3] ^ 1, *expected[4:9], 5], SamplingParams(max_tokens=6), 200
        )[0]
    )


def test_a_step_with_drafts_that_raises_commits_nothing_and_is_repeated() -> None:
    engine, runner, guesses, expected = drafting(max_tokens=12)
    engine.step()
    runner.fail = RuntimeError("device lost")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="device lost"):
            engine.step()
        engine.check_integrity()
    assert guesses.learned == []
    runner.fail = None
    assert text(run(engine)["a"]) == expected[1:12]
    assert len(runner.plans[1].scheduled[0].draft_token_ids) == 8
    assert runner.plans[1].scheduled == runner.plans[3].scheduled


def test_a_runner_that_ignores_drafts_is_found_out() -> None:
    engine, runner, _, _ = drafting(max_tokens=12)
    engine.step()
    runner.model.execute = lambda plan: Chosen([5])  # type: ignore[method-assign]
    with pytest.raises(IntegrityError, match="1 tokens for 9"):
        engine.step()


def drafts_of(max_draft_rows: int = 4, max_model_len: int = 200, **sampling: object) -> list[tuple[int, int]]:
    """(output index, number of drafts) of every step with drafts, of a sequence that a model repeats for ever."""
    engine, runner = engine_and_runner(max_draft_rows=max_draft_rows, max_model_len=max_model_len)
    runner.model.execute = repeated  # type: ignore[method-assign]
    params = {"max_tokens": 16} | sampling
    engine.add(sequence("a", [11, 12, 13, 14, 15, 12, 13], **params))  # type: ignore[arg-type]
    assert text(run(engine)["a"]) == ([14, 15, 12, 13] * 4)[: max_model_len - 7]
    scheduled = [scheduled for plan in runner.plans for scheduled in plan.scheduled]
    assert engine.num_draft_tokens == engine.num_accepted_tokens == sum(len(s.draft_token_ids) for s in scheduled)
    num_tokens, found = 0, []
    for one in scheduled:
        if one.draft_token_ids:
            found.append((num_tokens, len(one.draft_token_ids)))
        num_tokens += one.samples + len(one.draft_token_ids)
    return found


def test_a_sequence_that_repeats_itself_is_drafted_further_and_further() -> None:
    assert drafts_of() == [(1, 1), (3, 2), (6, 3), (10, 3), (14, 1)]
    assert drafts_of(temperature=0.7) == [(1, 1), (3, 2), (6, 3), (10, 3), (14, 1)]


def test_nothing_is_drafted_beyond_the_end_of_the_context() -> None:
    assert drafts_of(max_model_len=16) == [(1, 1), (3, 2), (6, 2)]


def test_without_rows_for_them_there_are_no_drafts() -> None:
    assert drafts_of(0) == drafts_of(1) == []
    assert drafts_of(2) == [(1, 1), (3, 1), (5, 1), (7, 1), (9, 1), (11, 1), (13, 1)]


def test_there_are_no_drafts_for_a_sequence_that_wants_more_than_plain_choices() -> None:
    assert drafts_of(presence_penalty=0.1) == drafts_of(num_logprobs=0) == []
    assert drafts_of(min_tokens=5) == [(5, 1), (7, 2), (10, 3), (14, 1)]
