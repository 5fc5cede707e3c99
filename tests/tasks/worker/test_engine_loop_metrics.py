"""What the engine loop measures, its thread turned by hand with a clock that a step moves."""

from __future__ import annotations

from decode.engine.sampling import Chosen
from decode.engine.scheduler import StepPlan
from tasks.observe.metrics import (
    ACCEPTED_TOKENS,
    DECODE_TIME,
    DRAFT_TOKENS,
    GENERATION_TOKENS,
    ITL,
    PREEMPTIONS,
    PREFILL_TIME,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_SUCCESS,
    Meter,
    Metric,
    Sample,
)
from tasks.protocol.record import Appended
from tasks.worker.engine_loop import EngineLoop
from tasks.worker.gate import Gate
from tasks.worker.metrics import WorkerMetrics
from tests.decode.guesses import repeated
from tests.tasks.cell import START_MS, job
from tests.tasks.worker.test_engine_loop import Notes, Runner, engine_around

STEP_S = 0.25


class RepeatingRunner(Runner):
    def execute(self, plan: StepPlan) -> Chosen:
        self.before()
        return repeated(plan)


class Measured:
    """Every step takes STEP_S; the requests were made when the clock stood at 0."""

    def __init__(self, *, num_blocks: int = 16, max_num_seqs: int = 4, max_draft_rows: int = 0) -> None:
        self.now_s = 0.0
        runner = RepeatingRunner(num_blocks) if max_draft_rows else Runner(num_blocks)
        runner.before = self._step
        self.meter, self.gate, self.notes = Meter("w1"), Gate(), Notes()
        metrics = WorkerMetrics(
            self.meter, "m", clock=lambda: START_MS / 1000 + self.now_s, monotonic=lambda: self.now_s
        )
        self.loop = EngineLoop(
            engine_around(runner, num_blocks, max_num_seqs, max_draft_rows),
            self.gate,
            on_fatal=print,
            metrics=metrics,
            monotonic=lambda: self.now_s,
        )
        self.loop.publisher = self.notes

    def _step(self) -> None:
        self.now_s += STEP_S

    def hand_over(self, *args: object, **kwargs: object) -> None:
        self.gate.take()
        self.loop.hand_over(*args, **kwargs)  # type: ignore[arg-type]

    def drive(self) -> None:
        while self.loop.tick():
            for item in self.notes.take():
                self.loop.settle(item, Appended(item.first_index + len(item.token_ids)))

    def sample(self, metric: Metric, *labels: str) -> Sample:
        [found] = [one for one in self.meter.samples() if (one.metric, one.labels) == (metric, labels)]
        return found

    def seconds(self, metric: Metric) -> tuple[float, int]:
        """Their sum, and how many there are."""
        sample = self.sample(metric, "m")
        return sample.value, sum(sample.buckets)


def test_one_request_has_its_times_and_tokens() -> None:
    measured = Measured()
    measured.now_s = 3.0
    measured.hand_over(job(max_tokens=5, prompt=tuple(range(40))), 1, ())
    measured.now_s = 4.0
    measured.drive()
    assert measured.seconds(QUEUE_TIME) == (4.0, 1)
    assert measured.seconds(PREFILL_TIME) == (2 * STEP_S, 1)
    assert measured.seconds(ITL) == (4 * STEP_S, 4)
    assert measured.seconds(DECODE_TIME) == (4 * STEP_S, 1)
    assert measured.sample(PROMPT_TOKENS, "m").value == 40
    assert measured.sample(GENERATION_TOKENS, "m").value == 5
    assert measured.sample(REQUEST_SUCCESS, "m", "length").value == 1


def test_sequences_of_one_step_are_counted_each() -> None:
    measured = Measured()
    for number in range(3):
        measured.hand_over(job(f"r{number}", max_tokens=4, prompt=(number, 1)), 1, ())
    measured.drive()
    assert measured.seconds(ITL) == (3 * 3 * STEP_S, 9)
    assert measured.sample(GENERATION_TOKENS, "m").value == 12


def test_who_waits_for_a_slot_waits_in_the_queue() -> None:
    measured = Measured(max_num_seqs=1)
    for number in range(2):
        measured.hand_over(job(f"r{number}", max_tokens=4, prompt=(number, 1)), 1, ())
    measured.drive()
    assert measured.seconds(QUEUE_TIME) == (4 * STEP_S, 2)
    assert measured.seconds(PREFILL_TIME) == (2 * STEP_S, 2)


def test_a_prefix_that_was_restored_is_a_hit() -> None:
    measured = Measured()
    prompt = tuple(range(33))
    for number in range(2):
        measured.hand_over(job(f"r{number}", max_tokens=1, prompt=prompt), 1, ())
        measured.drive()
    assert measured.sample(PREFIX_QUERIES, "m").value == 66
    assert measured.sample(PREFIX_HITS, "m").value == 32


def test_what_lost_its_blocks_is_a_preemption_and_no_second_request() -> None:
    measured = Measured(num_blocks=4)
    for number in range(3):
        measured.hand_over(job(f"r{number}", max_tokens=30, prompt=(number, *range(10))), 1, ())
    measured.drive()
    assert measured.sample(PREEMPTIONS, "m").value > 0
    assert measured.seconds(QUEUE_TIME)[1] == measured.seconds(DECODE_TIME)[1] == 3
    assert measured.sample(GENERATION_TOKENS, "m").value == 90
    assert measured.seconds(ITL)[1] == 87


def test_tokens_of_one_step_have_nothing_between_them_and_are_counted_each() -> None:
    measured = Measured(max_draft_rows=4)
    measured.hand_over(job(max_tokens=16, prompt=(11, 12, 13, 14, 15, 12, 13)), 1, ())
    measured.drive()
    # Steps of 1, 2, 3, 4, 4 and 2 tokens.
    assert measured.seconds(ITL) == (5 * STEP_S, 15)
    assert measured.sample(ITL, "m").buckets[0] == 10
    assert measured.sample(GENERATION_TOKENS, "m").value == 16
    assert measured.sample(DRAFT_TOKENS, "m").value == measured.sample(ACCEPTED_TOKENS, "m").value == 10
    measured.hand_over(job("r2", max_tokens=3, prompt=(21, 22, 99, 22, 31, 32, 21)), 1, ())
    measured.drive()
    assert measured.sample(DRAFT_TOKENS, "m").value > measured.sample(ACCEPTED_TOKENS, "m").value == 10


def test_an_engine_without_drafts_counts_none() -> None:
    measured = Measured()
    assert measured.sample(DRAFT_TOKENS, "m").value == measured.sample(ACCEPTED_TOKENS, "m").value == 0
