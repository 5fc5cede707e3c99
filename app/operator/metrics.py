"""`GET /metrics`: the numbers of the whole cell, in Prometheus' words, from any web process.

Owns how samples become an exposition. What this process measures is taken as it is now, that of all others as they
wrote it last (`tasks.observe.board`), and what waits and runs is looked up. Refuses to know who measures what.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import accumulate

from falcon.asgi import Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from tasks.observe.board import MetricsBoard, ProcessNumbers
from tasks.observe.metrics import (
    KV_USAGE,
    METRICS,
    QUEUE_AGE,
    QUEUE_WAITING,
    REDIS_UP,
    RUNNING,
    WAITING,
    Meter,
    Metric,
    Sample,
)
from tasks.protocol.record import RequestRecords

log = logging.getLogger(__name__)

QUEUE = "queue"
"""The `process` of what no process has yet."""

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics:
    def __init__(self, meter: Meter, board: MetricsBoard | None, workers: RequestRecords, pool: Executor) -> None:
        """Without a board this process shows itself only."""
        self._meter = meter
        self._board = board
        self._workers = workers
        self._pool = pool

    async def on_get(self, req: Request, resp: Response) -> None:
        encode, content_type = choose_encoder(req.get_header("accept") or "")
        processes = await asyncio.get_running_loop().run_in_executor(self._pool, self.numbers)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Shown(processes))
        resp.content_type = content_type
        resp.data = encode(registry)

    on_head = on_get

    def numbers(self) -> list[ProcessNumbers]:
        """Of all processes. Blocking. Without Redis, of this one."""
        process, is_up = self._meter.process, 1
        others: list[ProcessNumbers] = []
        try:
            others = [one for one in (self._board.read() if self._board else ()) if one.process != process]
            others += self._at_work()
        except RedisError as error:
            log.warning("the metrics of other processes cannot be read: %s", error)
            others, is_up = [], 0
        own = [*self._meter.samples(), Sample(REDIS_UP, (), is_up)]
        return [ProcessNumbers(process, own), *others]

    def _at_work(self) -> Iterator[ProcessNumbers]:
        """What runs and waits now."""
        for info, load in self._workers.workers():
            label = (info.model,)
            used = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
            yield ProcessNumbers(
                info.worker,
                [
                    Sample(RUNNING, label, load.num_running),
                    Sample(WAITING, label, load.num_waiting),
                    Sample(KV_USAGE, label, used),
                ],
            )
        queues = self._board.queue(self._workers.models()) if self._board else []
        waiting: dict[str, int] = {}
        for queue in queues:
            waiting[queue.model] = waiting.get(queue.model, 0) + queue.num_waiting
        samples = [Sample(WAITING, (model,), number) for model, number in waiting.items()]
        samples += [Sample(QUEUE_WAITING, (one.model, one.priority), one.num_waiting) for one in queues]
        samples += [Sample(QUEUE_AGE, (one.model, one.priority), one.age_s) for one in queues]
        yield ProcessNumbers(QUEUE, samples)


class _Shown(Collector):
    def __init__(self, processes: Sequence[ProcessNumbers]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Family]:
        families = {metric: _family(metric) for metric in METRICS}
        for one in self._processes:
            for sample in one.samples:
                _add(families[sample.metric], one.process, sample)
        return [family for family in families.values() if family.samples]


def _family(metric: Metric) -> Family:
    labels = (*metric.labels, "process")
    match metric.kind:
        case "counter":
            return CounterMetricFamily(metric.name, metric.meaning, labels=labels)
        case "gauge":
            return GaugeMetricFamily(metric.name, metric.meaning, labels=labels)
        case "histogram":
            return HistogramMetricFamily(metric.name, metric.meaning, labels=labels)


def _add(family: Family, process: str, sample: Sample) -> None:
    labels = (*sample.labels, process)
    if isinstance(family, HistogramMetricFamily):
        bounds = [*map(str, sample.metric.buckets), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(sample.buckets), strict=True)), sample.value)
    else:
        family.add_metric(labels, sample.value)
