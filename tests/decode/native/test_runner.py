"""The native decoder against the numpy reference, and against itself under every way of scheduling."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from decode.engine.engine import Engine, EngineConfig, SequenceOutput
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import ScheduledSequence, StepPlan
from decode.engine.sequence import Sequence
from decode.native.build import NativeUnavailable
from decode.native.model import PHASES, StepArrays
from decode.native.runner import MAX_DRAFT_ROWS, NativeModelRunner, native_execution, step_arrays
from tests.decode.guesses import guesses_of
from tests.decode.native.reference import FAMILY_NAMES, VOCAB, ReferenceDecoder, runner, tiny_checkpoint

PROMPT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(90)]


@pytest.fixture(params=FAMILY_NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def native(family: str) -> Iterator[NativeModelRunner]:
    native = runner(tiny_checkpoint(family))
    yield native
    native.close()


def run_rows(native: NativeModelRunner, rows: list[tuple[list[int], int, list[int]]]) -> Any:
    """Each (tokens, first position, block table) in one step; the logits of every row."""
    arrays = StepArrays(array("i"), array("i", [0]), array("i"), array("i"), array("i"), array("i"))
    for tokens, first, table in rows:
        arrays.token_ids.extend(tokens)
        arrays.row_starts.append(len(arrays.token_ids))
        arrays.first_positions.append(first)
        arrays.table_starts.append(len(arrays.block_tables))
        arrays.block_tables.extend(table)
    arrays.sample_rows.extend(range(len(arrays.token_ids))[-native.decoder.max_samples :])
    _, logits = native.decoder.step(arrays, with_logits=True)
    assert logits is not None
    return logits.copy()


def last_logits(native: NativeModelRunner, tokens: list[int], chunks: list[int], table: list[int]) -> Any:
    first = 0
    for size in chunks:
        logits = run_rows(native, [(tokens[first : first + size], first, table)])
        first += size
    return logits[-1]


def test_logits_are_close_to_the_reference(native: NativeModelRunner, family: str) -> None:
    wanted = ReferenceDecoder(tiny_checkpoint(family)).logits(PROMPT)[-32:]
    logits = run_rows(native, [(PROMPT, 0, list(range(8)))])
    error = np.abs(logits - wanted).max() / wanted.std()
    correlation = np.corrcoef(logits.ravel(), wanted.ravel())[0, 1]
    assert error < 0.2
    assert correlation > 0.999


def test_logits_do_not_depend_on_chunking(native: NativeModelRunner) -> None:
    whole = last_logits(native, PROMPT, [90], list(range(6)))
    for chunks in ([1] * 90, [13, 50, 27], [64, 26], [16, 73, 1], [89, 1]):
        assert np.array_equal(last_logits(native, PROMPT, chunks, list(range(10, 16))), whole)


def test_logits_do_not_depend_on_neighbours(native: NativeModelRunner) -> None:
    alone = last_logits(native, PROMPT, [60, 30], list(range(6)))
    run_rows(native, [(PROMPT[:60], 0, [9, 4, 12, 40]), (PROMPT[::-1][:40], 0, [50, 51, 52])])
    rows = [(PROMPT[:n], 0, [20 + n]) for n in range(1, 9)]
    together = run_rows(native, [*rows[:4], (PROMPT[60:], 60, [9, 4, 12, 40, 2, 1]), *rows[4:]])
    index = -1 - sum(len(tokens) for tokens, _, _ in rows[4:])
    assert abs(index) <= native.decoder.max_samples
    assert np.array_equal(together[index], alone)


def test_logits_do_not_depend_on_the_number_of_threads(native: NativeModelRunner, family: str) -> None:
    chunks = [60] + [1] * 30
    wanted = last_logits(native, PROMPT, chunks, list(range(6)))
    for num_threads in (1, 9):  # nine: more than there are cores, so that some are late and skip what is over
        other = runner(tiny_checkpoint(family), num_threads=num_threads)
        assert np.array_equal(last_logits(other, PROMPT, chunks, list(range(6))), wanted)
        other.close()


def test_logits_do_not_depend_on_the_instruction_set(native: NativeModelRunner, family: str) -> None:
    portable = runner(tiny_checkpoint(family), portable=True)
    table = list(range(6))
    assert np.array_equal(
        last_logits(portable, PROMPT, [60, 30], table), last_logits(native, PROMPT, [60, 30], table)
    )
    portable.close()


def test_logits_do_not_depend_on_what_a_block_held_before(native: NativeModelRunner) -> None:
    first = last_logits(native, PROMPT, [90], list(range(6)))
    last_logits(native, PROMPT[::-1], [90], list(range(6)))
    assert np.array_equal(last_logits(native, PROMPT, [90], list(range(6))), first)


def make_engine(
    native: NativeModelRunner, num_blocks: int = 64, max_batched: int = 48, max_draft_rows: int = 0
) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=max_batched,
        fingerprint="native",
        vocab_size=VOCAB,
        max_draft_rows=max_draft_rows,
    )
    return Engine(native, config)


def generate(engine: Engine, jobs: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    for sequence_id, (prompt, sampling) in jobs.items():
        engine.add(Sequence(sequence_id, prompt, sampling))
    outputs: dict[str, list[int]] = {sequence_id: [] for sequence_id in jobs}
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.sequence_id].extend(output.token_ids)
    return outputs


def mixed_jobs() -> dict[str, tuple[list[int], SamplingParams]]:
    draws = random.Random(3)
    shared = [draws.randrange(VOCAB) for _ in range(40)]
    jobs = {}
    for index in range(10):
        prompt = shared * (index % 2) + [draws.randrange(VOCAB) for _ in range(draws.randint(1, 70))]
        temperature = 0.9 if index % 3 == 0 else 0.0
        jobs[f"s{index}"] = (prompt, SamplingParams(max_tokens=20, temperature=temperature, seed=index))
    return jobs


def generate_each(
    native: NativeModelRunner, jobs: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, list[int]]:
    """Each alone, from a cold cache."""
    alone: dict[str, list[int]] = {}
    for sequence_id, job in jobs.items():
        alone |= generate(make_engine(native), {sequence_id: job})
    return alone


def test_tokens_do_not_depend_on_the_schedule(family: str) -> None:
    jobs, native = mixed_jobs(), runner(tiny_checkpoint(family))
    alone = generate_each(native, jobs)
    crowded = make_engine(native, num_blocks=16, max_batched=31)
    assert generate(crowded, jobs) == alone
    roomy = make_engine(native, num_blocks=64, max_batched=256)
    assert generate(roomy, jobs) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > 1
    native.close()


def test_tokens_do_not_depend_on_drafts_of_any_quality(family: str) -> None:
    jobs, native, draws = mixed_jobs(), runner(tiny_checkpoint(family)), random.Random(4)
    alone = generate_each(native, jobs)
    num_drafted = num_accepted = num_preempted = 0
    for num_blocks, max_draft_rows in ((16, 12), (16, 16), (64, 4), (64, 16)):
        engine = make_engine(native, num_blocks, 31, max_draft_rows)
        texts: dict[str, list[int]] = {}
        waiting = list(jobs)
        while waiting or engine.has_unfinished:
            if waiting and engine.load().num_running < 4:
                sequence_id = waiting.pop()
                prompt, sampling = jobs[sequence_id]
                texts[sequence_id] = alone[sequence_id][: draws.choice([0, 0, 7])]
                sequence = Sequence(sequence_id, prompt, sampling, texts[sequence_id])
                engine.add(sequence)
                wrong = frozenset(draws.sample(range(20), draws.choice([0, 4, 20])))
                sequence.lookup = guesses_of(sequence, alone[sequence_id], is_wrong_at=wrong)
            for output in engine.step():
                texts[output.sequence_id].extend(output.token_ids)
            engine.check_integrity()
        assert texts == alone
        num_drafted += engine.num_draft_tokens
        num_accepted += engine.num_accepted_tokens
        num_preempted += engine.num_preemptions
    assert num_preempted > 0
    assert num_accepted > 50
    assert num_drafted - num_accepted > 50
    native.close()


def test_rows_of_every_kind_stand_beside_drafts() -> None:
    native = runner(tiny_checkpoint("llama"))
    kinds: dict[str, dict[str, Any]] = {
        "log probabilities": {"num_logprobs": 3},
        "greedy": {},
        "penalties": {"frequency_penalty": 1.5, "logit_bias": ((5, 2.0),)},
        "drawn": {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "top_k": 50},
        "kept from stopping": {"min_tokens": 10, "stop_token_ids": tuple(range(0, VOCAB, 2))},
        "more log probabilities": {"num_logprobs": 0, "temperature": 0.5},
    }
    samplings = {
        kind: SamplingParams(**{"max_tokens": 20, "temperature": 0.0} | asked) for kind, asked in kinds.items()
    }
    alone: dict[str, list[SequenceOutput]] = {}
    for kind, sampling in samplings.items():
        alone |= outputs_of(make_engine(native), [Sequence(kind, PROMPT[:20], sampling)])
    engine = make_engine(native, max_draft_rows=32)
    together = [Sequence(kind, PROMPT[:20], sampling) for kind, sampling in samplings.items()]
    drafted = outputs_of(engine, together, {kind: tokens_of(outputs) for kind, outputs in alone.items()})
    for kind, outputs in alone.items():
        assert tokens_of(drafted[kind]) == tokens_of(outputs)
        assert [one for output in drafted[kind] for one in output.logprobs] == [
            one for output in outputs for one in output.logprobs
        ]
        assert (len(drafted[kind]) < len(outputs)) == (kind in ("greedy", "drawn", "kept from stopping"))
    native.close()


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def outputs_of(
    engine: Engine, sequences: list[Sequence], known: dict[str, list[int]] | None = None
) -> dict[str, list[SequenceOutput]]:
    """With `known` texts these are the drafts of those that are drafted at all."""
    outputs: dict[str, list[SequenceOutput]] = {sequence.sequence_id: [] for sequence in sequences}
    for sequence in sequences:
        engine.add(sequence)
        if known is not None and sequence.lookup is not None:
            after = sequence.num_prompt_tokens + sequence.sampling.min_tokens
            sequence.lookup = guesses_of(sequence, known[sequence.sequence_id], first_len=after)
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.sequence_id].append(output)
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_what_repeats_itself_takes_fewer_steps_and_has_the_same_tokens(family: str, temperature: float) -> None:
    native = runner(tiny_checkpoint(family), max_num_seqs=1)
    job = {"a": (PROMPT[:20] * 2, SamplingParams(max_tokens=200, temperature=temperature, seed=1))}
    drafting = make_engine(native, max_draft_rows=MAX_DRAFT_ROWS)
    assert generate(drafting, job) == generate(make_engine(native), job)
    assert drafting.num_accepted_tokens > 0
    native.close()


def scheduled(sampling: SamplingParams) -> ScheduledSequence:
    sequence = Sequence("a", PROMPT[:20], sampling)
    sequence.block_table = [3, 1]
    return ScheduledSequence(sequence, 0, 20, True)


def test_a_plan_without_rows_gives_no_tokens() -> None:
    native = runner(tiny_checkpoint("llama"))
    assert native.execute(StepPlan((), (), 16)).token_ids == []
    native.close()


def test_a_greedy_token_is_the_argmax_of_the_logits() -> None:
    native = runner(tiny_checkpoint("llama"))
    item = scheduled(SamplingParams(max_tokens=5, temperature=0))
    (token,) = native.execute(StepPlan((item,), (), 16)).token_ids
    _, logits = native.decoder.step(step_arrays(StepPlan((item,), (), 16), VOCAB), with_logits=True)
    assert logits is not None
    assert token == int(logits[0].argmax())
    native.close()


def test_stop_tokens_are_not_chosen_before_min_tokens() -> None:
    native = runner(tiny_checkpoint("llama"))
    greedy = scheduled(SamplingParams(max_tokens=5, temperature=0))
    (token,) = native.execute(StepPlan((greedy,), (), 16)).token_ids
    held_back = scheduled(
        SamplingParams(max_tokens=5, temperature=0, min_tokens=1, stop_token_ids=(token, VOCAB + 7))
    )
    _, logits = native.decoder.step(step_arrays(StepPlan((greedy,), (), 16), VOCAB), with_logits=True)
    assert logits is not None
    assert native.execute(StepPlan((held_back,), (), 16)).token_ids == [int(np.argsort(-logits[0])[1])]
    native.close()


def test_a_sequence_that_does_not_sample_gives_no_token() -> None:
    native = runner(tiny_checkpoint("llama"))
    item = scheduled(SamplingParams(max_tokens=5, temperature=0))
    silent = ScheduledSequence(item.sequence, 0, 20, False)
    assert native.execute(StepPlan((silent,), (), 16)).token_ids == []
    native.close()


def test_another_block_size_is_refused() -> None:
    with pytest.raises(NativeUnavailable, match="block_size 32"):
        runner(tiny_checkpoint("llama"), block_size=32)


def test_a_cache_beyond_all_memory_is_refused() -> None:
    with pytest.raises(NativeUnavailable, match="not enough memory"):
        runner(tiny_checkpoint("llama"), num_blocks=2**31 - 1, max_model_len=16)


def test_closing_twice_is_allowed() -> None:
    native = runner(tiny_checkpoint("llama"))
    native.close()
    native.close()


def test_the_variants_have_different_fingerprints() -> None:
    assert native_execution("q4") != native_execution("q8")


def test_a_profile_times_every_phase_while_it_is_on() -> None:
    native = runner(tiny_checkpoint("llama"))
    native.decoder.profile(on=True)
    native.execute(StepPlan((scheduled(SamplingParams(max_tokens=5, temperature=1.0)),), (), 16))
    seconds = native.decoder.profile(on=False)
    assert tuple(seconds) == PHASES
    assert all(work + wait > 0 for work, wait in seconds.values())
    native.execute(StepPlan((scheduled(SamplingParams(max_tokens=5, temperature=1.0)),), (), 16))
    assert native.decoder.profile(on=False) == dict.fromkeys(PHASES, (0.0, 0.0))
    native.close()
