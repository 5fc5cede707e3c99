"""The numbers of one process, the board where all put theirs, and what a worker counts."""

from __future__ import annotations

import pytest

from decode.engine.sampling import SamplingParams
from tasks.observe.board import FRESH_MS, KEEP_MS, MetricsBoard, MetricsWriter
from tasks.observe.metrics import (
    DECODE_TIME,
    ENDED,
    FENCED,
    GENERATION_TOKENS,
    HTTP_REQUESTS,
    ITL,
    METRICS,
    OPEN_STREAMS,
    PREFILL_TIME,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    REQUEST_SUCCESS,
    REREADS,
    Meter,
    Metric,
    unpack,
)
from tasks.protocol import keys
from tasks.protocol.contract import ContractError, GenerationJob
from tasks.protocol.moves import Append, Appended, Refused, Terminal
from tasks.worker.metrics import AttemptTimes, WorkerMetrics
from tests.conftest import RedisServer
from tests.tasks.cell import Cell

BOARD_KEY_TTL_SLACK_MS = 2_000


def value(meter: Meter, metric: Metric, *labels: str) -> float:
    return {(one.metric, one.labels): one.value for one in meter.samples()}[metric, labels]


def buckets(meter: Meter, metric: Metric, *labels: str) -> int:
    """How many values were observed."""
    return sum({(one.metric, one.labels): one.buckets for one in meter.samples()}[metric, labels])


def test_names_are_unique_and_of_the_form_that_dashboards_expect() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 25
    for metric in METRICS:
        assert metric.name.startswith(("vllm:", "tokenferry_"))
        assert not metric.name.endswith("_total")
        assert metric.meaning.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_numbers_survive_packing() -> None:
    meter = Meter("p1")
    meter.count(HTTP_REQUESTS, "GET", "/x", "200", by=3)
    meter.histogram(ITL, "m").observe(0.02, times=2)
    meter.ask(OPEN_STREAMS, value=lambda: 7)
    process, samples = unpack(meter.pack())
    assert process == "p1"
    assert samples == meter.samples()


def test_a_value_falls_into_the_first_bucket_that_is_not_below_it() -> None:
    meter = Meter()
    histogram = meter.histogram(ITL, "m")
    bounds = ITL.buckets
    for seconds in (0.0, bounds[0], bounds[0] * 1.01, bounds[-1] + 1):
        histogram.observe(seconds)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-1] == 1


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"v":99,"process":"p","numbers":[]}', b'{"v":1,"process":"p"}', b"[]"]
)
def test_damaged_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ContractError):
        unpack(data)


def test_a_metric_of_a_newer_process_is_left_out() -> None:
    data = b'{"v":1,"process":"p","numbers":[["new",[],1,[]],["tokenferry_stream_rereads",[],2,[]]]}'
    _, samples = unpack(data)
    assert [(one.metric, one.value) for one in samples] == [(REREADS, 2)]


class TestBoard:
    def test_all_processes_are_read_by_name(self, redis_server: RedisServer) -> None:
        board = MetricsBoard(redis_server.connect())
        for name in ("b", "a"):
            meter = Meter(name)
            meter.count(REREADS)
            board.put(meter)
        assert [(one.process, one.samples[0].value) for one in board.read()] == [("a", 1), ("b", 1)]

    def test_what_a_process_counted_outlives_it_for_a_while_and_its_gauges_do_not(
        self, redis_server: RedisServer
    ) -> None:
        redis = redis_server.connect()
        board, meter = MetricsBoard(redis), Meter("a")
        meter.count(REREADS)
        meter.ask(OPEN_STREAMS, value=lambda: 7)
        board.put(meter)
        [fresh] = board.read()
        assert {one.metric for one in fresh.samples} == {REREADS, OPEN_STREAMS}
        redis.pexpire(keys.metrics("a"), KEEP_MS - FRESH_MS - BOARD_KEY_TTL_SLACK_MS)
        [stale] = board.read()
        assert {one.metric for one in stale.samples} == {REREADS}
        redis.delete(keys.metrics("a"))
        assert board.read() == []
        assert redis.smembers(keys.MEASURED) == set()

    def test_both_keys_expire(self, redis_server: RedisServer) -> None:
        redis = redis_server.connect()
        MetricsBoard(redis).put(Meter("a"))
        for key in (keys.metrics("a"), keys.MEASURED):
            assert 0 < redis.pttl(key) <= KEEP_MS

    def test_damaged_numbers_of_one_process_hide_no_other(
        self, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        redis = redis_server.connect()
        board = MetricsBoard(redis)
        for name in ("a", "b"):
            board.put(Meter(name))
        redis.set(keys.metrics("a"), b"?", px=KEEP_MS)
        assert [one.process for one in board.read()] == ["b"]
        assert "the numbers of a cannot be shown" in caplog.text

    def test_the_queue_is_counted_and_its_oldest_offer_has_an_age(self, redis_server: RedisServer) -> None:
        cell = Cell(redis_server)
        for name in ("r1", "r2"):
            cell.submit(name)
        seconds, _ = cell.redis.time()
        found = {one.priority: one for one in MetricsBoard(cell.redis).queue(["m"])}
        assert [found[name].num_waiting for name in ("priority", "default", "flex")] == [0, 2, 0]
        assert found["flex"].age_s == 0
        assert found["default"].age_s == pytest.approx(seconds - cell.now_ms / 1000, abs=2)


def test_a_writer_says_once_that_redis_is_away_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    import fakeredis

    from tasks.process.clients import connect_fake

    server = fakeredis.FakeServer()
    redis = connect_fake(server, use="short")
    writer = MetricsWriter(MetricsBoard(redis), Meter("a"))
    server.connected = False
    assert [writer.tick(), writer.tick()] == [False, False]
    assert caplog.text.count("metrics wait for Redis") == 1
    server.connected = True
    assert writer.tick()
    assert redis.exists(keys.metrics("a"))


def test_a_writer_writes_once_more_at_the_end(redis_server: RedisServer) -> None:
    board, meter = MetricsBoard(redis_server.connect()), Meter("a")
    meter.counter(REREADS)
    writer = MetricsWriter(board, meter, every_s=3600)
    writer.start()
    meter.count(REREADS)
    writer.stop(5)
    assert board.read()[0].samples[0].value == 1


def request(prompt: tuple[int, ...] = (1, 2, 3, 4)) -> GenerationJob:
    return GenerationJob("r1", "m", prompt, SamplingParams(max_tokens=8), created_ms=1_000_000)


class TestWorker:
    def make(self) -> tuple[Meter, WorkerMetrics]:
        """The day began 1000 s before the monotonic clock, which stands at 5 s."""
        meter = Meter("w1")
        return meter, WorkerMetrics(meter, "m", clock=lambda: 1005.0, monotonic=lambda: 5.0)

    def test_the_first_token_gives_queue_and_prefill_time_and_the_tokens_of_the_prompt(self) -> None:
        meter, metrics = self.make()
        metrics.computed(request(), 1, 0, 3, AttemptTimes(1.0, admitted_s=2.0), 4.5)
        assert value(meter, QUEUE_TIME, "m") == pytest.approx(2.0)
        assert value(meter, PREFILL_TIME, "m") == pytest.approx(2.5)
        assert value(meter, PROMPT_TOKENS, "m") == 4
        assert (value(meter, PREFIX_QUERIES, "m"), value(meter, PREFIX_HITS, "m")) == (4, 3)

    def test_a_continuation_counts_its_prompt_and_its_wait_no_second_time(self) -> None:
        meter, metrics = self.make()
        metrics.computed(request(), 2, 6, 8, AttemptTimes(1.0, admitted_s=2.0), 4.5)
        assert value(meter, PROMPT_TOKENS, "m") == 0
        assert buckets(meter, QUEUE_TIME, "m") == 0
        assert value(meter, PREFIX_QUERIES, "m") == 10

    def test_only_published_tokens_count(self) -> None:
        meter, metrics = self.make()
        end = Terminal("finished", "length")
        metrics.settled(Append("r1", 1, 0, (7, 8)), Appended(2))
        metrics.settled(Append("r1", 1, 2, (9,), terminal=end), Refused("closed"))
        assert value(meter, GENERATION_TOKENS, "m") == 2
        assert value(meter, FENCED, "m", "closed") == 1
        assert value(meter, REQUEST_SUCCESS, "m", "length") == 0
        metrics.settled(Append("r2", 1, 0, (9,), terminal=end), Appended(1))
        assert value(meter, REQUEST_SUCCESS, "m", "length") == 1
        assert value(meter, ENDED, "m", "finished", "length") == 1

    def test_an_answer_of_one_token_has_a_decode_time_of_nothing(self) -> None:
        meter, metrics = self.make()
        metrics.finished(AttemptTimes(0.0, 0.0, first_token_s=3.0, last_token_s=3.0))
        assert (value(meter, DECODE_TIME, "m"), buckets(meter, DECODE_TIME, "m")) == (0, 1)
