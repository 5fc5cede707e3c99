"""What the bridge counts: on a cell where a worker and a web process are lost, and while Redis or the catalog is."""

from __future__ import annotations

from redis.exceptions import ConnectionError

from bridge.catalog.catalog import CatalogError
from bridge.duties import RecordDuty, WatchDuty
from bridge.watch.metrics import BridgeMetrics
from tasks.observe.metrics import (
    ENDED,
    READERS_GONE,
    RECONNECTS,
    REOFFERS,
    REQUEST_SUCCESS,
    WORKERS_GONE,
    Meter,
    Metric,
)
from tasks.protocol.record import READER_LEASE_MS
from tests.bridge.cell import LEASE_MS, MODEL, Cell

T0 = 1_000_000
DEAD = T0 + LEASE_MS + 100


def value(meter: Meter, metric: Metric, *labels: str) -> float:
    return {(one.metric, one.labels): one.value for one in meter.samples()}[metric, labels]


def test_a_lost_worker_and_what_it_held_are_counted_once(cell: Cell) -> None:
    meter = Meter("b1")
    metrics = BridgeMetrics(meter, cell.redis)
    cell.join("w1", T0)
    cell.watchdog.tick(T0)
    for name in ("r1", "r2"):
        cell.offer(name, T0)
        cell.claim(name, "w1", T0)
    for _ in range(2):
        metrics.count(cell.watchdog.tick(DEAD))
    assert value(meter, WORKERS_GONE) == 1
    assert value(meter, REOFFERS) == 2


def test_requests_that_end_with_their_web_process_are_cancelled_by_the_bridge(cell: Cell) -> None:
    meter = Meter("b1")
    metrics = BridgeMetrics(meter, cell.redis)
    cell.join("w1", T0)
    cell.watchdog.tick(T0)
    cell.offer("r1", T0, reader="web1")
    metrics.count(cell.watchdog.tick(T0 + READER_LEASE_MS + 100))
    assert value(meter, READERS_GONE) == 1
    assert value(meter, ENDED, MODEL, "cancelled", "disconnect") == 1
    assert value(meter, REQUEST_SUCCESS, MODEL, "abort") == 1


def test_a_request_that_no_worker_took_in_time_has_failed(cell: Cell) -> None:
    meter = Meter("b1")
    metrics = BridgeMetrics(meter, cell.redis)
    cell.join("w1", T0)
    cell.watchdog.tick(T0)
    cell.offer("r1", T0)
    late = T0 + 120_000
    cell.join("w1", late)
    metrics.count(cell.watchdog.tick(late))
    [ended] = [one for one in meter.samples() if one.metric is ENDED]
    assert (ended.labels[:2], ended.value) == ((MODEL, "failed"), 1)


def test_a_redis_that_comes_back_is_a_reconnect(cell: Cell) -> None:
    class Election:
        is_active = False
        error: Exception | None = None

        def tick(self) -> None:
            if self.error:
                raise self.error

    election, meter = Election(), Meter("b1")
    duty = WatchDuty(election, cell.watchdog, lambda: 0.0, BridgeMetrics(meter, cell.redis))  # type: ignore[arg-type]
    duty.tick()
    assert value(meter, RECONNECTS) == 0
    election.error = ConnectionError("refused")
    duty.tick()
    election.error = None
    duty.tick()
    duty.tick()
    assert value(meter, RECONNECTS) == 1


class Recorder:
    """Records as a test says: a full batch, one that was the last, or a failure."""

    def __init__(self) -> None:
        self.answers: list[bool | Exception] = []

    def tick(self) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_the_recorder_lags_from_when_it_last_had_everything() -> None:
    now_ms, recorder, is_active = [0.0], Recorder(), [True]

    class Catalog:
        def close(self) -> None:
            pass

    duty = RecordDuty(
        is_active=lambda: is_active[0],
        open_catalog=Catalog,  # type: ignore[arg-type]
        recorder_of=lambda catalog: recorder,  # type: ignore[arg-type, return-value]
        monotonic_ms=lambda: now_ms[0],
    )
    lags = []
    for recorder.answers in ([True], [CatalogError("broken")], [True], [False], [True]):
        duty.tick()
        now_ms[0] += 1000
        lags.append(duty.lag_s())
    assert lags == [1.0, 2.0, 3.0, 0.0, 1.0]
    is_active[0] = False
    duty.tick()
    assert duty.lag_s() == 0.0
