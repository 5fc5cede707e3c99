"""A whole worker over both servers: threads, queue, engine, publisher; and two of them side by side."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from decode.engine.engine import Engine, EngineConfig
from decode.engine.scheduler import StepPlan
from decode.scripted import ScriptedRunner, generate
from tasks.protocol import keys
from tasks.protocol.broker import assignment_message, build_broker
from tasks.protocol.contract import GenerationJob, TerminalEvent
from tasks.protocol.record import Failed, Reoffer
from tasks.protocol.submit import Submitter
from tasks.worker.assembly import RunningWorker, describe_worker, start_worker
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, job
from tests.tasks.visible import has_ended, visible_tokens

MAX_MODEL_LEN = 400
NUM_BLOCKS = 64
WAIT_S = 20.0


class Runner(ScriptedRunner):
    """Steps when it is allowed to: `allow(n)` more steps, or `allow_all()`."""

    def __init__(self) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=16)
        self._allowed = threading.Semaphore(0)
        self._is_free = threading.Event()
        self.broken = False

    def execute(self, plan: StepPlan) -> list[int]:
        while not self._is_free.is_set() and not self._allowed.acquire(timeout=0.01):
            pass
        if self.broken:
            raise RuntimeError("broken on purpose")
        return super().execute(plan)

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def allow_all(self) -> None:
        self._is_free.set()


class House:
    """A cell with the workers that a test starts; all are stopped in the end."""

    def __init__(self, server: RedisServer) -> None:
        self.cell = Cell(server)
        self.cell.records.leave("w1", MODEL)
        self.submitter = Submitter(self.cell.records, build_broker(self.cell.queue), self.cell.redis)
        self.blocking: Any = server.connect("blocking")
        self.workers: list[tuple[RunningWorker, Runner]] = []

    def start(self, *, free: bool = True, max_num_seqs: int = 8) -> tuple[RunningWorker, Runner]:
        runner = Runner()
        if free:
            runner.allow_all()
        config = EngineConfig(
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            fingerprint="fp",
        )
        engine = Engine(runner, config)
        connect = self.cell.server.connect
        worker = start_worker(
            engine,
            describe_worker(engine, model=MODEL, device="cpu"),
            redis=connect("short"),
            blocking=connect("blocking"),
            queue=connect("queue"),
            heartbeat_ms=20,
            lease_ms=5_000,
        )
        self.workers.append((worker, runner))
        return worker, runner

    def submit(self, request_id: str, **sampling: Any) -> GenerationJob:
        made = job(request_id, **sampling)
        self.submitter.submit([made], reader="web", max_waiting=100)
        return made

    def wait_tokens(self, request_id: str, num_tokens: int) -> None:
        """Block until so many tokens are published, or the end."""

        def is_there() -> bool:
            return len(self.tokens(request_id)) >= num_tokens or has_ended(self.cell.redis, request_id)

        self.wait_until(is_there)

    def tokens(self, request_id: str) -> list[int]:
        """Those that are published."""
        return visible_tokens(self.cell.redis, request_id)

    def wait_end(self, request_id: str) -> TerminalEvent:
        self.wait_tokens(request_id, 10**9)
        return self.cell.end(request_id)

    def wait_idle(self, worker: RunningWorker) -> None:
        assert worker.loop.wait_idle(WAIT_S)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """For what nothing tells us about; looks again with every heartbeat or so."""
        turn = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if condition():
                return
            turn.wait(0.01)
        raise AssertionError("it never came true")

    def stop(self) -> None:
        for worker, runner in self.workers:
            runner.allow_all()
            worker.stop(0)

    def assert_clean(self) -> None:
        """Nobody holds, reads or waits for anything, and Dramatiq's books are empty."""
        cell = self.cell
        assert cell.redis.zcard(keys.DUE) == 0
        assert cell.records.num_waiting(MODEL) == 0
        assert cell.records.open_of("web") == []
        assert cell.redis.keys("*:held") == []
        assert [key for key in cell.queue.keys("*") if b"__heartbeats__" not in key] == []


@pytest.fixture
def house(redis_server: RedisServer) -> Iterator[House]:
    made = House(redis_server)
    yield made
    made.stop()


def expected(job: GenerationJob) -> list[int]:
    return generate(job.prompt_token_ids, job.sampling, MAX_MODEL_LEN)[0]


def test_requests_come_out_exactly_and_leave_nothing_behind(house: House) -> None:
    worker, _ = house.start()
    jobs = [house.submit(f"r{n}", prompt=(n, n + 1, 7), max_tokens=5 + n) for n in range(20)]
    for made in jobs:
        end = house.wait_end(made.request_id)
        assert (end.state, end.reason, end.worker) == ("finished", "length", worker.info.worker)
        assert house.cell.tokens(made.request_id) == expected(made)
    house.stop()
    house.assert_clean()


def test_a_cached_prefix_is_reported_with_the_end(house: House) -> None:
    house.start()
    prompt = tuple(range(10, 60))
    house.submit("a", prompt=prompt, max_tokens=2)
    house.wait_end("a")
    house.submit("b", prompt=prompt, max_tokens=2)
    assert house.wait_end("b").num_cached_tokens == 48
    assert house.cell.state("b").num_cached_tokens == 48


def test_a_duplicate_message_runs_once(house: House) -> None:
    house.start()
    for _ in range(2):
        build_broker(house.cell.queue).enqueue(assignment_message(keys.queue_new(MODEL), "r1", 1))
    made = house.submit("r1", max_tokens=5)
    house.wait_end("r1")
    house.submit("r2", max_tokens=1)
    house.wait_end("r2")
    assert house.cell.tokens("r1") == expected(made)
    assert [fact for fact in house.cell.events() if fact[:2] == ("claimed", "r1")] == [("claimed", "r1", "1")]
    house.stop()
    house.assert_clean()


def test_an_unreadable_message_does_not_keep_the_next_request_waiting(house: House) -> None:
    house.start()
    broker: Any = build_broker(house.cell.queue)
    broker.do_enqueue(keys.queue_new(MODEL), "bad", b"?")
    house.submit("r1", max_tokens=1)
    assert house.wait_end("r1").state == "finished"


def test_a_cancelled_request_gives_its_slot_and_blocks_back(house: House) -> None:
    worker, runner = house.start(free=False)
    house.submit("r1", max_tokens=100)
    runner.allow(3)
    house.wait_tokens("r1", 3)
    house.cell.records.close("r1", "cancelled", "disconnect")
    runner.allow(2)
    house.wait_idle(worker)
    load = worker.loop.load(0)
    house.wait_until(lambda: worker.loop.load(0).num_free_blocks == NUM_BLOCKS)
    assert load.num_running == 0
    assert len(house.cell.tokens("r1")) == 3
    house.stop()
    house.assert_clean()


def test_a_prompt_that_does_not_fit_is_refused_by_the_worker_too(house: House) -> None:
    house.start()
    house.submit("r1", prompt=tuple(range(MAX_MODEL_LEN)))
    end = house.wait_end("r1")
    assert (end.state, end.reason) == ("failed", "context_length_exceeded")


def test_an_engine_that_always_fails_ends_the_request_after_three_attempts(house: House) -> None:
    _, runner = house.start()
    runner.broken = True
    house.submit("r1")
    end = house.wait_end("r1")
    assert (end.state, end.reason, end.attempt) == ("failed", "poison", 3)
    runner.broken = False
    house.submit("r2", max_tokens=2)
    assert house.wait_end("r2").state == "finished"


def test_more_requests_than_slots_all_end(house: House) -> None:
    house.start(max_num_seqs=2)
    for n in range(10):
        house.submit(f"r{n}", max_tokens=3)
    assert {house.wait_end(f"r{n}").state for n in range(10)} == {"finished"}


def test_a_worker_takes_no_more_than_it_has_slots_for(house: House) -> None:
    worker, runner = house.start(free=False, max_num_seqs=2)
    for n in range(5):
        house.submit(f"r{n}", max_tokens=50)
    house.wait_until(lambda: len(house.cell.records.held(worker.info.worker)) == 2)
    runner.allow(3)
    house.wait_tokens("r0", 2)
    assert len(house.cell.records.held(worker.info.worker)) == 2
    assert house.cell.records.num_waiting(MODEL) == 3


def test_a_burst_of_twelve_spreads_evenly_over_two_workers(house: House) -> None:
    workers = [house.start(free=False)[0] for _ in range(2)]
    house.wait_until(lambda: len(house.cell.records.workers(MODEL)) == 2)
    house.wait_until(lambda: all(worker._heartbeat.num_live_workers == 2 for worker in workers))
    for n in range(12):
        house.submit(f"r{n}", max_tokens=50)

    def held() -> list[int]:
        return [len(house.cell.records.held(worker.info.worker)) for worker in workers]

    house.wait_until(lambda: sum(held()) == 12)
    assert abs(held()[0] - held()[1]) <= 2


def test_what_a_draining_worker_cannot_finish_continues_elsewhere_exactly(house: House) -> None:
    first, runner = house.start(free=False)
    made = house.submit("r1", max_tokens=60)
    runner.allow(5)
    house.wait_tokens("r1", 5)
    house.start()
    stopping = threading.Thread(target=first.stop, args=(0,))
    stopping.start()
    runner.allow_all()
    assert house.wait_end("r1").attempt == 2
    stopping.join(WAIT_S)
    assert house.cell.tokens("r1") == expected(made)
    assert house.cell.state("r1").worker != first.info.worker
    assert [info.worker for info, _ in house.cell.records.workers(MODEL)] == [house.workers[1][0].info.worker]


def test_what_ends_within_the_drain_budget_is_finished_here(house: House) -> None:
    worker, runner = house.start(free=False)
    house.submit("r1", max_tokens=5)
    runner.allow(1)
    house.wait_tokens("r1", 1)
    stopping = threading.Thread(target=worker.stop, args=(WAIT_S,))
    stopping.start()
    runner.allow_all()
    stopping.join(WAIT_S)
    assert (house.cell.state("r1").state, house.cell.state("r1").attempt) == ("finished", 1)


def test_a_request_submitted_while_the_only_worker_drains_waits_for_the_next(house: House) -> None:
    worker, runner = house.start(free=False)
    house.submit("r1", max_tokens=5)
    runner.allow(1)
    house.wait_tokens("r1", 1)
    worker.gate.close()
    house.submit("r2", max_tokens=1)
    runner.allow_all()
    worker.stop(0)
    assert house.cell.state("r2").state == "offered"
    house.start()
    assert house.wait_end("r2").state == "finished"


def test_a_lost_worker_is_continued_exactly_and_fenced_out(house: House) -> None:
    first, runner = house.start(free=False)
    made = house.submit("r1", max_tokens=40)
    runner.allow(4)
    house.wait_tokens("r1", 4)
    # It neither beats nor fetches, as a process that is stopped; the engine goes on later.
    first.gate.close()
    first._heartbeat._stopping.set()
    first._heartbeat._thread.join(WAIT_S)
    house.cell.records.expire_lease(first.info.worker, MODEL)
    house.start()
    reoffer = house.cell.records.reoffer("r1", 1, "worker_lost")
    assert isinstance(reoffer, Reoffer)
    house.submitter.requeue(reoffer)
    house.wait_end("r1")
    runner.allow_all()
    house.wait_idle(first)
    assert house.cell.tokens("r1") == expected(made)
    assert house.cell.state("r1").attempt == 2


def test_a_request_that_is_let_down_three_times_is_given_up(house: House) -> None:
    worker, _ = house.start(free=False)
    house.submit("r1")
    outcomes: list[Reoffer | Failed | None] = []
    for attempt in (1, 2, 3):
        house.wait_until(lambda: house.cell.records.held(worker.info.worker) == [("r1", len(outcomes) + 1)])
        outcomes.append(house.cell.records.release("r1", attempt, worker.info.worker, "engine_error"))
        if isinstance(outcomes[-1], Reoffer):
            house.submitter.requeue(outcomes[-1])
    assert outcomes[-1] == Failed("r1", "poison")
