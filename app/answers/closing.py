"""How generations are read, left and ended from this web process.

Owns what still has to be told to Redis. Telling is a Redis call, so it runs in a worker thread, and is tried again
until Redis has taken it: a generation that nobody reads must not run on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Executor, wait

from redis.exceptions import RedisError

from tasks.observe.metrics import Meter, count_end
from tasks.protocol.contract import EndState
from tasks.protocol.record import RequestRecords

log = logging.getLogger(__name__)


class Closer:
    """Ends and leaves generations without blocking the event loop.

    Redis knows web processes as readers, not clients: a generation is left when its last client here has gone.
    """

    def __init__(self, records: RequestRecords, reader_id: str, pool: Executor, meter: Meter) -> None:
        self._records = records
        self._reader_id = reader_id
        self._pool = pool
        self._meter = meter
        self._closing: dict[str, tuple[EndState, str, str]] = {}
        """How, and of which model."""
        self._leaving: dict[str, str] = {}
        """Of which model."""
        self._unsure: set[str] = set()
        """What was submitted without an answer, and may arrive later."""
        self._num_clients = Counter[str]()

    @property
    def num_pending(self) -> int:
        return len(self._closing) + len(self._leaving)

    @property
    def num_reading(self) -> int:
        """Generations that clients of this process read."""
        return len(self._num_clients)

    def give_up_soon(self, request_ids: Sequence[str], model: str, *, may_be_asked_again: bool) -> None:
        """Nobody knows whether these are on offer, or will be. What is waits a while for whom asks again."""
        self._unsure.update(request_ids)
        if may_be_asked_again:
            self.leave_soon(request_ids, model)
            return
        for request_id in request_ids:
            self.close_soon(request_id, "cancelled", "not_accepted", model)

    def close_soon(self, request_id: str, state: EndState, reason: str, model: str = "") -> None:
        self._closing[request_id] = (state, reason, model)
        self._pool.submit(self._close, request_id)

    def leave_soon(self, request_ids: Sequence[str], model: str = "") -> None:
        self._leaving.update(dict.fromkeys(request_ids, model))
        self._pool.submit(self._leave, request_ids)

    def begin_reading(self, request_ids: Sequence[str]) -> None:
        """A client of this process reads these from now on, until `end_reading`."""
        self._num_clients.update(request_ids)

    def end_reading(self, request_ids: Sequence[str]) -> None:
        self._num_clients.subtract(request_ids)
        for request_id in request_ids:
            if self._num_clients[request_id] <= 0:
                del self._num_clients[request_id]

    def attach(self, request_ids: Sequence[str]) -> None:
        """Makes this process a reader; call after `begin_reading`. Blocking. Raises RedisError."""
        self._records.attach(request_ids, self._reader_id)

    def retry(self) -> None:
        """Tries again what Redis did not take. To be called every second or so."""
        for request_id in list(self._closing):
            self._pool.submit(self._close, request_id)
        if self._leaving:
            self._pool.submit(self._leave, list(self._leaving))

    def shut_down(self, timeout_s: float) -> None:
        """Waits for what is being told, at most `timeout_s`. Blocking."""
        calls = [self._pool.submit(self._close, request_id) for request_id in list(self._closing)]
        calls += [self._pool.submit(self._leave, list(self._leaving))]
        wait(calls, timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _close(self, request_id: str) -> None:
        if (end := self._closing.get(request_id)) is None:
            return
        state, reason, model = end
        try:
            self._forestall([request_id])
            has_ended = self._records.close(request_id, state, reason)
        except RedisError as error:
            log.warning("%s not closed yet (%s, %s): %s", request_id, state, reason, error)
            return
        self._closing.pop(request_id, None)
        if has_ended:
            count_end(self._meter, model, state, reason)

    def _leave(self, request_ids: Sequence[str]) -> None:
        left = [request_id for request_id in request_ids if request_id in self._leaving]
        if not left:
            return
        try:
            self._forestall(left)
            if unread := [request_id for request_id in left if request_id not in self._num_clients]:
                for request_id in self._records.detach(unread, self._reader_id):
                    count_end(self._meter, self._leaving.get(request_id, ""), "cancelled", "disconnect")
                # A client may have come in the meantime; if not before the end, it is told of the end.
                if read := [request_id for request_id in unread if request_id in self._num_clients]:
                    self._records.attach(read, self._reader_id)
        except RedisError as error:
            log.warning("%s not left yet: %s", left[0], error)
            return
        for request_id in left:
            self._leaving.pop(request_id, None)

    def _forestall(self, request_ids: Sequence[str]) -> None:
        if unsure := [request_id for request_id in request_ids if request_id in self._unsure]:
            self._records.forestall(unsure)
            self._unsure.difference_update(unsure)


class ClientPart:
    """One client's part in the choices of one answer (`bridge.streams.relay.Control`)."""

    def __init__(self, closer: Closer, choice_ids: Sequence[str], model: str, *, is_reader: bool = True) -> None:
        """Not `is_reader`: somebody who only looks for the end, and leaves the answer to itself."""
        self._closer = closer
        self._choice_ids = choice_ids
        self._model = model
        self._is_reader = is_reader
        self._is_over = not is_reader
        if is_reader:
            closer.begin_reading(choice_ids)

    def close(self, choice: int, state: EndState, reason: str) -> None:
        self._closer.close_soon(self._choice_ids[choice], state, reason, self._model)

    def leave(self, choices: Sequence[int]) -> None:
        self.end()
        if self._is_reader:
            self._closer.leave_soon([self._choice_ids[choice] for choice in choices], self._model)

    def end(self) -> None:
        """This client reads no more. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._closer.end_reading(self._choice_ids)
