"""`decode.scripted`: the model that needs no weights, its paged memory, its declared costs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from decode.engine.block_manager import BlockManager
from decode.engine.engine import Engine
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import ScheduledSequence, StepPlan
from decode.engine.sequence import Sequence
from decode.scripted import (
    SCRIPTED_EOS_TOKEN_ID,
    ScriptedCosts,
    ScriptedRunner,
    generate,
    next_token,
    scripted_engine,
)

SIZE = 4
TEN = SamplingParams(max_tokens=10, stop_token_ids=(SCRIPTED_EOS_TOKEN_ID,))


def prefilled(num_tokens: int = 13) -> tuple[ScriptedRunner, Sequence]:
    """A runner, and a sequence whose tokens all have their values in its memory but the last."""
    runner = ScriptedRunner(num_blocks=32, block_size=SIZE)
    sequence = Sequence("a", list(range(20, 20 + num_tokens)), TEN)
    assert BlockManager(32, SIZE, "f").allocate(sequence, [], 0)
    runner.execute(plan_of(sequence, num_tokens - 1))
    sequence.num_computed_tokens = num_tokens - 1
    return runner, sequence


def plan_of(sequence: Sequence, num_tokens: int) -> StepPlan:
    samples = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
    return StepPlan((ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, samples),), (), SIZE)


def test_the_next_token_is_what_the_model_without_a_cache_says() -> None:
    runner, sequence = prefilled()
    assert runner.execute(plan_of(sequence, 1)).token_ids == [next_token(sequence.token_ids, 13, TEN)]


@pytest.mark.parametrize("position", range(12))
def test_a_wrong_value_anywhere_in_the_history_changes_the_next_token(position: int) -> None:
    runner, sequence = prefilled()
    runner._memory[sequence.block_table[position // SIZE], position % SIZE] ^= 1
    assert runner.execute(plan_of(sequence, 1)).token_ids != [next_token(sequence.token_ids, 13, TEN)]


@pytest.mark.parametrize("swap", [(0, 1), (1, 2), (0, 2)])
def test_a_block_in_the_wrong_place_changes_the_next_token(swap: tuple[int, int]) -> None:
    runner, sequence = prefilled()
    table = sequence.block_table
    table[swap[0]], table[swap[1]] = table[swap[1]], table[swap[0]]
    assert runner.execute(plan_of(sequence, 1)).token_ids != [next_token(sequence.token_ids, 13, TEN)]


def test_a_block_that_is_written_in_the_same_step_is_read_as_it_was_before() -> None:
    """What a block that is shared too early would do."""
    runner = ScriptedRunner(num_blocks=32, block_size=SIZE)
    first, second = (Sequence(name, [5, 6, 7, 8, 9], TEN) for name in "ab")
    first.admit([0, 1], 0)
    second.admit([0, 2], 4)
    chosen = runner.execute(
        StepPlan((*plan_of(first, 5).scheduled, *plan_of(second, 1).scheduled), (), SIZE)
    ).token_ids
    assert chosen[0] == next_token(first.token_ids, 5, TEN)
    assert chosen[1] != chosen[0]


def test_every_token_of_the_history_matters() -> None:
    history = list(range(20, 60))
    tokens = {next_token([*history[:i], 99, *history[i + 1 :]], 40, TEN) for i in range(40)}
    assert next_token(history, 40, TEN) not in tokens
    assert len(tokens) > 30


def test_output_tokens_are_between_100_and_999() -> None:
    tokens, reason = generate([5], SamplingParams(max_tokens=2000), 10_000)
    assert (len(tokens), reason) == (2000, "length")
    assert min(tokens) < 110
    assert max(tokens) > 990
    assert all(100 <= token_id <= 999 for token_id in tokens)


def test_the_model_stays_what_it_is() -> None:
    """Text in the demo and in failure tests across processes relies on it."""
    assert generate([72, 105], SamplingParams(max_tokens=4), 100)[0] == [606, 388, 363, 483]


@pytest.mark.parametrize(
    ("prompt", "sampling", "num_tokens", "reason"),
    [
        ([50, 3, 2], {}, 3, "stop"),
        ([50, 3, 0], {}, 1, "stop"),
        ([50, 3, 2, 60, 61], {}, 3, "stop"),
        ([3, 2] + 62 * [50], {}, 3, "stop"),
        ([3, 2] + 63 * [50], {}, 10, "length"),
        ([50, 3], {}, 10, "length"),
        ([50, 3, 2], {"min_tokens": 5}, 6, "stop"),
        ([50, 3, 2], {"ignore_eos": True}, 10, "length"),
        ([50, 3, 10], {}, 10, "length"),
    ],
)
def test_a_prompt_can_ask_for_an_end(
    prompt: list[int], sampling: dict[str, Any], num_tokens: int, reason: str
) -> None:
    params = replace(TEN, **sampling)
    tokens, why = generate(prompt, params, 1000)
    assert (len(tokens), why) == (num_tokens, reason)
    assert (tokens[-1] == SCRIPTED_EOS_TOKEN_ID) == (reason == "stop")


def engine_of(costs: ScriptedCosts, slept: list[float]) -> Engine:
    return scripted_engine(
        kv_cache_tokens=1024, max_num_seqs=4, max_num_batched_tokens=64, costs=costs, sleep=slept.append
    )


def test_a_step_sleeps_for_its_declared_cost() -> None:
    slept: list[float] = []
    engine = engine_of(ScriptedCosts(step_ms=10, prefill_ms_per_token=1, decode_ms_per_sequence=0.5), slept)
    engine.add(Sequence("a", [5] * 21, SamplingParams(max_tokens=2)))
    engine.step()
    engine.step()
    assert slept == pytest.approx([0.0305, 0.0105])


def test_a_model_without_costs_never_sleeps() -> None:
    slept: list[float] = []
    engine = engine_of(ScriptedCosts(), slept)
    engine.add(Sequence("a", [5], SamplingParams(max_tokens=1)))
    assert engine.step()
    assert slept == []


def test_the_engine_has_the_limits_it_was_asked_for() -> None:
    config = engine_of(ScriptedCosts(), []).config
    assert (config.num_blocks, config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (
        64,
        16,
        4,
        64,
    )


def test_nothing_here_loads_torch() -> None:
    code = "import sys, decode.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
