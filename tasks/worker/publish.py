"""Publishing: the tokens of each engine step go to Redis in one script, while the next step runs.

Owns what has been computed and not yet appended, and the sending again while Redis is away (the same call: one that
is sent again adds nothing). Refuses to know about the engine, which is told by `settle` what became of each append,
and what goes where (`tasks.worker.step_log`). A bounded number of steps may be unpublished; then `publish` blocks,
and with it the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from redis.exceptions import BusyLoadingError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from tasks.protocol.record import Append, AppendResult, Published, RequestRecords
from tasks.worker.step_log import Key, Plan, StepLog

log = logging.getLogger(__name__)

MAX_UNPUBLISHED_STEPS = 1
"""A step is published while the next one runs, and settled before the one after it: so a cancelled request costs
two steps at most, however slow Redis is."""
FIRST_PAUSE_S = 0.02
MAX_PAUSE_S = 0.5

_PASSING = (BusyLoadingError, OutOfMemoryError, ReadOnlyError)


@dataclass(frozen=True, slots=True)
class Unpublishable:
    """Redis takes everything but this append. A bug; the request has to be released."""

    message: str


Settle = Callable[[Append, "AppendResult | Unpublishable"], None]


class Publisher:
    def __init__(
        self,
        records: RequestRecords,
        settle: Settle,
        *,
        worker: str,
        max_unpublished_steps: int = MAX_UNPUBLISHED_STEPS,
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """`settle` is called once for each append, on the publisher's thread."""
        self._records = records
        self._settle = settle
        self._log = StepLog(worker)
        self._over: deque[Key] = deque()
        self._max_unpublished_steps = max_unpublished_steps
        self._changed = threading.Condition()
        self._pending: dict[tuple[str, int], Append] = {}
        self._num_pending_steps = 0
        self._num_unpublished_steps = 0
        self._is_hurried = False
        self._stopping = threading.Event()
        self._pause = pause or self._stopping.wait
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)

    def publish(self, appends: Sequence[Append]) -> None:
        """Take the appends of one step. Blocks while too many steps are unpublished. For the engine's thread."""
        if not appends:
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_hurried or self._num_unpublished_steps < self._max_unpublished_steps
            )
            for item in appends:
                key = (item.request_id, item.attempt)
                waiting = self._pending.get(key)
                self._pending[key] = item if waiting is None else _joined(waiting, item)
            self._num_pending_steps += 1
            self._num_unpublished_steps += 1
            self._changed.notify_all()

    def forget(self, request_id: str, attempt: int) -> None:
        """Nothing more will be published of this assignment. From any thread."""
        self._over.append((request_id, attempt))

    def wait_published(self, timeout_s: float) -> bool:
        """Wait until everything taken so far is settled. False when the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_unpublished_steps == 0, timeout_s)

    def hurry(self) -> None:
        """Let `publish` never block again: the worker is about to stop."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def tick(self) -> bool:
        """Send what is pending, again and again until Redis has taken it. False when nothing was."""
        with self._changed:
            batch, self._pending = list(self._pending.values()), {}
            num_steps, self._num_pending_steps = self._num_pending_steps, 0
        if not batch:
            return False
        while self._over:
            self._log.forget(self._over.popleft())
        try:
            self._publish(self._log.plan(batch))
        finally:
            with self._changed:
                self._num_unpublished_steps -= num_steps
                self._changed.notify_all()
        return True

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Send what is pending once more and end the thread; what Redis does not take is computed again elsewhere."""
        self._stopping.set()
        self.hurry()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            if not self.tick():
                if self._stopping.is_set():
                    return
                with self._changed:
                    self._changed.wait_for(lambda: self._pending or self._stopping.is_set())

    def _publish(self, plan: Plan) -> None:
        published = self._send(plan)
        if published is None:
            return
        for item, result in self._log.take(plan, published):
            self._settle(item, result)
        if plan.logged and not published.is_undisturbed:
            self._publish(self._log.plan_unlogged(plan))

    def _send(self, plan: Plan) -> Published | None:
        """None when everything is settled already, and when the worker stops before Redis is back."""
        pause_s = FIRST_PAUSE_S
        num_failures = 0
        while True:
            try:
                published = self._records.publish(plan.appends, plan.step)
            except RedisError as error:
                if isinstance(error, ResponseError) and not isinstance(error, _PASSING):
                    log.error("append refused by Redis, sending one by one: %s", error)
                    for item in plan.batch:
                        self._settle(item, self._send_alone(item))
                    return None
                num_failures += 1
                if num_failures == 1:
                    log.warning("publishing waits for Redis, num_appends=%d: %s", len(plan.batch), error)
            else:
                if num_failures:
                    log.info("publishing goes on after %d failures", num_failures)
                return published
            if self._stopping.is_set():
                return None
            self._pause(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _send_alone(self, item: Append) -> AppendResult | Unpublishable:
        whole = self._log.unlogged(item)
        self._log.forget((item.request_id, item.attempt))
        try:
            return self._records.append_many([whole])[0]
        except RedisError as error:
            log.error("%s attempt=%d: cannot be published: %s", item.request_id, item.attempt, error)
            return Unpublishable(str(error))


def _joined(earlier: Append, later: Append) -> Append:
    return replace(
        later,
        first_index=earlier.first_index,
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
    )
