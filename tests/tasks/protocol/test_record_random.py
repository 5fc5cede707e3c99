"""Random interleavings of every caller against a small oracle: no token is lost, repeated or reordered."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tasks.protocol.errors import Stale
from tasks.protocol.record import Appended, Failed, Refused, Reoffer
from tests.conftest import RedisServer
from tests.tasks.cell import MODEL, Cell

WORKERS = ("w1", "w2")
NUM_STEPS = 500
MAX_ATTEMPTS = 3


def token(index: int) -> int:
    return 100 + index


@dataclass
class Model:
    """What one record should be."""

    state: str = "offered"
    attempt: int = 1
    worker: str = ""
    next_index: int = 0
    losses: int = 0
    ended_by: int = 0
    claimed: list[tuple[int, str]] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.state == "over"

    @property
    def is_held(self) -> bool:
        return self.state == "held"

    def offer_again(self) -> None:
        self.state, self.worker, self.attempt = "offered", "", self.attempt + 1

    def lose(self) -> str:
        self.losses += 1
        if self.losses >= MAX_ATTEMPTS:
            self.state = "over"
            return "failed"
        self.offer_again()
        return "offered"

    def append(self, attempt: int, first_index: int, num_tokens: int, ends: bool) -> str:
        if attempt != self.attempt:
            return "stale"
        if self.is_over:
            return "ok" if ends and self.ended_by == attempt else "closed"
        if not self.is_held:
            return "stale"
        if first_index > self.next_index:
            return "gap"
        if first_index + num_tokens > self.next_index:
            self.next_index = first_index + num_tokens
            self.losses = 0
        if ends:
            self.state, self.ended_by = "over", attempt
        return "ok"


class Pressure:
    """Turns one random caller at a time, on the record and on the model, and compares the two answers."""

    def __init__(self, cell: Cell, seed: int) -> None:
        self.cell = cell
        self.random = random.Random(seed)
        self.models: dict[str, Model] = {}
        self.seen: set[str] = set()
        cell.join("w2", lease_ms=10**9)
        cell.join("w1", lease_ms=10**9)

    def step(self) -> None:
        actions: list[Callable[[], None]] = [self.submit, self.claim, self.claim, self.release, self.lose_worker]
        actions += [self.append] * 4 + [self.close, self.message_lost]
        self.random.choice(actions)()
        self.cell.now_ms += self.random.randrange(3)

    def pick(self) -> tuple[str, Model]:
        if not self.models:
            self.submit()
        request_id = self.random.choice(sorted(self.models))
        return request_id, self.models[request_id]

    def some_attempt(self, model: Model) -> int:
        return max(1, model.attempt - self.random.choice((0, 0, 0, 0, 1, 2)))

    def submit(self) -> None:
        request_id = f"r{self.random.randrange(8)}"
        created = self.cell.submit(request_id).created
        assert created == (request_id not in self.models)
        self.models.setdefault(request_id, Model())

    def claim(self) -> None:
        request_id, model = self.pick()
        attempt, worker = self.some_attempt(model), self.random.choice(WORKERS)
        try:
            claimed = self.cell.claim(request_id, attempt, worker)
        except Stale:
            assert attempt != model.attempt or model.state != "offered"
            self.seen.add("stale claim")
            return
        assert attempt == model.attempt
        assert model.state == "offered"
        assert list(claimed.token_ids) == [token(index) for index in range(model.next_index)]
        model.state, model.worker = "held", worker
        self.seen.add("continued" if model.next_index else "claimed")

    def append(self) -> None:
        request_id, model = self.pick()
        attempt = self.some_attempt(model)
        first_index = max(0, model.next_index + self.random.choice((-3, -1, 0, 0, 0, 0, 1)))
        tokens = [token(first_index + n) for n in range(self.random.randrange(4))]
        ends = self.random.random() < 0.1
        result = self.cell.append(
            first_index, *tokens, end="stop" if ends else "", request_id=request_id, attempt=attempt
        )
        expected = model.append(attempt, first_index, len(tokens), ends)
        assert result == (Appended(model.next_index) if expected == "ok" else Refused(expected))  # type: ignore[arg-type]
        self.seen.add(f"append {expected}")

    def release(self) -> None:
        request_id, model = self.pick()
        attempt, worker = self.some_attempt(model), self.random.choice(WORKERS)
        reason = self.random.choice(("drain", "engine_error"))
        is_mine = model.is_held and model.attempt == attempt and model.worker == worker
        was_mine = model.state == "offered" and (attempt, worker) in model.claimed and model.attempt == attempt + 1
        result = self.cell.records.release(request_id, attempt, worker, reason, self.cell.now_ms)
        if is_mine:
            outcome = "offered"
            model.claimed.append((attempt, worker))
            if reason == "engine_error":
                outcome = model.lose()
            else:
                model.offer_again()
            self.check(result, outcome, model)
        elif was_mine:
            assert isinstance(result, Reoffer)
            assert result.attempt == model.attempt
        else:
            assert result is None

    def lose_worker(self) -> None:
        worker = self.random.choice(WORKERS)
        self.cell.records.expire_lease(worker, MODEL)
        held = self.cell.records.held(worker)
        assert held == sorted(
            (request_id, model.attempt)
            for request_id, model in self.models.items()
            if model.is_held and model.worker == worker
        )
        for request_id, attempt in held:
            model = self.models[request_id]
            model.claimed.append((attempt, worker))
            result = self.cell.records.reoffer(request_id, attempt, "worker_lost", self.cell.now_ms)
            self.check(result, model.lose(), model)
        self.cell.join(worker, lease_ms=10**9)

    def message_lost(self) -> None:
        request_id, model = self.pick()
        attempt = self.some_attempt(model)
        result = self.cell.records.reoffer(request_id, attempt, "message_lost", self.cell.now_ms)
        if model.state == "offered" and attempt == model.attempt:
            model.claimed.clear()
            model.offer_again()
            self.check(result, "offered", model)
        else:
            assert result is None

    def close(self) -> None:
        if self.random.random() < 0.7:
            return
        request_id, model = self.pick()
        closed = self.cell.records.close(request_id, "cancelled", "disconnect", now_ms=self.cell.now_ms)
        assert closed == (not model.is_over)
        model.state = "over"

    def check(self, result: Reoffer | Failed | None, expected: str, model: Model) -> None:
        if expected == "failed":
            assert isinstance(result, Failed)
            self.seen.add("poison")
        else:
            assert isinstance(result, Reoffer)
            assert result.attempt == model.attempt

    def compare(self) -> None:
        for request_id, model in self.models.items():
            state = self.cell.state(request_id)
            assert state.is_over == model.is_over
            assert (state.attempt, state.next_index) == (model.attempt, model.next_index)
            assert self.cell.tokens(request_id) == [token(index) for index in range(model.next_index)]

    def finish(self) -> None:
        for request_id, model in self.models.items():
            if not model.is_over:
                self.cell.records.close(request_id, "failed", "end of test", now_ms=self.cell.now_ms)
            self.cell.end(request_id)
        for worker in WORKERS:
            assert self.cell.records.held(worker) == []
        assert self.cell.records.num_waiting(MODEL) == 0
        assert self.cell.records.due(10**15) == []
        assert self.cell.records.open_of("web") == []


@pytest.mark.parametrize("seed", range(6))
def test_random_interleavings_agree_with_the_model(redis_server: RedisServer, seed: int) -> None:
    pressure = Pressure(Cell(redis_server, max_attempts=MAX_ATTEMPTS), seed)
    for number in range(NUM_STEPS):
        pressure.step()
        if number % 20 == 0:
            pressure.compare()
    pressure.compare()
    pressure.finish()


def test_the_pressure_is_real(fake_server: RedisServer) -> None:
    seen: set[str] = set()
    cell = Cell(fake_server, max_attempts=MAX_ATTEMPTS)
    for seed in range(4):
        cell.redis.flushall()
        pressure = Pressure(cell, seed)
        for _ in range(NUM_STEPS):
            pressure.step()
        seen |= pressure.seen
    refusals = {"append stale", "append closed", "append gap", "append ok", "stale claim"}
    assert seen >= refusals | {"claimed", "continued", "poison"}
