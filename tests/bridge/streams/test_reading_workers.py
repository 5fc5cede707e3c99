"""The reader and what workers really publish, with the real scripts, under random pressure.

Whatever is cancelled, released or taken over in between, and however late somebody reads: everybody gets each token
once and one end, and nobody sees a token that a later attempt might not continue from.
"""

from __future__ import annotations

import time
from random import Random

import pytest

from tasks.protocol import keys
from tasks.protocol.record import Append, AppendResult, Refused, Terminal
from tasks.worker.publish import Publisher, Unpublishable
from tests.bridge.cell import FINGERPRINT, Cell
from tests.bridge.reading import Streams, Taker
from tests.conftest import RedisServer
from tests.tasks.visible import visible_tokens

LONG_MS = 1_000_000


def token_at(index: int) -> int:
    """Deterministic, as every attempt must be."""
    return 1000 + index


class ModelWorker:
    """Holds assignments, and publishes one or two tokens of each in every step."""

    def __init__(self, cell: Cell, name: str, random: Random) -> None:
        self.cell, self.name, self.random = cell, name, random
        self.publisher = Publisher(cell.records, self._settle, worker=name)
        self.held: dict[tuple[str, int], int] = {}
        """(request id, attempt) -> next index."""
        self.num_refused = 0
        cell.join(name, time.time_ns() // 1_000_000 + LONG_MS)

    def claim(self, request_id: str, attempt: int) -> None:
        claimed = self.cell.records.claim(request_id, attempt, self.name, FINGERPRINT)
        assert list(claimed.token_ids) == [token_at(index) for index in range(len(claimed.token_ids))]
        self.held[request_id, attempt] = len(claimed.token_ids)

    def step(self, num_tokens: dict[str, int]) -> None:
        appends = []
        for (request_id, attempt), index in self.held.items():
            until = min(index + self.random.choice((1, 1, 1, 2)), num_tokens[request_id])
            end = Terminal("finished", "length") if until == num_tokens[request_id] else None
            token_ids = tuple(token_at(one) for one in range(index, until))
            appends.append(Append(request_id, attempt, index, token_ids, 0, end))
            self.held[request_id, attempt] = until
        self.publisher.publish(appends)
        self.publisher.tick()

    def release(self, request_id: str, attempt: int) -> None:
        del self.held[request_id, attempt]
        self.publisher.forget(request_id, attempt)
        self.cell.records.release(request_id, attempt, self.name, "planned")

    def _settle(self, item: Append, result: AppendResult | Unpublishable) -> None:
        assert not isinstance(result, Unpublishable)
        if isinstance(result, Refused):
            self.num_refused += 1
        if isinstance(result, Refused) or item.terminal is not None:
            del self.held[item.request_id, item.attempt]
            self.publisher.forget(item.request_id, item.attempt)


@pytest.mark.parametrize("seed", range(6))
async def test_everybody_gets_every_token_of_workers_once(redis_server: RedisServer, seed: int) -> None:
    with Streams(redis_server, window=16) as streams:
        random = Random(seed)
        cell = Cell(streams.redis, redis_server.connect("queue"))
        workers = [ModelWorker(cell, name, random) for name in ("w1", "w2")]
        num_tokens: dict[str, int] = {}
        subscribers: list[tuple[str, Taker]] = []
        num_log_reads = 0

        def subscribe(request_id: str, start: int) -> None:
            subscribers.append((request_id, Taker(streams.reader.subscribe(request_id, start - 1), start)))

        def num_ended() -> int:
            return sum(taker.end is not None for _, taker in subscribers)

        for _ in range(2000):
            if len(num_tokens) < 6 and random.random() < 0.1:
                request_id = f"r{len(num_tokens)}"
                num_tokens[request_id] = random.randrange(1, 150)
                cell.offer(request_id, time.time_ns() // 1_000_000, reader="r1", lost=True)
                subscribe(request_id, 0)
            for request_id in num_tokens:
                state = cell.records.state(request_id)
                assert state is not None
                if state.state == "offered":
                    random.choice(workers).claim(request_id, state.attempt)
                elif random.random() < 0.004:
                    cell.records.close(request_id, "cancelled", "test")
                elif random.random() < 0.01:
                    now_ms = time.time_ns() // 1_000_000 + 2 * LONG_MS
                    cell.records.reoffer(request_id, state.attempt, "worker_lost", now_ms)
            for worker in workers:
                if worker.held and random.random() < 0.02:
                    worker.release(*random.choice(list(worker.held)))
                if random.random() < 0.7:
                    worker.step(num_tokens)
            if num_tokens and len(subscribers) < 12 and random.random() < 0.05:
                request_id = random.choice(list(num_tokens))
                subscribe(request_id, random.choice((0, random.randrange(num_tokens[request_id]))))
            if random.random() < 0.01:
                streams.redis.delete(keys.control("r1"))
            if random.random() < 0.6:
                streams.now_s += 0.05
                await streams.turn()
                num_log_reads += bool(streams.last_read) and all("steps" in name for name in streams.last_read)
            for request_id, taker in subscribers:
                if random.random() < 0.4:
                    taker.take()
                    if taker.got:
                        num_visible = len(visible_tokens(streams.redis, request_id))
                        assert taker.start + len(taker.got) <= num_visible, request_id
            if len(num_tokens) == 6 and num_ended() == len(subscribers) >= 12:
                break
        assert num_ended() == len(subscribers) >= 12
        for place, (request_id, taker) in enumerate(subscribers):
            end = taker.end
            assert end is not None
            assert taker.got == [token_at(n) for n in range(taker.start, end.index)], f"{request_id} {place}"
            assert end.index == num_tokens[request_id] or end.state != "finished"
        assert num_log_reads > 10, "the test is about logs"
        assert sum(worker.num_refused for worker in workers) > 0, "there were disturbances"
