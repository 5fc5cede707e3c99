"""The logs of workers: who gets what from them, and when a request's own stream is read."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from bridge.streams.subscription import Subscription
from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, TokenEvent
from tests.bridge.reading import Streams, Taker, ready, tokens
from tests.conftest import RedisServer


async def live(streams: Streams, request_id: str = "a", worker: str = "w1", slot: int = 7) -> Subscription:
    """A subscriber who has got tokens 0 and 1 (10 and 11), the second of them from the log."""
    subscription = streams.open(request_id)
    streams.append(request_id, 0, 10, source=(worker, slot))
    await streams.turn()
    number = streams.redis.xlen(keys.steps(worker)) + 1
    streams.step(worker, number, (slot, 1, 11))
    await streams.turn()
    assert ready(subscription) == [TokenEvent(0, 1, (10,)), TokenEvent(1, 1, (11,))]
    return subscription


async def test_after_the_first_entry_the_log_is_read_too_and_then_alone(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 10, source=("w1", 7))
    await streams.turn()
    assert streams.last_read == ["a"]
    streams.step("w1", 1, (7, 1, 11))
    await streams.turn()
    assert streams.last_read == ["a", "w1:steps"]
    streams.step("w1", 2, (7, 2, 12))
    await streams.turn()
    assert streams.last_read == ["w1:steps"]
    assert ready(subscription) == [TokenEvent(index, 1, (10 + index,)) for index in range(3)]


async def test_what_the_stream_repeats_of_the_log_is_dropped(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, (7, 2, 12))
    streams.append("a", 1, 11, 12)
    await streams.turn()
    streams.now_s += 1
    await streams.turn()
    assert streams.last_read == ["a", "w1:steps"], "the heartbeat reads all"
    assert ready(subscription) == [TokenEvent(2, 1, (12,))]
    await streams.turn()
    assert streams.last_read == ["w1:steps"]


async def test_an_entry_of_the_log_read_with_the_first_entry_comes_after_it(streams: Streams) -> None:
    await live(streams, "b", slot=1)
    subscription = streams.open("a")
    streams.append("a", 0, 10, source=("w1", 7))
    streams.step("w1", 2, (1, 2, 12), (7, 0, 10), (7, 1, 11))
    await streams.turn()
    assert tokens(ready(subscription)) == [10, 11]
    await streams.turn()
    assert streams.last_read == ["w1:steps"]


async def test_a_log_that_was_not_read_is_read_from_its_first_entry(streams: Streams) -> None:
    subscription = streams.open("a")
    streams.append("a", 0, 10, source=("w1", 7))
    streams.step("w1", 1, (7, 1, 11))
    streams.step("w1", 2, (7, 2, 12))
    await streams.turn()
    await streams.turn()
    assert ready(subscription) == [TokenEvent(0, 1, (10,)), TokenEvent(1, 1, (11, 12))]


async def test_several_tokens_of_one_sequence_in_one_entry_are_one_event(streams: Streams) -> None:
    a, b = await live(streams, "a", slot=7), await live(streams, "b", slot=8)
    streams.step("w1", 3, (7, 2, 12), (8, 2, 22), (7, 3, 13), (7, 4, 14))
    await streams.turn()
    assert ready(a) == [TokenEvent(2, 1, (12, 13, 14))]
    assert ready(b) == [TokenEvent(2, 1, (22,))]


async def test_sequences_that_nobody_here_follows_are_ignored(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, (6, 2, 99), (7, 2, 12), (8, 2, 99))
    streams.step("w2", 1, (7, 3, 99))
    await streams.turn()
    assert ready(subscription) == [TokenEvent(2, 1, (12,))]


async def test_the_same_slot_of_two_workers_is_two_sequences(streams: Streams) -> None:
    a, b = await live(streams, "a", "w1"), await live(streams, "b", "w2")
    streams.step("w1", 2, (7, 2, 12))
    streams.step("w2", 2, (7, 2, 22), (7, 3, 23))
    await streams.turn()
    assert streams.last_read == ["w1:steps", "w2:steps"]
    assert (tokens(ready(a)), tokens(ready(b))) == ([12], [22, 23])


async def test_a_notice_makes_the_end_be_read(streams: Streams) -> None:
    subscription = await live(streams)
    streams.append("a", 1, 11, 12)
    streams.end("a", 3)
    streams.notice("a")
    await streams.turn()
    assert ready(subscription) == []
    await streams.turn()
    assert ready(subscription) == [TokenEvent(2, 1, (12,)), TerminalEvent(3, 1, "finished", "stop")]
    await streams.turn()
    assert streams.last_read == []


async def test_an_end_is_read_though_its_last_token_came_with_the_notice(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, (7, 2, 12))
    streams.append("a", 1, 11, 12)
    streams.end("a", 3)
    streams.notice("a")
    await streams.turn()
    await streams.turn()
    assert ready(subscription) == [TokenEvent(2, 1, (12,)), TerminalEvent(3, 1, "finished", "stop")]


async def test_a_notice_is_about_its_own_request(streams: Streams) -> None:
    await live(streams, "a", slot=7)
    await live(streams, "b", slot=8)
    streams.notice("a")
    await streams.turn()
    await streams.turn()
    assert streams.last_read == ["a", "w1:steps"]


async def test_a_lost_notice_costs_until_the_next_heartbeat(streams: Streams) -> None:
    subscription = await live(streams)
    streams.end("a", 2, "cancelled")
    streams.now_s += 0.9
    await streams.turn()
    assert ready(subscription) == []
    streams.now_s += 0.1
    await streams.turn()
    assert ready(subscription) == [TerminalEvent(2, 1, "cancelled", "stop")]


async def test_a_heartbeat_hands_over_at_once_what_it_finds(
    fake_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Streams(fake_server) as streams:
        await live(streams)
        waits: list[int | None] = []

        def read(positions: dict[bytes, bytes], block_ms: int | None, meanwhile: object) -> list[object]:
            waits.append(block_ms)
            return []

        monkeypatch.setattr(streams.reader._xread, "read", read)
        streams.reader._block_ms = 700
        for since_s in (0, 1, 0):
            streams.now_s += since_s
            await streams.turn()
        assert waits == [700, None, 700]


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_an_answer_is_followed_to_another_worker(streams: Streams, is_noticed: bool) -> None:
    subscription = await live(streams)
    streams.append("a", 1, 11, 12)
    if is_noticed:
        streams.notice("a")
        await streams.turn()
    else:
        streams.now_s += 1
    streams.append("a", 3, 13, attempt=2, source=("w2", 3))
    streams.step("w2", 5, (3, 4, 14))
    await streams.turn()
    await streams.turn()
    await streams.turn()
    assert streams.last_read == ["w2:steps"]
    streams.step("w2", 6, (3, 5, 15))
    await streams.turn()
    events = ready(subscription)
    assert [(event.index, event.attempt) for event in events] == [(2, 1), (3, 2), (4, 2), (5, 2)]


async def test_an_answer_that_goes_on_without_a_log_is_read_from_its_stream(streams: Streams) -> None:
    subscription = await live(streams)
    streams.append("a", 2, 12, attempt=2)
    streams.now_s += 1
    await streams.turn()
    await streams.turn()
    assert streams.last_read == ["a"]
    streams.append("a", 3, 13, attempt=2)
    await streams.turn()
    assert tokens(ready(subscription)) == [12, 13]


async def test_a_log_that_has_nothing_more_for_an_answer_is_not_waited_for(streams: Streams) -> None:
    subscription = await live(streams)
    streams.append("a", 1, 11, 12)
    streams.now_s += 1
    await streams.turn()
    streams.append("a", 3, 13)
    await streams.turn()
    assert tokens(ready(subscription)) == [12, 13]
    assert streams.last_read == ["a", "w1:steps"]


async def test_another_slot_of_the_same_attempt_takes_the_place_of_the_first(streams: Streams) -> None:
    subscription = await live(streams)
    streams.append("a", 1, 11, 12, source=("w1", 8))
    streams.step("w1", 2, (8, 3, 13))
    streams.now_s += 1
    await streams.turn()
    streams.step("w1", 3, (7, 4, 99), (8, 4, 14))
    await streams.turn()
    await streams.turn()
    assert tokens(ready(subscription)) == [12, 13, 14]
    assert streams.last_read == ["w1:steps"]


async def test_who_comes_late_gets_what_only_the_log_had_with_the_next_flush(streams: Streams) -> None:
    first = await live(streams)
    late = streams.open("a")
    await streams.turn()
    assert tokens(ready(late)) == [10]
    streams.step("w1", 2, (7, 2, 12))
    await streams.turn()
    assert (tokens(ready(first)), ready(late)) == ([12], [])
    assert streams.last_read == ["a", "w1:steps"]
    streams.step("w1", 3, (7, 3, 13))
    streams.append("a", 1, 11, 12, 13)
    await streams.turn()
    assert (tokens(ready(first)), tokens(ready(late))) == ([13], [11, 12, 13])
    streams.step("w1", 4, (7, 4, 14))
    await streams.turn()
    await streams.turn()
    assert (tokens(ready(first)), tokens(ready(late))) == ([14], [14])
    assert streams.last_read == ["w1:steps"]


async def test_a_step_that_only_the_streams_have_delays_no_more_than_one(streams: Streams) -> None:
    """So it is after a disturbance: what comes after it is kept until it is there."""
    subscription = await live(streams)
    streams.append("a", 1, 11, 12)
    await streams.turn()
    assert ready(subscription) == []
    streams.step("w1", 3, (7, 3, 13), (7, 4, 14))
    await streams.turn()
    await streams.turn()
    assert tokens(ready(subscription)) == [12, 13, 14]
    streams.step("w1", 4, (7, 5, 15))
    await streams.turn()
    assert streams.last_read == ["w1:steps"]
    assert tokens(ready(subscription)) == [15]


async def test_what_was_cut_from_the_log_comes_with_the_next_flush(redis_server: RedisServer) -> None:
    with Streams(redis_server, window=1000) as streams:
        subscription = await live(streams)
        for number in range(2, 80):
            streams.step("w1", number, (7, number, 10 + number))
        for _ in range(3):
            await streams.turn()
        assert ready(subscription) == []
        assert streams.last_read == ["a", "w1:steps"]
        streams.append("a", 1, *range(11, 90))
        await streams.turn()
        assert tokens(ready(subscription)) == list(range(12, 90))
        streams.step("w1", 80, (7, 80, 90))
        await streams.turn()
        assert streams.last_read == ["w1:steps"]
        assert tokens(ready(subscription)) == [90]


async def test_two_subscribers_of_one_request_each_get_all_of_it(streams: Streams) -> None:
    both = [streams.open("a"), streams.open("a", after_index=0)]
    streams.append("a", 0, 10, source=("w1", 7))
    await streams.turn()
    streams.step("w1", 1, (7, 1, 11))
    await streams.turn()
    streams.step("w1", 2, (7, 2, 12))
    await streams.turn()
    assert streams.last_read == ["w1:steps"]
    assert [tokens(ready(one)) for one in both] == [[10, 11, 12], [11, 12]]
    streams.end("a", 3)
    streams.notice("a")
    await streams.turn()
    await streams.turn()
    assert [ready(one) for one in both] == [[TerminalEvent(3, 1, "finished", "stop")]] * 2


async def test_a_resumed_subscriber_waits_for_its_index(streams: Streams) -> None:
    subscription = streams.open("a", after_index=2)
    streams.append("a", 0, 10, source=("w1", 7))
    await streams.turn()
    streams.step("w1", 1, (7, 1, 11), (7, 2, 12))
    await streams.turn()
    assert ready(subscription) == []
    streams.step("w1", 2, (7, 3, 13))
    await streams.turn()
    assert ready(subscription) == [TokenEvent(3, 1, (13,))]


async def test_a_log_that_nobody_follows_any_more_is_not_read(streams: Streams) -> None:
    a, b = await live(streams, "a", slot=7), await live(streams, "b", slot=8)
    a.close()
    await streams.turn()
    assert streams.last_read == ["w1:steps"]
    b.close()
    await streams.turn()
    assert streams.last_read == []


async def test_who_lagged_is_live_again_after_the_next_flush(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, *[(7, index, 10 + index) for index in range(2, 6)])
    await streams.turn()
    assert subscription.is_lagging
    streams.step("w1", 3, (7, 6, 16))
    await streams.turn()
    assert streams.last_read == []
    assert tokens(ready(subscription)) == [12, 13, 14, 15]
    streams.append("a", 1, *range(11, 18))
    streams.step("w1", 4, (7, 7, 17))
    await streams.turn()
    assert streams.last_read == ["a", "w1:steps"]
    assert tokens(ready(subscription)) == [16, 17]
    streams.step("w1", 5, (7, 8, 18))
    await streams.turn()
    streams.step("w1", 6, (7, 9, 19))
    await streams.turn()
    assert streams.last_read == ["w1:steps"]
    assert tokens(ready(subscription)) == [18, 19]


async def test_who_lagged_while_its_answer_ended_gets_the_end(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, *[(7, index, 10 + index) for index in range(2, 6)])
    await streams.turn()
    streams.append("a", 1, *range(11, 16))
    streams.end("a", 6)
    streams.notice("a")
    await streams.turn()
    assert tokens(ready(subscription)) == [12, 13, 14, 15]
    await streams.turn()
    assert ready(subscription) == [TerminalEvent(6, 1, "finished", "stop")]


async def test_a_log_that_cannot_be_read_is_given_up(streams: Streams) -> None:
    subscription = await live(streams)
    streams.step("w1", 2, (7, 2, 12))
    streams.redis.xadd(keys.steps("w1"), {"s": b"12345"}, "3-0")
    await streams.turn()
    assert tokens(ready(subscription)) == [12]
    streams.append("a", 1, 11, 12, 13)
    await streams.turn()
    assert streams.last_read == ["a"]
    assert tokens(ready(subscription)) == [13]


async def test_the_thread_is_woken_by_logs_and_notices_while_it_is_blocked(redis_server: RedisServer) -> None:
    """The one test of the running thread; it blocks for longer than the test may take."""
    with Streams(redis_server, block_ms=1900, heartbeat_s=60) as streams:
        streams.reader.start(asyncio.get_running_loop())
        async with asyncio.timeout(10):
            subscription = streams.open("a")
            streams.append("a", 0, 10, source=("w1", 7))
            assert await subscription.next(60) == [TokenEvent(0, 1, (10,))]
            for index in range(1, 4):
                streams.step("w1", index, (7, index, 10 + index))
                assert await subscription.next(60) == [TokenEvent(index, 1, (10 + index,))]
            streams.append("a", 1, 11, 12, 13)
            streams.end("a", 4)
            streams.notice("a")
            assert await subscription.next(60) == [TerminalEvent(4, 1, "finished", "stop")]


class ModelWorker:
    """Computes one request after the rules of its kind: what only the log has is flushed in time."""

    def __init__(self, streams: Streams, random: Random, request_id: str, num_tokens: int) -> None:
        self.streams, self.random, self.request_id, self.num_tokens = streams, random, request_id, num_tokens
        self.num_done = self.num_flushed = self.attempt = self.slot = 0
        self.worker = ""
        self.is_over = False

    def step(self) -> None:
        if self.is_over:
            return
        random = self.random
        until = min(self.num_tokens, self.num_done + random.choice((1, 1, 1, 1, 2, 3)))
        fresh = range(self.num_done, until)
        chance = random.random()
        if not self.worker:
            self.worker, self.slot = random.choice(("w1", "w2")), random.randrange(1 << 32)
            self.attempt += 1
            self.num_done = until
            self._flush(source=(self.worker, self.slot))
        elif until == self.num_tokens:
            self.num_done = until
            if chance < 0.5 and fresh:
                self._log(fresh)
            self._flush()
            self.streams.end(self.request_id, until, attempt=self.attempt)
            self.is_over = True
            self._tell()
        elif chance < 0.03:
            self._flush()
            self.worker = ""
            self._tell()
        elif chance < 0.08:
            self.num_done = until
            self._flush()
        else:
            self._log(fresh)
            self.num_done = until
            if self.num_done - self.num_flushed > 8:
                self._flush()

    def _log(self, fresh: range) -> None:
        last = self.streams.redis.xrevrange(keys.steps(self.worker), count=1)
        number = int(last[0][0].partition(b"-")[0]) + 1 if last else 1  # type: ignore[index]
        self.streams.step(self.worker, number, *[(self.slot, index, token_at(index)) for index in fresh])

    def _flush(self, source: tuple[str, int] | None = None) -> None:
        if indices := range(self.num_flushed, self.num_done):
            token_ids = [token_at(index) for index in indices]
            self.streams.append(self.request_id, indices[0], *token_ids, attempt=self.attempt, source=source)
            self.num_flushed = self.num_done

    def _tell(self) -> None:
        if self.random.random() < 0.8:  # else the notice is lost
            self.streams.notice(self.request_id)


def token_at(index: int) -> int:
    return 1000 + index


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_everybody_gets_every_token_once(fake_server: RedisServer, seed: int) -> None:
    with Streams(fake_server, window=16) as streams:
        random = Random(seed)
        workers = [ModelWorker(streams, random, name, random.randrange(1, 200)) for name in "ab"]
        workers.append(ModelWorker(streams, random, "c", 200))
        subscribers: list[tuple[ModelWorker, Taker]] = []
        num_log_reads = 0

        for _ in range(1500):
            for worker in workers:
                if random.random() < 0.7:
                    worker.step()
            if len(subscribers) < 12 and random.random() < 0.1:
                worker = random.choice(workers)
                start = random.choice((0, 0, random.randrange(worker.num_tokens)))
                subscribers.append((worker, Taker(streams.open(worker.request_id, after_index=start - 1), start)))
            if random.random() < 0.6:
                streams.now_s += 0.05
                await streams.turn()
                num_log_reads += bool(streams.last_read) and all("steps" in name for name in streams.last_read)
            for _, taker in subscribers:
                if random.random() < 0.4:
                    taker.take()
            if sum(taker.end is not None for _, taker in subscribers) == 12 and all(
                worker.is_over for worker in workers
            ):
                break
        assert len(subscribers) == 12
        for place, (worker, taker) in enumerate(subscribers):
            assert taker.got == [token_at(n) for n in range(taker.start, worker.num_tokens)], f"subscriber {place}"
            assert taker.end is not None
            assert taker.end.index == worker.num_tokens
        assert num_log_reads > 10, "the test is about logs"
        await streams.turn()
        assert (streams.last_read, streams.reader.num_feeds) == ([], 0)
