"""The answers that are under way in this web process, and how generations are ended from here.

Owns the set of open answers (for the drain) and the requests that still have to be closed in Redis. Refuses to know
what an answer looks like. Closing is a Redis call, so it runs in a worker thread, and is tried again until Redis has
taken it: a generation that nobody reads must not run on.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor, wait
from typing import Protocol

from redis.exceptions import RedisError

from app.errors import ShuttingDown, shutting_down
from bridge.subscription import Subscription
from tasks.contract import EndState

logger = logging.getLogger(__name__)


class Closes(Protocol):
    """`tasks.record.RequestRecords`, as far as it is used here."""

    def close(self, request_id: str, state: EndState, reason: str) -> bool: ...


class Closer:
    """Ends generations without blocking the event loop."""

    def __init__(self, records: Closes, pool: Executor) -> None:
        self._records = records
        self._pool = pool
        self._pending: dict[str, tuple[EndState, str]] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def close_soon(self, request_id: str, state: EndState, reason: str) -> None:
        self._pending[request_id] = (state, reason)
        self._pool.submit(self._close, request_id)

    def retry(self) -> None:
        """Tries again what Redis did not take. To be called every second or so."""
        for request_id in list(self._pending):
            self._pool.submit(self._close, request_id)

    def shut_down(self, timeout_s: float) -> None:
        """Waits for what is being closed, at most `timeout_s`. Blocking."""
        wait([self._pool.submit(self._close, request_id) for request_id in list(self._pending)], timeout_s)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _close(self, request_id: str) -> None:
        if (end := self._pending.get(request_id)) is None:
            return
        state, reason = end
        try:
            self._records.close(request_id, state, reason)
        except RedisError as error:
            logger.warning("%s not closed yet (%s, %s): %s", request_id, state, reason, error)
            return
        self._pending.pop(request_id, None)


class OpenAnswers:
    """What has been accepted and is not over."""

    def __init__(self) -> None:
        self.is_draining = False
        self._subscriptions: set[Subscription] = set()
        self._emptied: asyncio.Event | None = None

    def __len__(self) -> int:
        return len(self._subscriptions)

    def check_accepting(self) -> None:
        """Raises ApiError once the drain has begun."""
        if self.is_draining:
            raise shutting_down()

    def add(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)

    def discard(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        if self._emptied is not None and not self._subscriptions:
            self._emptied.set()

    async def drain(self, budget_s: float) -> None:
        """Accepts nothing more; lets open answers finish within the budget, then ends them with an error event."""
        self.is_draining = True
        if not self._subscriptions:
            return
        self._emptied = asyncio.Event()
        try:
            await asyncio.wait_for(self._emptied.wait(), budget_s)
        except TimeoutError:
            logger.info("%d answers did not finish within %g s", len(self._subscriptions), budget_s)
            for subscription in list(self._subscriptions):
                subscription.fail(ShuttingDown())
