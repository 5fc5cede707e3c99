"""The consumer: fetches one Dramatiq message at a time, only while the engine has room, and waits without polling.

Owns the waiting, the order of the queues, the turn-taking between workers, and the acknowledgements. Refuses to know
what a message leads to: it hands it to an actor thread. One thread serves all queues of a worker; delay queues do not
exist. Dramatiq's own consumer polls with a back-off and prefetches; this one does neither.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dramatiq import MessageProxy
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import DecodeError
from redis import Redis
from redis.exceptions import RedisError

from tasks.protocol import keys
from tasks.protocol.broker import AssignmentMessage
from tasks.protocol.contract import WorkerInfo
from tasks.protocol.lua import Scripts
from tasks.protocol.priorities import HEAD_START_MS
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import place_of, wake
from tasks.worker.gate import Gate

log = logging.getLogger(__name__)

BLOCK_S = 2.0
"""How long to block for a wake token: within the read time-out of the blocking client (`tasks.process.clients`)."""
HOUSEKEEPING_S = 10.0
BOOKS_TTL_MS = 86_400_000
DEAD_AFTER_MS = 60_000
"""A worker that has not been in Dramatiq's books for so long is dead; one that is not only acknowledges in vain."""
YIELD_STEP_S = 0.002
MAX_YIELD_STEPS = 10
YIELD_HOLIDAY_S = 0.25
"""After having yielded in vain for MAX_YIELD_STEPS, how long not to yield again."""
RETRY_PAUSE_S = 0.1


class AssignmentConsumer:
    """`tick` is its thread's; `acknowledge` and `stop` come from others."""

    def __init__(
        self,
        broker: RedisBroker,
        records: RequestRecords,
        info: WorkerInfo,
        gate: Gate,
        deliver: Callable[[MessageProxy], None],
        *,
        redis: Redis,
        blocking: Redis,
        num_live_workers: Callable[[], int],
        block_s: float = BLOCK_S,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """`redis` (short) and `blocking` are of the main database, the broker's client of Dramatiq's."""
        self.queues = keys.worker_queues(info.model, info.fingerprint)
        self._broker = broker
        self._client: Any = broker.client
        self._scripts = Scripts(broker.client)
        self._records = records
        self._info = info
        self._gate = gate
        self._deliver = deliver
        self._redis = redis
        self._blocking: Any = blocking
        self._num_live_workers = num_live_workers
        self._block_s = block_s
        self._monotonic = monotonic
        self._pause = pause
        self._wake_keys = [keys.worker_wake(info.worker), *map(keys.wake, self.queues)]
        head_starts = {keys.queue_new(info.model, priority): ms for priority, ms in HEAD_START_MS.items()}
        self._fetch_arguments: list[str | int] = [
            broker.broker_id,
            keys.MESSAGE_HEARTBEATS,
            BOOKS_TTL_MS,
            place_of(redis, broker),
        ]
        self._places: list[tuple[str, tuple[str | int, ...]]] = [
            (
                queue,
                (
                    keys.message_list(queue),
                    keys.messages(queue),
                    self._acks(queue),
                    keys.wake(queue),
                    head_starts.get(queue, ""),
                ),
            )
            for queue in self.queues
        ]
        """What the script that fetches has to know about each queue."""
        self._done: deque[tuple[str, str]] = deque()
        """Queues and ids of messages that Dramatiq has to be told are done."""
        self._outstanding: set[str] = set()
        """Ids of all messages that are here, by Dramatiq's books."""
        self._is_idle = False
        self._is_doubtful = False
        self._no_yield_until_s = 0.0
        self._housekeeping_s = monotonic() + HOUSEKEEPING_S
        self._stopping = threading.Event()
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="consumer", daemon=True)

    def tick(self) -> bool:
        """One turn: wait for room, wait for work, take one message. True when one was delivered.

        Never raises for a message or for Redis: it says what it dropped, or that it waits for Redis.
        """
        if not self._gate.wait_open(self._block_s):
            self._guarded(self._keep_house)
            return False
        return self._guarded(self._take_one)

    def acknowledge(self, message: MessageProxy) -> None:
        """A message is done. Dramatiq is told with the next fetch, at the latest with that of an idle consumer.

        PERF: a call of its own costs Redis 0.1 ms a request, and the worker 0.4.
        """
        self._done.append((message.queue_name, message.options["redis_message_id"]))
        self._gate.give_back()

    post_process_message = acknowledge
    """The name by which Dramatiq's actor threads call it."""

    def start(self) -> None:
        self._thread.start()

    def stop_fetching(self) -> None:
        """Take no message from now on; returns at once."""
        self._gate.close()
        try:
            self._redis.lpush(self._wake_keys[0], b"stop")
            self._redis.pexpire(self._wake_keys[0], keys.WAKE_TTL_MS)
        except RedisError as error:
            log.debug("the consumer will notice by itself that it has to stop: %s", error)

    def stop(self, timeout_s: float) -> None:
        """End the thread, after `stop_fetching`, and leave Dramatiq's books clean if Redis lets us."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        try:
            self._acknowledge_all()
            self._give_back_unseen()
            self._client.zrem(keys.MESSAGE_HEARTBEATS, self._broker.broker_id)
        except RedisError as error:
            log.warning("left without telling Dramatiq: %s", error)

    def _run(self) -> None:
        while not self._stopping.is_set() and not self._gate.is_closed:
            self.tick()

    def _guarded(self, call: Callable[[], bool]) -> bool:
        try:
            delivered = call()
        except RedisError as error:
            self._num_failures += 1
            self._is_doubtful = True
            if self._num_failures == 1:
                log.warning("the consumer waits for Redis: %s", error)
            self._pause(RETRY_PAUSE_S)
            return False
        except Exception:
            log.exception("the consumer failed and goes on")
            self._pause(RETRY_PAUSE_S)
            return False
        if self._num_failures:
            log.info("the consumer goes on after %d failures", self._num_failures)
            self._num_failures = 0
        return delivered

    def _take_one(self) -> bool:
        woken = self._wait_for_work() if self._is_idle else None
        if not self._gate.is_open_nowait:
            if woken is not None:
                wake(self._redis, woken)  # the message it stands for is somebody else's to take
            return False
        if self._is_doubtful or self._monotonic() >= self._housekeeping_s:
            self._keep_house()
        self._let_peers_go_first(woken)
        return self._fetch()

    def _wait_for_work(self) -> str | None:
        """Wait for a wake token; returns the queue it came with. Without one we look anyway: tokens may get lost."""
        reply = self._blocking.blpop(self._wake_keys, timeout=self._block_s)
        position = -1 if reply is None else self._wake_keys.index(reply[0].decode()) - 1
        return None if position < 0 else self.queues[position]

    def _let_peers_go_first(self, woken: str | None) -> None:
        """Wait while another live worker with a free slot holds less than this one: a burst spreads evenly."""
        if not self._gate.num_taken or self._num_live_workers() < 2 or self._monotonic() < self._no_yield_until_s:
            return
        info = self._info
        for step in range(MAX_YIELD_STEPS):
            if not self._is_work_waiting():
                return
            least = self._records.least_held_by_peers(info.worker, info.model)
            if least is None or self._gate.num_taken <= least:
                return
            if step == 0 and woken is not None:
                wake(self._redis, woken)  # we took the token that may have been a peer's
            self._pause(YIELD_STEP_S)
        self._no_yield_until_s = self._monotonic() + YIELD_HOLIDAY_S

    def _is_work_waiting(self) -> bool:
        with self._client.pipeline(transaction=False) as pipe:
            for queue in self.queues:
                pipe.llen(keys.message_list(queue))
            return any(pipe.execute())

    def _fetch(self) -> bool:
        reply = self._fetch_and_acknowledge()
        # PERF: the last message says that it is the last: one useless fetch less for every request of a quiet cell.
        self._is_idle = reply is None or not reply[3]
        if reply is None:
            return False
        queue, message_id = self.queues[int(reply[0])], reply[1].decode()
        try:
            message = AssignmentMessage.decode(reply[2])
        except DecodeError as error:
            log.error("dropped an unreadable message from %s: %r (%s)", queue, reply[2][:200], error)
            self._done.append((queue, message_id))
            return False
        self._outstanding.add(message_id)
        self._gate.take()
        self._deliver(
            MessageProxy(message.copy(queue_name=queue, options={**message.options, "redis_message_id": message_id}))
        )
        return True

    def _fetch_and_acknowledge(self) -> Any:
        """What the script replies."""
        done = [self._done.popleft() for _ in range(len(self._done))]
        arguments = [*self._fetch_arguments]
        for queue, place in self._places:
            arguments += (*place, " ".join(message_id for its_queue, message_id in done if its_queue == queue))
        try:
            reply = self._scripts.call("fetch", None, *arguments)
        except RedisError:
            self._done += done
            raise
        self._outstanding.difference_update(message_id for _, message_id in done)
        return reply

    def _keep_house(self) -> bool:
        """Give back what Dramatiq believes to be here and is not, stay in its books, and clear those of the dead."""
        self._acknowledge_all()
        self._give_back_unseen()
        alive, now_ms = keys.MESSAGE_HEARTBEATS, int(time.time() * 1000)
        self._client.zadd(alive, {self._broker.broker_id: now_ms})
        for broker_id in self._client.zrangebyscore(alive, "-inf", now_ms - DEAD_AFTER_MS):
            self._bury(broker_id.decode())
        self._is_doubtful = False
        self._housekeeping_s = self._monotonic() + HOUSEKEEPING_S
        return False

    def _acknowledge_all(self) -> None:
        """What no fetch has told: there was no room for one."""
        while self._done:
            queue, message_id = self._done[0]
            self._broker.do_ack(queue, message_id)
            self._outstanding.discard(message_id)
            self._done.popleft()

    def _give_back_unseen(self) -> None:
        """The reply to a fetch may get lost: that message was taken for us, and nobody would ever look at it."""
        for queue in self.queues:
            taken = {raw.decode() for raw in self._client.smembers(self._acks(queue))}
            unseen: Sequence[str] = sorted(taken - self._outstanding)
            if unseen:
                log.warning("giving back %d messages of %s whose delivery got lost", len(unseen), queue)
                self._broker.do_requeue(queue, *unseen)
                wake(self._redis, queue)

    def _bury(self, broker_id: str) -> None:
        """Drop the messages that a dead worker had: what becomes of their requests is for the watchdog to say."""
        for queue in self.queues:
            acks = keys.message_acks(broker_id, queue)
            if taken := self._client.smembers(acks):
                log.info("dropping %d messages of %s that a dead worker had taken", len(taken), queue)
                self._client.hdel(keys.messages(queue), *taken)
                self._client.delete(acks)
        self._client.zrem(keys.MESSAGE_HEARTBEATS, broker_id)

    def _acks(self, queue: str) -> str:
        return keys.message_acks(self._broker.broker_id, queue)
