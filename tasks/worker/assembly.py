"""One running worker: engine loop, publisher, actor threads, consumer and heartbeat, put together over given clients.

Owns the order in which they start and stop. Refuses to read settings, open sockets or handle signals: the worker
process (`tasks.worker`) and the one-process composition do that.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from redis import Redis

from decode.engine.engine import Engine
from tasks.observe.board import MetricsBoard, MetricsWriter
from tasks.observe.metrics import Meter
from tasks.process.supervisor import new_name
from tasks.process.tracing import OFF, Tracer
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import WorkerInfo
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter
from tasks.worker.actor import Generate, make_generate
from tasks.worker.consumer import AssignmentConsumer
from tasks.worker.engine_loop import EngineLoop
from tasks.worker.gate import MAX_UNSEEN, Gate
from tasks.worker.heartbeat import Heartbeat
from tasks.worker.metrics import WorkerMetrics
from tasks.worker.publish import Publisher
from tasks.worker.slots import SlotWorker

log = logging.getLogger(__name__)

DRAIN_BUDGET_S = 1.0


class RunningWorker:
    """A worker at work. `stop` is all there is to do with it."""

    def __init__(
        self,
        info: WorkerInfo,
        gate: Gate,
        loop: EngineLoop,
        publisher: Publisher,
        slots: SlotWorker,
        heartbeat: Heartbeat,
        stopping: threading.Event,
        metrics: MetricsWriter,
        tracer: Tracer,
    ) -> None:
        self.info = info
        self.gate = gate
        self.loop = loop
        self._publisher = publisher
        self._slots = slots
        self._heartbeat = heartbeat
        self._stopping = stopping
        self._metrics = metrics
        self._tracer = tracer

    def stop(self, budget_s: float = DRAIN_BUDGET_S) -> None:
        """Drain: fetch nothing more, let finish what does within `budget_s`, release the rest, and leave.

        Takes at most 3 s over the budget when Redis does not answer, and hardly longer than the budget when it does.
        """
        log.info("%s drains, num_taken=%d", self.info.worker, self.gate.num_taken)
        self._slots.consumer.stop_fetching()
        self.loop.wait_idle(budget_s)
        self.loop.release_all()
        if not self.loop.wait_idle(1.0):
            self._publisher.hurry()
        stopper = threading.Timer(0.8, self._stopping.set)  # what waits for Redis then gives up
        stopper.start()
        self._slots.stop(1_000)
        stopper.cancel()
        self._stopping.set()
        self.loop.stop(0.2)
        self._publisher.stop(0.2)
        self._heartbeat.stop(0.2)
        self._metrics.stop(0.2)
        self._tracer.flush()
        log.info("%s has left", self.info.worker)


def start_worker(
    engine: Engine,
    info: WorkerInfo,
    *,
    redis: Redis,
    blocking: Redis,
    queue: Redis,
    heartbeat_ms: int = 100,
    lease_ms: int = 500,
    stall_limit_s: float = 30.0,
    stream_ttl_s: int = 600,
    on_fatal: Callable[[str], None] = log.critical,
    tracer: Tracer = OFF,
) -> RunningWorker:
    """Start serving `engine`. Redis need not be there yet: the worker keeps trying and says so.

    `redis` and `queue` are short clients of the main and Dramatiq's database, `blocking` of the main one
    (`tasks.process.clients.connect`). `on_fatal` is told when the engine hangs or its books are wrong: the process
    must end.
    """
    gate, stopping = Gate(), threading.Event()
    records = RequestRecords(redis, stream_ttl_s=stream_ttl_s)
    broker = build_broker(queue)
    meter = Meter(info.worker)
    metrics = WorkerMetrics(meter, info.model, tracer=tracer)
    loop = EngineLoop(engine, gate, on_fatal=on_fatal, metrics=metrics)
    publisher = loop.publisher = Publisher(records, loop.settle, worker=info.worker)
    heartbeat = Heartbeat(
        records,
        info,
        load=loop.load,
        stalled_s=loop.stalled_s,
        clock_ms=_epoch_ms,
        on_fatal=on_fatal,
        on_reconnected=metrics.reconnected,
        heartbeat_ms=heartbeat_ms,
        lease_ms=lease_ms,
        stall_limit_s=stall_limit_s,
    )
    generate = Generate(
        records,
        Submitter(records, broker, redis),
        loop,
        info,
        not_handed_over=gate.seen,
        stopping=stopping,
        metrics=metrics,
    )
    make_generate(broker, generate)
    make_consumer = partial(
        AssignmentConsumer,
        broker,
        records,
        info,
        gate,
        redis=redis,
        blocking=blocking,
        num_live_workers=lambda: heartbeat.num_live_workers,
    )
    # Spare threads, so that a request that is only waiting to be published keeps nobody from starting.
    slots = SlotWorker(broker, engine.config.max_num_seqs + MAX_UNSEEN, make_consumer)
    heartbeat.tick()
    heartbeat.start()
    publisher.start()
    loop.start()
    slots.start()
    writer = MetricsWriter(MetricsBoard(redis), meter)
    writer.start()
    log.info("%s serves %s, fingerprint %s", info.worker, info.model, info.fingerprint)
    return RunningWorker(info, gate, loop, publisher, slots, heartbeat, stopping, writer, tracer)


def describe_worker(engine: Engine, *, model: str, device: str, worker: str | None = None) -> WorkerInfo:
    """What a worker around `engine` says about itself. `model` is the name that clients use."""
    config = engine.config
    return WorkerInfo(
        worker=worker or new_name(),
        pid=os.getpid(),
        host=socket.gethostname(),
        device=device,
        model=model,
        fingerprint=config.fingerprint,
        variant=config.variant,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        kv_cache_tokens=config.num_blocks * config.block_size,
        started_ms=_epoch_ms(),
        architecture=config.architecture,
    )


def _epoch_ms() -> int:
    return int(time.time() * 1000)
