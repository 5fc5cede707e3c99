"""What the active bridge process does again and again: watch and record, each in its own loop.

Owns when each is tried again after a failure, and what is said about it: Redis may be away at the start or at any
time, the catalog may be open elsewhere or broken; neither ends the process, and a broken catalog never keeps the
watchdog from its work. Refuses to know how either works inside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from redis.exceptions import RedisError

from bridge.catalog.catalog import Catalog, CatalogError, CatalogTooNew
from bridge.catalog.recorder import Recorder
from bridge.watch.election import Election
from bridge.watch.metrics import BridgeMetrics
from bridge.watch.watchdog import Watchdog

log = logging.getLogger(__name__)

RECORD_EVERY_S = 1.0
"""How long facts are gathered into a batch that is not full yet. PERF: a batch costs about 15 ms of CPU however small
it is, so five a second would cost 8 % of a processor for as long as anything happens; readers see a snapshot that is
2 s old anyway, and facts wait safely in Redis."""
STANDBY_S = 0.05
AGAIN_S = 1.0
USELESS_AGAIN_S = 30.0
PATIENCE_MS = 1_000
"""How long the watchdog holds still after Redis was away or slow: meanwhile nobody could renew a lease, and whoever
is alive does so as soon as Redis answers. Without it, every worker and web process would be taken for dead."""
HELD_UP_MS = 500
"""A watchdog that had no processor for the length of a lease was hardly alone in that: it holds still then too."""
SAY_AGAIN_MS = 10_000


class Trouble:
    """Says that something fails: at once, then every `SAY_AGAIN_MS` while it lasts, and when it is over."""

    def __init__(self, what: str, monotonic_ms: Callable[[], float]) -> None:
        self._what = what
        self._monotonic_ms = monotonic_ms
        self._since_ms: float | None = None
        self._say_at_ms = 0.0

    def failed(self, error: BaseException) -> None:
        now_ms = self._monotonic_ms()
        if self._since_ms is None:
            self._since_ms = self._say_at_ms = now_ms
        if now_ms >= self._say_at_ms:
            self._say_at_ms = now_ms + SAY_AGAIN_MS
            log.warning("%s fails, trying again: %s", self._what, error)

    def over(self) -> bool:
        """Whether it had failed until now."""
        if self._since_ms is None:
            return False
        log.info("%s works again after %.1f s", self._what, (self._monotonic_ms() - self._since_ms) / 1000)
        self._since_ms = None
        return True


class WatchDuty:
    """Keeps the lease of this bridge process, and watches while it has it."""

    def __init__(
        self,
        election: Election,
        watchdog: Watchdog,
        monotonic_ms: Callable[[], float],
        metrics: BridgeMetrics | None = None,
    ) -> None:
        self._election = election
        self._watchdog = watchdog
        self._metrics = metrics
        self._was_active: bool | None = None
        self._trouble = Trouble("bridge: Redis", monotonic_ms)
        self._monotonic_ms = monotonic_ms
        self._patient_until_ms = float("-inf")
        self._has_waited = False
        self._turned_ms = float("inf")
        """When the turn before this one was over."""

    def tick(self) -> float:
        """Returns how long to wait before the next tick, in seconds. Never raises for what may pass."""
        wait_s = STANDBY_S
        was_held_up = self._monotonic_ms() - self._turned_ms > HELD_UP_MS
        try:
            self._election.tick()
            is_active = self._election.is_active
            if is_active != self._was_active:
                log.info("bridge: %s", "active" if is_active else "standby")
                self._was_active = is_active
            if is_active and self._monotonic_ms() >= self._patient_until_ms:
                wait_s = self._watch(was_held_up)
        except RedisError as error:
            self._patient_until_ms = self._monotonic_ms() + PATIENCE_MS
            self._trouble.failed(error)
        else:
            if self._trouble.over() and self._metrics is not None:
                self._metrics.reconnected()
        self._turned_ms = self._monotonic_ms()
        return wait_s

    def _watch(self, was_held_up: bool) -> float:
        if was_held_up and not self._has_waited:
            log.warning("bridge: was held up, giving leases time to be renewed")
            self._has_waited = True
            self._patient_until_ms = self._monotonic_ms() + PATIENCE_MS
            return STANDBY_S
        # A Redis or a machine that is always slow must not make it hold still for ever: every other look counts.
        done = self._watchdog.tick(however_slow=self._has_waited)
        self._has_waited = done.was_slow
        if self._metrics is not None:
            self._metrics.count(done)
        if done.was_slow:
            self._patient_until_ms = self._monotonic_ms() + PATIENCE_MS
        return done.wait_ms / 1000

    def close(self) -> None:
        """Lets a standby take over at once."""
        try:
            self._election.leave()
        except RedisError:  # the lease runs out by itself
            pass


class RecordDuty:
    """Has the catalog open and records while this bridge process is the active one."""

    def __init__(
        self,
        is_active: Callable[[], bool],
        open_catalog: Callable[[], Catalog],
        recorder_of: Callable[[Catalog], Recorder],
        monotonic_ms: Callable[[], float],
    ) -> None:
        self._is_active = is_active
        self._open_catalog = open_catalog
        self._recorder_of = recorder_of
        self._catalog: Catalog | None = None
        self._recorder: Recorder | None = None
        self._monotonic_ms = monotonic_ms
        self._behind_since_ms: float | None = None
        self._trouble = Trouble("bridge: recording", monotonic_ms)

    def tick(self) -> float:
        """Returns how long to wait before the next tick, in seconds. Never raises for what may pass."""
        if not self._is_active():
            self._close_catalog()
            self._behind_since_ms = None
            return STANDBY_S
        if self._behind_since_ms is None:
            self._behind_since_ms = self._monotonic_ms()
        try:
            is_more = self._open_recorder().tick()
        except CatalogTooNew as error:
            log.error("bridge: nothing is recorded: %s", error)
            return USELESS_AGAIN_S
        except CatalogError as error:
            # DuckDB may have declared the open database invalid: only opening it again helps then.
            self._close_catalog()
            self._trouble.failed(error)
            return AGAIN_S
        except RedisError as error:
            self._trouble.failed(error)
            return AGAIN_S
        self._trouble.over()
        if is_more:
            return 0.0
        self._behind_since_ms = None
        return RECORD_EVERY_S

    def lag_s(self) -> float:
        """For how long not all has been recorded that was there; from any thread."""
        since_ms = self._behind_since_ms
        return 0.0 if since_ms is None else (self._monotonic_ms() - since_ms) / 1000

    def close(self) -> None:
        """Records what is there, leaves a fresh snapshot, and closes the catalog."""
        if self._is_active():
            try:
                self._open_recorder().finish()
            except (CatalogError, RedisError) as error:
                log.warning("bridge: the last facts wait in Redis for the next start: %s", error)
        self._close_catalog()

    def interrupt(self) -> None:
        """Cuts what the catalog is doing short; for another thread, when the process must end now."""
        if (catalog := self._catalog) is not None:
            catalog.interrupt()

    def _open_recorder(self) -> Recorder:
        if self._recorder is None:
            self._catalog = self._open_catalog()
            self._recorder = self._recorder_of(self._catalog)
        return self._recorder

    def _close_catalog(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = self._recorder = None


class Loop:
    """A thread that turns a duty's `tick` until it is stopped, then closes it."""

    def __init__(self, name: str, duty: WatchDuty | RecordDuty) -> None:
        self._duty = duty
        self._stopping = threading.Event()
        # A daemon: a thread that hangs in a dead connection must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                wait_s = self._duty.tick()
            except Exception:
                log.exception("%s: unexpected failure, going on", self._thread.name)
                wait_s = AGAIN_S
            self._stopping.wait(wait_s)
        self._duty.close()

    def stop(self, timeout_s: float) -> bool:
        """Asks it to end and waits for that. False when it has not ended in time."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
