"""The actor: what a worker does about each refusal and each outcome, with a loop that answers as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ConnectionError

from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import GenerationJob, WorkerLoad
from tasks.protocol.record import Append, Terminal
from tasks.protocol.submit import Submitter
from tasks.worker import actor as actors
from tasks.worker.actor import Generate, make_generate
from tasks.worker.engine_loop import Outcome
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell, info, job


class Loop:
    def __init__(self) -> None:
        self.outcome: Outcome = "ended"
        self.runs: list[tuple[GenerationJob, int, tuple[int, ...]]] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, job: GenerationJob, attempt: int, token_ids: tuple[int, ...]) -> Outcome:
        self.runs.append((job, attempt, token_ids))
        self.meanwhile()
        return self.outcome


class Room:
    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.loop = Loop()
        self.not_handed_over = 0
        self.stopping = threading.Event()
        self.broker = build_broker(cell.queue)
        self.generate = Generate(
            cell.records,
            Submitter(cell.records, self.broker, cell.redis),
            self.loop,
            info("w1"),
            not_handed_over=self.count,
            stopping=self.stopping,
        )
        cell.join("w1", lease_ms=10**13)

    def count(self) -> None:
        self.not_handed_over += 1

    def queued(self, queue: str) -> int:
        return int(self.cell.redis.llen(keys.wake(queue))) and int(self.cell.queue.llen(keys.message_list(queue)))


@pytest.fixture
def room(redis_server: RedisServer) -> Room:
    return Room(Cell(redis_server))


def test_a_claimed_job_is_run(room: Room) -> None:
    room.cell.submit()
    room.generate("r1", 1)
    assert room.loop.runs == [(job(), 1, ())]
    assert room.not_handed_over == 0


def test_a_continuation_is_run_with_the_tokens_so_far(room: Room) -> None:
    room.cell.submit()
    room.cell.claim()
    room.cell.append(0, 5, 6)
    room.cell.records.release("r1", 1, "w1", "drain")
    room.generate("r1", 2)
    assert room.loop.runs == [(job(), 2, (5, 6))]


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_stale_message_runs_nothing_and_gives_its_place_back(room: Room, attempt: int) -> None:
    room.cell.submit()
    room.cell.claim()
    room.generate("r1", attempt)
    room.generate("nobody", attempt)
    assert room.loop.runs == []
    assert room.not_handed_over == 2


def test_the_same_message_twice_runs_once(room: Room) -> None:
    room.cell.submit()
    room.generate("r1", 1)
    room.generate("r1", 1)
    assert len(room.loop.runs) == 1


def test_a_continuation_for_another_fingerprint_is_put_back_for_those_who_can(room: Room) -> None:
    room.cell.submit()
    room.cell.claim(fp="other")
    room.cell.append(0, 5)
    room.cell.records.release("r1", 1, "w1", "drain")
    room.generate("r1", 2)
    assert room.loop.runs == []
    assert room.not_handed_over == 1
    assert room.queued(keys.queue_continue(MODEL, "other")) == 1
    assert room.cell.state().state == "offered"


def test_a_job_that_cannot_be_read_fails_the_request(room: Room) -> None:
    room.cell.submit()
    room.cell.redis.hset(keys.request("r1"), "job", b"?")
    room.generate("r1", 1)
    assert (room.cell.end().state, room.cell.end().reason) == ("failed", "contract_error")
    assert room.not_handed_over == 1


@pytest.mark.parametrize("outcome", ["drain", "gap", "engine_error"])
def test_what_the_loop_gives_back_is_released_and_offered_again(room: Room, outcome: Outcome) -> None:
    room.loop.outcome = outcome
    room.cell.submit()
    room.generate("r1", 1)
    state = room.cell.state()
    assert (state.state, state.attempt) == ("offered", 2)
    assert room.queued(keys.queue_again(MODEL)) == 1


@pytest.mark.parametrize("outcome", ["ended", "fenced"])
def test_what_is_over_is_not_released(room: Room, outcome: Outcome) -> None:
    room.loop.outcome = outcome
    room.cell.submit()
    room.generate("r1", 1)
    assert room.cell.state().state == "claimed"


def test_a_request_whose_end_was_published_after_all_is_not_offered_again(room: Room) -> None:
    room.loop.outcome = "drain"
    end = Append("r1", 1, 0, (5,), 0, Terminal("finished", "stop"))
    room.loop.meanwhile = lambda: room.cell.records.append_many([end])
    room.cell.submit()
    room.generate("r1", 1)
    assert room.cell.state().state == "finished"
    assert room.queued(keys.queue_again(MODEL)) == 0


def test_the_third_engine_error_without_a_token_ends_the_request(room: Room) -> None:
    room.loop.outcome = "engine_error"
    room.cell.submit()
    for attempt in (1, 2, 3):
        room.generate("r1", attempt)
    assert (room.cell.end().state, room.cell.end().reason) == ("failed", "poison")


def test_a_claim_is_tried_until_redis_answers_and_is_one_claim(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "FIRST_PAUSE_S", 0)
    real = room.cell.records.claim
    failures = iter([True, True, False])

    def lose_replies(*args: Any) -> Any:
        claimed = real(*args)
        if next(failures):
            raise ConnectionError("reply lost")
        return claimed

    monkeypatch.setattr(room.cell.records, "claim", lose_replies)
    room.cell.submit()
    room.generate("r1", 1)
    assert len(room.loop.runs) == 1
    assert [kind for kind, _, _ in room.cell.events()].count("claimed") == 1


def test_a_stopping_worker_does_not_wait_for_redis(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any) -> None:
        raise ConnectionError("away")

    monkeypatch.setattr(room.cell.records, "claim", away)
    room.stopping.set()
    room.generate("r1", 1)
    assert room.loop.runs == []
    assert room.not_handed_over == 1


def test_the_actor_is_registered_under_the_name_that_messages_carry(room: Room) -> None:
    make_generate(room.broker, room.generate)
    room.cell.submit()
    room.broker.get_actor("generate")("r1", 1)
    assert len(room.loop.runs) == 1


# -- an answer that has grown too large for this worker


@pytest.fixture
def grown(room: Room, monkeypatch: pytest.MonkeyPatch) -> Room:
    """A stream of four tokens on offer, which the engine of this worker has no room for."""
    monkeypatch.setattr(actors, "TOO_LARGE_PAUSE_S", 0)
    room.cell.submit()
    room.cell.claim()
    room.cell.append(0, 5, 6, 7, 8)
    room.cell.records.release("r1", 1, "w1", "drain")
    room.loop.outcome = "too_large"
    return room


def join(room: Room, worker: str, kv_cache_tokens: int, fingerprint: str = "fp") -> None:
    described = replace(info(worker, fingerprint=fingerprint), kv_cache_tokens=kv_cache_tokens)
    room.cell.records.heartbeat(described, WorkerLoad(), 10**13, room.cell.now_ms)


def test_what_is_too_large_here_goes_to_a_worker_that_has_room(grown: Room) -> None:
    join(grown, "w1", 7)
    join(grown, "w2", 8)
    grown.generate("r1", 2)
    assert (grown.cell.state().state, grown.cell.state().attempt) == ("offered", 3)
    assert grown.queued(keys.queue_continue(MODEL, "fp")) == 1


def test_what_is_too_large_for_every_live_worker_fails_and_says_so(grown: Room) -> None:
    join(grown, "w1", 7)
    join(grown, "w2", 7)
    join(grown, "w3", 1000, "another")
    grown.generate("r1", 2)
    end = grown.cell.end()
    assert (end.state, end.reason, end.index) == ("failed", "context_length_exceeded", 4)
    assert "7 tokens long" in end.message
    assert grown.cell.tokens() == [5, 6, 7, 8]


def test_looking_for_room_is_never_poison_and_ends_at_the_deadline(grown: Room) -> None:
    join(grown, "w1", 7)
    join(grown, "w2", 8)
    waiting_ms = grown.cell.redis.hget(keys.request("r1"), "waiting_ms")
    for attempt in range(2, 7):
        grown.generate("r1", attempt)
    assert grown.cell.state().state == "offered"
    assert grown.cell.redis.hget(keys.request("r1"), "waiting_ms") == waiting_ms
