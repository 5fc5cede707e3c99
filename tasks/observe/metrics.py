"""What is measured: the table of all metrics, and the numbers of one process.

Owns the names, labels, buckets and meanings, the cells that the parts of a process add to, and their packed form.
Refuses to know how numbers get to other processes (`tasks.observe.board`) and how they are shown to a scraper
(`app.operator.metrics`). Numbers grow from the start of their process; each process has its own, under its own name.

Names that begin with `vllm:` mean here what they mean there, so that dashboards made for vLLM work.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import orjson

from tasks.protocol.contract import ContractError

VERSION = 1

Kind = Literal["counter", "gauge", "histogram"]
Source = Literal["worker", "web", "bridge", "all", "scrape"]
"""Who measures: a kind of process, whoever it happens to, or the web process at the time of the scrape."""

_WAIT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's bounds, with finer ones below them."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter's `name` is without the `_total` that its samples have. All samples have a label `process` too."""

    name: str
    kind: Kind
    source: Source
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, without the infinite one."""

    @property
    def shown_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


_MODEL = ("model_name",)

RUNNING = Metric(
    "vllm:num_requests_running", "gauge", "scrape", _MODEL, "Requests that hold blocks of the KV cache of a worker."
)
WAITING = Metric(
    "vllm:num_requests_waiting",
    "gauge",
    "scrape",
    _MODEL,
    "Requests without blocks: in a worker, and, with process `queue`, on offer and not claimed.",
)
KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc", "gauge", "scrape", _MODEL, "Used part of the KV cache of a worker, from 0 to 1."
)
PREFIX_QUERIES = Metric(
    "vllm:prefix_cache_queries", "counter", "worker", _MODEL, "Tokens that were looked up in the prefix cache."
)
PREFIX_HITS = Metric("vllm:prefix_cache_hits", "counter", "worker", _MODEL, "Tokens that were found there.")
PREEMPTIONS = Metric(
    "vllm:num_preemptions", "counter", "worker", _MODEL, "Sequences that lost their blocks and are computed again."
)
DRAFT_TOKENS = Metric(
    "vllm:spec_decode_num_draft_tokens",
    "counter",
    "worker",
    _MODEL,
    "Tokens that were drafted by prompt lookup and computed.",
)
ACCEPTED_TOKENS = Metric(
    "vllm:spec_decode_num_accepted_tokens",
    "counter",
    "worker",
    _MODEL,
    "Of these, those that were right: each has saved a step of its sequence.",
)
PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens", "counter", "worker", _MODEL, "Tokens of the prompts whose first output token was computed."
)
GENERATION_TOKENS = Metric(
    "vllm:generation_tokens",
    "counter",
    "worker",
    _MODEL,
    "Output tokens that were published, with the one that only ends an answer.",
)
REQUEST_SUCCESS = Metric(
    "vllm:request_success",
    "counter",
    "all",
    ("model_name", "finished_reason"),
    "Requests (one for each choice) that ended well: `stop`, `length`; `abort` is a cancelled one.",
)
TTFT = Metric(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "web",
    _MODEL,
    "From the arrival of a request to its first token in the web process; one for each answer.",
    _WAIT_S,
)
ITL = Metric(
    "vllm:inter_token_latency_seconds",
    "histogram",
    "worker",
    _MODEL,
    "Between two output tokens of a sequence, as computed; 0 between those of one step.",
    _TOKEN_S,
)
E2E = Metric(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "web",
    _MODEL,
    "From the arrival of a request to the last byte of its answer.",
    _WHOLE_S,
)
QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    "histogram",
    "worker",
    _MODEL,
    "From the creation of a request until a worker first gave it blocks; first attempts only.",
    _WHOLE_S,
)
PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    "histogram",
    "worker",
    _MODEL,
    "From then until the first token that the attempt computed.",
    _WHOLE_S,
)
DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    "histogram",
    "worker",
    _MODEL,
    "From then until the last one, of attempts that finished the answer.",
    _WHOLE_S,
)

ATTEMPTS = Metric(
    "tokenferry_attempts",
    "counter",
    "worker",
    _MODEL,
    "Assignments that workers claimed: one or more for each request.",
)
FAILOVERS = Metric(
    "tokenferry_failovers",
    "counter",
    "worker",
    _MODEL,
    "Claims of what an earlier attempt had left unfinished.",
)
RELEASES = Metric(
    "tokenferry_releases",
    "counter",
    "worker",
    ("model_name", "reason"),
    "Assignments that a worker gave back: `drain`, `gap`, `engine_error`, `too_large`.",
)
FENCED = Metric(
    "tokenferry_fenced_appends",
    "counter",
    "worker",
    ("model_name", "reason"),
    "Appends that were refused: `stale` (another attempt is active), `closed` (it is over), `gap`, `missing`.",
)
ENDED = Metric(
    "tokenferry_requests_ended",
    "counter",
    "all",
    ("model_name", "state", "reason"),
    "Requests (one for each choice) by how they ended, counted by the process that ended them.",
)
REOFFERS = Metric(
    "tokenferry_watchdog_reoffers", "counter", "bridge", (), "Requests that the watchdog offered again."
)
WORKERS_GONE = Metric("tokenferry_workers_lost", "counter", "bridge", (), "Workers whose lease ran out.")
READERS_GONE = Metric("tokenferry_readers_lost", "counter", "bridge", (), "Web processes whose lease ran out.")
RECORDER_LAG = Metric(
    "tokenferry_recorder_lag_seconds", "gauge", "bridge", (), "For how long the catalog has not been up to date."
)
REREADS = Metric(
    "tokenferry_stream_rereads",
    "counter",
    "web",
    (),
    "Times that a client which had fallen behind, or a stream with a gap, was read again from Redis.",
)
STREAM_BYTES = Metric("tokenferry_stream_bytes", "counter", "web", (), "Bytes of response bodies that were streamed.")
OPEN_STREAMS = Metric("tokenferry_open_answers", "gauge", "web", (), "Answers that are being sent, or gathered.")
HTTP_REQUESTS = Metric(
    "tokenferry_http_requests",
    "counter",
    "web",
    ("method", "route", "status"),
    "HTTP requests; an unknown path is the route `unknown`.",
)
RECONNECTS = Metric(
    "tokenferry_redis_reconnects", "counter", "all", (), "Times that Redis was reached again after it had not been."
)
REDIS_UP = Metric(
    "tokenferry_redis_up",
    "gauge",
    "scrape",
    (),
    "1 if the web process that was asked reached Redis; else only its own numbers are there.",
)
QUEUE_WAITING = Metric(
    "tokenferry_queue_waiting",
    "gauge",
    "scrape",
    ("model_name", "priority"),
    "Requests on offer and not claimed, by class.",
)
QUEUE_AGE = Metric(
    "tokenferry_queue_age_seconds",
    "gauge",
    "scrape",
    ("model_name", "priority"),
    "For how long the oldest of them has been on offer; 0 when there is none.",
)

METRICS: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

Labels = tuple[str, ...]


class Counter:
    """A number that grows. Add to `value` from one thread, or by `Meter.count`."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: float = 0


class Histogram:
    """How often a value fell into each bucket. From one thread."""

    __slots__ = ("_buckets", "counts", "total")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        # PERF: 0.2 microseconds.
        self.counts[bisect_left(self._buckets, value)] += times
        self.total += value * times


@dataclass(frozen=True, slots=True)
class Sample:
    """One number of one process. Of a histogram: `buckets` are the counts, the infinite one last, `value` the sum."""

    metric: Metric
    labels: Labels
    value: float
    buckets: tuple[int, ...] = ()


class Meter:
    """The numbers of one process, under its name. A part of it that is given none measures into one of its own."""

    def __init__(self, process: str = "") -> None:
        self.process = process
        self._lock = threading.Lock()
        self._counters: dict[tuple[Metric, Labels], Counter] = {}
        self._histograms: dict[tuple[Metric, Labels], Histogram] = {}
        self._asked: dict[tuple[Metric, Labels], Callable[[], float]] = {}

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """The cell; it is there, with 0, from the first time it is asked for."""
        with self._lock:
            return self._counters.setdefault(_checked(metric, labels, "counter"), Counter())

    def count(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Adds, from any thread."""
        counter = self.counter(metric, *labels)
        with self._lock:
            counter.value += by

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        with self._lock:
            return self._histograms.setdefault(_checked(metric, labels, "histogram"), Histogram(metric.buckets))

    def ask(self, metric: Metric, *labels: str, value: Callable[[], float]) -> None:
        """A gauge or counter that somebody else keeps: `value` is called whenever the numbers are wanted."""
        with self._lock:
            self._asked[_checked(metric, labels, metric.kind)] = value

    def samples(self) -> list[Sample]:
        with self._lock:
            counters, histograms = list(self._counters.items()), list(self._histograms.items())
            asked = list(self._asked.items())
        found = [Sample(metric, labels, cell.value) for (metric, labels), cell in counters]
        found += [Sample(metric, labels, value()) for (metric, labels), value in asked]
        found += [Sample(metric, labels, cell.total, tuple(cell.counts)) for (metric, labels), cell in histograms]
        return found

    def pack(self) -> bytes:
        numbers = [(one.metric.name, one.labels, one.value, one.buckets) for one in self.samples()]
        return orjson.dumps({"v": VERSION, "process": self.process, "numbers": numbers})


def unpack(data: bytes) -> tuple[str, list[Sample]]:
    """The name of the process and its numbers; what this version does not know is left out.

    Raises ContractError: damaged, or of another version.
    """
    try:
        raw = orjson.loads(data)
        if raw["v"] != VERSION:
            raise ContractError(f"metrics: version {raw['v']}, this process speaks {VERSION}")
        samples = [_sample(*number) for number in raw["numbers"]]
        return str(raw["process"]), [one for one in samples if one is not None]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ContractError(f"metrics: {error}") from error


def _sample(name: str, labels: list[str], value: float, buckets: list[int]) -> Sample | None:
    metric = BY_NAME.get(name)
    if metric is None or len(labels) != len(metric.labels):
        return None
    if len(buckets) != (len(metric.buckets) + 1 if metric.kind == "histogram" else 0):
        return None
    return Sample(metric, tuple(map(str, labels)), float(value), tuple(map(int, buckets)))


def _checked(metric: Metric, labels: Labels, kind: Kind) -> tuple[Metric, Labels]:
    assert metric.kind == kind, f"{metric.name} is a {metric.kind}"
    assert len(labels) == len(metric.labels), f"{metric.name} has the labels {metric.labels}"
    return metric, labels


def count_end(meter: Meter, model: str, state: str, reason: str) -> None:
    """A request has ended, by the process that ended it."""
    meter.count(ENDED, model, state, reason)
    if state == "finished":
        meter.count(REQUEST_SUCCESS, model, reason)
    elif state == "cancelled":
        meter.count(REQUEST_SUCCESS, model, "abort")
