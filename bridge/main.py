"""The bridge process: watchdog and recorder. One is active, further ones stand by.

Composition root: reads its settings, builds the clients, and ends cleanly within 2 s of SIGTERM. `start_bridge` is
the same without the process, over injected clients, for the one-process composition.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from uuid import uuid4

from redis import Redis

from bridge.catalog.catalog import Catalog
from bridge.catalog.recorder import MAX_MB, Recorder
from bridge.duties import Loop, RecordDuty, WatchDuty
from bridge.watch.election import Election
from bridge.watch.metrics import BridgeMetrics
from bridge.watch.watchdog import Watchdog
from tasks.observe.board import MetricsBoard, MetricsWriter
from tasks.observe.metrics import RECORDER_LAG, Meter
from tasks.process.clients import connect
from tasks.process.settings import BridgeSettings
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter


class Bridge:
    """A running bridge."""

    def __init__(self, record: RecordDuty, watch: WatchDuty, metrics: MetricsWriter) -> None:
        self._record = record
        self._metrics = metrics
        metrics.start()
        self._watch_loop = Loop("bridge-watch", watch)
        self._record_loop = Loop("bridge-record", record)

    def stop(self) -> None:
        """Records what is there, closes the catalog, lets a standby take over; in 1.8 s at most."""
        # The catalog is closed before the lease is let go, so that a standby finds the file free.
        if not self._record_loop.stop(1.0):
            self._record.interrupt()
            self._record_loop.stop(0.4)
        self._watch_loop.stop(0.4)
        self._metrics.stop(0.2)


def start_bridge(
    redis: Redis,
    queue: Redis,
    records: RequestRecords,
    submitter: Submitter,
    *,
    data_dir: Path,
    keep_days: int = 30,
    max_mb: int = MAX_MB,
) -> Bridge:
    """Starts watching and recording in two threads. The clients are short ones, of the main and Dramatiq's database.

    Needs neither Redis nor the catalog to be there yet: it keeps trying and says so.
    """
    bridge_id = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
    election = Election(redis, bridge_id, monotonic_ms=_monotonic_ms)
    watchdog = Watchdog(
        redis, records, submitter, is_queue_empty=lambda name: queue.llen(keys.message_list(name)) == 0
    )
    record = RecordDuty(
        is_active=lambda: election.is_active,
        open_catalog=lambda: Catalog(data_dir / "catalog"),
        recorder_of=lambda catalog: Recorder(
            redis, catalog, keep_days=keep_days, max_mb=max_mb, keep_facts=keys.KEPT_EVENTS, clock_ms=_epoch_ms
        ),
        monotonic_ms=_monotonic_ms,
    )
    meter = Meter(bridge_id)
    meter.ask(RECORDER_LAG, value=record.lag_s)
    watch = WatchDuty(election, watchdog, _monotonic_ms, BridgeMetrics(meter, redis))
    return Bridge(record, watch, MetricsWriter(MetricsBoard(redis), meter))


def run(settings: BridgeSettings) -> None:
    """The whole life of the process: returns after SIGTERM or SIGINT."""
    ends = {signal.SIGTERM, signal.SIGINT}
    # Blocked before any thread starts, and waited for: no handler ever runs in the middle of something.
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    redis = connect(settings.redis_url, use="short")
    queue = connect(settings.redis_url, use="queue")
    records = RequestRecords(
        redis,
        stream_ttl_s=settings.stream_ttl_s,
        first_token_deadline_ms=settings.first_token_deadline_s * 1000,
    )
    submitter = Submitter(records, build_broker(queue), redis)
    bridge = start_bridge(
        redis,
        queue,
        records,
        submitter,
        data_dir=settings.data_dir,
        keep_days=settings.catalog_days,
        max_mb=settings.catalog_max_mb,
    )
    signal.sigwait(ends)
    bridge.stop()


def _monotonic_ms() -> float:
    return time.monotonic() * 1000


def _epoch_ms() -> int:
    return time.time_ns() // 1_000_000
