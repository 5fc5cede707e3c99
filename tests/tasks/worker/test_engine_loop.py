"""The engine loop, its thread turned by hand, around the scripted engine and a publisher that only takes notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from decode.engine.engine import Engine, EngineConfig
from decode.engine.grammar import Grammars
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import StepPlan
from decode.errors import DeviceOutOfMemory, IntegrityError
from decode.scripted import SCRIPTED_EOS_TOKEN_ID, ScriptedRunner, generate, scripted_vocabulary
from tasks.protocol.contract import GenerationJob
from tasks.protocol.record import Append, Appended, AppendResult, RefusalReason, Refused, Terminal
from tasks.worker.engine_loop import CHECK_EVERY_S, EngineLoop
from tasks.worker.gate import Gate
from tasks.worker.publish import Unpublishable
from tests.tasks.cell import job

MAX_MODEL_LEN = 200
NUM_BLOCKS = 16


class Runner(ScriptedRunner):
    """The scripted runner, which fails or does something else first when a test says so."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__(num_blocks=num_blocks, block_size=16)
        self.before: Callable[[], None] = lambda: None

    def execute(self, plan: StepPlan) -> list[int]:
        self.before()
        return super().execute(plan)


class Notes:
    """A publisher that keeps what it was given until the test settles it."""

    def __init__(self) -> None:
        self.appends: list[Append] = []
        self.num_flushes = 0
        self.forgotten: list[tuple[str, int]] = []

    def publish(self, appends: Sequence[Append]) -> None:
        self.appends.extend(appends)

    def forget(self, request_id: str, attempt: int) -> None:
        self.forgotten.append((request_id, attempt))

    def wait_published(self, timeout_s: float) -> bool:
        self.num_flushes += 1
        return True

    def take(self) -> list[Append]:
        taken, self.appends = self.appends, []
        return taken


def engine_around(runner: Runner, num_blocks: int, max_num_seqs: int, max_draft_rows: int = 0) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=32,
        fingerprint="fp",
        max_draft_rows=max_draft_rows,
    )
    return Engine(runner, config)


class Room:
    def __init__(self, max_num_seqs: int = 4, num_blocks: int = NUM_BLOCKS) -> None:
        self.runner = Runner(num_blocks)
        self.engine = engine_around(self.runner, num_blocks, max_num_seqs)
        self.gate = Gate()
        self.fatal: list[str] = []
        self.now_s = 100.0
        self.loop = EngineLoop(self.engine, self.gate, on_fatal=self.fatal.append, monotonic=lambda: self.now_s)
        self.notes = Notes()
        self.loop.publisher = self.notes

    def hand_over(self, job: GenerationJob, attempt: int = 1, token_ids: tuple[int, ...] = ()):  # type: ignore[no-untyped-def]
        self.gate.take()
        return self.loop.hand_over(job, attempt, token_ids)

    def settle(self, result: AppendResult | Unpublishable | None = None) -> list[Append]:
        """Answer everything that was published."""
        appends = self.notes.take()
        for item in appends:
            self.loop.settle(item, result or Appended(item.first_index + len(item.token_ids)))
        return appends

    def drive(self) -> list[Append]:
        """Turn until there is no work, settling as Redis would."""
        appends: list[Append] = []
        while self.loop.tick():
            appends += self.settle()
        return appends + self.settle()

    @property
    def is_clean(self) -> bool:
        load = self.engine.load()
        return load.num_running == load.num_waiting == 0 and load.num_free_blocks == NUM_BLOCKS


@pytest.fixture
def room() -> Room:
    return Room()


def expected(job: GenerationJob) -> list[int]:
    return generate(job.prompt_token_ids, job.sampling, MAX_MODEL_LEN)[0]


def test_a_job_is_generated_and_over_once_its_last_token_is_published(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=3))
    while room.loop.tick():
        pass
    assert handle.outcome is None
    appends = room.settle()
    assert handle.wait(0) == "ended"
    assert [token for item in appends for token in item.token_ids] == expected(job(max_tokens=3))
    assert appends[-1].terminal == Terminal("finished", "length")


def test_a_continuation_goes_on_at_the_next_index(room: Room) -> None:
    tokens = expected(job(max_tokens=5))
    handle = room.hand_over(job(max_tokens=5), attempt=2, token_ids=tuple(tokens[:3]))
    appends = room.drive()
    assert [(item.first_index, item.attempt) for item in appends if item.token_ids] == [(3, 2), (4, 2)]
    assert [token for item in appends for token in item.token_ids] == tokens[3:]
    assert handle.outcome == "ended"


def test_a_continuation_that_lacks_only_its_end_is_ended(room: Room) -> None:
    tokens = tuple(expected(job(max_tokens=3)))
    handle = room.hand_over(job(max_tokens=3), attempt=2, token_ids=tokens)
    [append] = room.drive()
    assert (append.first_index, append.token_ids, append.terminal) == (3, (), Terminal("finished", "length"))
    assert handle.outcome == "ended"


def test_cached_prompt_tokens_are_reported(room: Room) -> None:
    prompt = tuple(range(10, 60))
    room.hand_over(job("a", prompt=prompt, max_tokens=2))
    room.drive()
    room.hand_over(job("b", prompt=prompt, max_tokens=2))
    assert room.drive()[-1].num_cached_tokens == 48


@pytest.mark.parametrize("reason", ["stale", "closed", "missing"])
def test_what_is_fenced_out_is_aborted_before_the_next_step(room: Room, reason: RefusalReason) -> None:
    handle = room.hand_over(job(max_tokens=50))
    room.loop.tick()
    room.settle(Refused(reason))
    assert not room.loop.tick()
    assert handle.outcome == "fenced"
    assert room.is_clean
    assert room.notes.appends == []


def test_a_gap_gives_the_assignment_back(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=50))
    room.loop.tick()
    room.settle(Refused("gap"))
    room.loop.tick()
    assert handle.outcome == "gap"
    assert room.notes.forgotten == [(handle.job.request_id, 1)]
    assert room.is_clean


def test_an_append_that_redis_cannot_take_is_an_engine_error(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=50))
    room.loop.tick()
    room.settle(Unpublishable("ERR"))
    room.loop.tick()
    assert handle.outcome == "engine_error"


def test_a_refused_end_is_fenced_too(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=1))
    room.loop.tick()
    room.settle(Refused("stale"))
    room.loop.tick()
    assert handle.outcome == "fenced"


def test_neighbours_of_a_cancelled_request_go_on(room: Room) -> None:
    cancelled = room.hand_over(job("a", max_tokens=20))
    other = room.hand_over(job("b", max_tokens=20, prompt=(7, 8)))
    room.loop.tick()
    for item in room.notes.take():
        room.loop.settle(item, Refused("closed") if item.request_id == "a" else Appended(1))
    room.drive()
    assert (cancelled.outcome, other.outcome) == ("fenced", "ended")


def test_a_long_prefill_asks_at_every_step_whether_to_go_on(room: Room) -> None:
    handle = room.hand_over(job(prompt=tuple(range(100)), max_tokens=5))
    room.loop.tick()
    [probe] = room.settle(Refused("closed"))
    assert (probe.first_index, probe.token_ids, probe.terminal) == (0, (), None)
    assert not room.loop.tick()
    assert handle.outcome == "fenced"
    assert room.is_clean


def test_a_request_that_waits_for_a_slot_is_asked_for_too() -> None:
    room = Room(max_num_seqs=1)
    room.hand_over(job("a", max_tokens=50))
    waiting = room.hand_over(job("b", max_tokens=50))
    room.loop.tick()
    appends = room.notes.take()
    assert [(item.request_id, len(item.token_ids)) for item in appends] == [("a", 1), ("b", 0)]
    room.loop.settle(appends[1], Refused("closed"))
    room.loop.tick()
    assert waiting.outcome == "fenced"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [(tuple(range(300)), "context_length_exceeded"), ((), "invalid_prompt"), ((-1,), "invalid_prompt")],
)
def test_a_prompt_that_can_never_run_fails_the_request(room: Room, prompt: tuple[int, ...], reason: str) -> None:
    handle = room.hand_over(job(prompt=prompt))
    [append] = room.drive()
    assert append.terminal is not None
    assert (append.terminal.state, append.terminal.reason) == ("failed", reason)
    assert handle.outcome == "ended"


def test_a_continuation_that_has_outgrown_this_cache_is_given_back_not_failed() -> None:
    room = Room(num_blocks=2)
    handle = room.hand_over(job(prompt=tuple(range(20)), max_tokens=50), attempt=2, token_ids=tuple(range(12)))
    assert room.drive() == []
    assert handle.outcome == "too_large"
    fresh = room.hand_over(job("r2", prompt=tuple(range(40)), max_tokens=5))
    [append] = room.drive()
    assert append.terminal is not None
    assert append.terminal.reason == "context_length_exceeded"
    assert fresh.outcome == "ended"


def test_a_grammar_that_does_not_compile_fails_its_request_alone(room: Room) -> None:
    other = room.hand_over(job("a", max_tokens=3))
    broken = room.hand_over(job("b", max_tokens=3, grammar='{"kind": "nonsense"}'))
    appends = room.drive()
    [end] = [item.terminal for item in appends if item.request_id == "b" and item.terminal is not None]
    assert (end.state, end.reason) == ("failed", "invalid_grammar")
    assert (other.outcome, broken.outcome) == ("ended", "ended")


def test_a_step_that_raises_gives_all_assignments_back_and_the_engine_goes_on(room: Room) -> None:
    handles = [room.hand_over(job(name, max_tokens=5)) for name in ("a", "b")]

    def break_once() -> None:
        room.runner.before = lambda: None
        raise RuntimeError("broken")

    room.runner.before = break_once
    room.loop.tick()
    assert [handle.outcome for handle in handles] == ["engine_error", "engine_error"]
    assert room.is_clean
    assert room.notes.num_flushes == 1
    healthy = room.hand_over(job("c", max_tokens=2))
    room.drive()
    assert healthy.outcome == "ended"
    assert room.fatal == []


def test_out_of_device_memory_sheds_load_and_loses_nothing(room: Room) -> None:
    handles = [room.hand_over(job(name, prompt=(n, 5), max_tokens=5)) for n, name in enumerate("abcd")]

    def exhaust_once() -> None:
        room.runner.before = lambda: None
        raise DeviceOutOfMemory("no memory")

    room.runner.before = exhaust_once
    room.drive()
    assert [handle.outcome for handle in handles] == ["ended"] * 4


def test_out_of_device_memory_with_a_single_sequence_gives_it_back(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=5))

    def exhaust() -> None:
        raise DeviceOutOfMemory("no memory")

    room.runner.before = exhaust
    while handle.outcome is None:  # the steps become smaller until there is nothing left to give up
        room.loop.tick()
    assert handle.outcome == "engine_error"
    assert room.is_clean


def test_only_the_sequence_that_no_step_can_hold_has_failed_its_neighbours_are_given_back_as_planned(
    room: Room,
) -> None:
    handles = [room.hand_over(job(name, prompt=(n, 5), max_tokens=5)) for n, name in enumerate("abc")]

    def exhaust() -> None:
        raise DeviceOutOfMemory("no memory")

    room.runner.before = exhaust
    while room.loop.tick():
        room.settle()
    assert [handle.outcome for handle in handles] == ["engine_error", "drain", "drain"]
    assert room.is_clean


def test_a_single_sequence_goes_on_in_smaller_steps_when_device_memory_is_short(room: Room) -> None:
    handle = room.hand_over(job(prompt=tuple(range(5, 35)), max_tokens=5))
    failures = iter([True, True])

    def exhaust_twice() -> None:
        if next(failures, False):
            raise DeviceOutOfMemory("no memory")

    room.runner.before = exhaust_twice
    appends = room.drive()
    assert handle.outcome == "ended"
    assert [token for item in appends for token in item.token_ids] == expected(handle.job)


def test_a_sequence_that_cannot_go_on_fails_its_request_with_what_it_had(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=5))
    room.loop.tick()
    [sequence] = room.engine._sequences.values()
    sequence.grammar = Grammars(scripted_vocabulary).matcher("a", _SAMPLING, [])
    sequence.grammar.failure = "too complex"
    append = room.drive()[-1]
    assert append.terminal == Terminal("failed", "invalid_grammar", "too complex")
    assert (append.first_index, append.token_ids, handle.outcome) == (1, (), "ended")
    assert room.is_clean


_SAMPLING = SamplingParams(max_tokens=5, stop_token_ids=(SCRIPTED_EOS_TOKEN_ID,), grammar='start: "a"')


def test_a_grammar_that_does_not_compile_fails_the_request(room: Room) -> None:
    handle = room.hand_over(job(max_tokens=5, grammar="start: nowhere"))
    [append] = room.drive()
    assert append.terminal is not None
    assert (append.terminal.state, append.terminal.reason) == ("failed", "invalid_grammar")
    assert handle.outcome == "ended"


def test_the_books_are_compared_when_idle_but_not_after_every_request(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[float] = []
    monkeypatch.setattr(room.engine, "check_idle", lambda: checks.append(room.now_s))
    for request_id in ("a", "b", "c"):
        room.hand_over(job(request_id, max_tokens=1))
        room.drive()
    assert checks == [100.0]
    room.now_s += CHECK_EVERY_S
    room.loop.tick()
    room.loop.tick()
    assert checks == [100.0, 100.0 + CHECK_EVERY_S]


def test_wrong_books_of_the_engine_are_fatal(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.hand_over(job(max_tokens=1))

    def leak() -> None:
        raise IntegrityError("a block leaked")

    monkeypatch.setattr(room.engine, "check_idle", leak)
    room.drive()
    assert room.fatal == ["the engine's books are wrong: a block leaked"]


def test_releasing_gives_everything_back_now_and_from_now_on(room: Room) -> None:
    running = room.hand_over(job("a", max_tokens=50))
    room.loop.tick()
    queued = room.hand_over(job("b", max_tokens=50))
    room.loop.release_all()
    room.loop.tick()
    late = room.hand_over(job("c", max_tokens=50))
    assert [handle.outcome for handle in (running, queued, late)] == ["drain"] * 3
    assert room.is_clean
    assert room.loop.wait_idle(0)
    assert room.notes.num_flushes == 1


def test_the_step_that_runs_is_timed_and_no_time_between_steps(room: Room) -> None:
    stalled: list[float] = []

    def take_long() -> None:
        room.now_s += 7
        stalled.append(room.loop.stalled_s())

    room.runner.before = take_long
    room.hand_over(job(max_tokens=1))
    assert room.loop.stalled_s() == 0
    room.loop.tick()
    assert stalled == [7]
    assert room.loop.stalled_s() == 0


def test_the_load_says_when_the_engine_last_finished_a_step(room: Room) -> None:
    room.now_s += 50
    assert room.loop.load(1_000_000).last_step_ms == 1_000_000
    room.hand_over(job(max_tokens=50))
    room.loop.tick()
    room.now_s += 2
    load = room.loop.load(1_000_000)
    assert (load.num_running, load.last_step_ms) == (1, 998_000)
    assert load.num_free_blocks == NUM_BLOCKS - 1


def test_messages_are_on_their_way_until_the_engine_has_them(room: Room) -> None:
    for n in range(4):
        assert room.gate.wait_open(0)
        room.hand_over(job(f"r{n}", prompt=(n, 3), max_tokens=5))
    assert not room.gate.wait_open(0)
    room.drive()
    assert room.gate.wait_open(0)


def test_an_actor_thread_sleeps_until_its_sequence_is_over(room: Room) -> None:
    outcomes: list[str] = []
    room.gate.take()
    actor = threading.Thread(target=lambda: outcomes.append(room.loop.run(job(max_tokens=2), 1, ())))

    class Settling(Notes):
        def publish(self, appends: Sequence[Append]) -> None:
            for item in appends:
                room.loop.settle(item, Appended(0))

    room.loop.publisher = Settling()
    room.loop.start()
    actor.start()
    actor.join(10)
    room.loop.stop(10)
    assert outcomes == ["ended"]


def test_a_loop_that_fails_is_fatal(room: Room) -> None:
    class Broken(Notes):
        def publish(self, appends: Sequence[Append]) -> None:
            raise AssertionError("a bug")

    room.loop.publisher = Broken()
    room.hand_over(job())
    room.loop.start()
    room.loop._thread.join(10)
    assert room.fatal == ["the engine loop failed: a bug"]
