"""Spans: off and unimported unless configured, with the client's context, and as an attempt went."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from decode.engine.sampling import SamplingParams
from tasks.observe.metrics import Meter
from tasks.process.settings import SettingsError
from tasks.process.tracing import OFF, OtelTracer, open_tracer
from tasks.protocol.contract import GenerationJob, decode_job, encode_job
from tasks.worker.metrics import AttemptTimes, WorkerMetrics

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = OtelTracer(provider)

    def spans(self) -> Mapping[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def job(traceparent: str) -> GenerationJob:
    return GenerationJob("r1", "m", (1, 2), SamplingParams(max_tokens=8), 1_000_000, traceparent=traceparent)


def test_nothing_of_it_is_imported_unless_it_is_configured() -> None:
    # redis-py imports the SDK where it is there, but no exporter.
    code = "import sys, app.main, tasks.worker.assembly; sys.exit('opentelemetry.exporter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert open_tracer({}, "web", "p") is OFF
    assert OFF.begin("GET", PARENT).traceparent == ""


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"OTEL_EXPORTER_OTLP_ENDPOINT needs .*tokenferry\[otel\]"):
        open_tracer({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "web", "p")


def test_a_span_belongs_to_the_client_s_and_its_own_are_named_after_it() -> None:
    recorded = Recorded()
    span = recorded.tracer.begin("POST", PARENT)
    recorded.tracer.record("decode", span.traceparent, 1.0, 3.5, {"a": 1})
    span.end({"b": "x"}, name="POST /v1", failed=True)
    outer, inner = recorded.spans()["POST /v1"], recorded.spans()["decode"]
    assert outer.parent is not None
    assert (f"{outer.parent.trace_id:032x}", f"{outer.parent.span_id:016x}") == tuple(PARENT.split("-")[1:3])
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert (inner.start_time, inner.end_time) == (1_000_000_000, 3_500_000_000)
    assert dict(inner.attributes or {}) == {"a": 1}
    assert not outer.status.is_ok


@pytest.mark.parametrize(
    "parent", ["", "nonsense", PARENT[:-3], "00-" + "0" * 32 + "-b7ad6b7169203331-01", PARENT * 2]
)
def test_a_malformed_parent_is_none(parent: str) -> None:
    recorded = Recorded()
    recorded.tracer.begin("POST", parent).end({}, name="x")
    assert recorded.spans()["x"].parent is None


def test_the_context_goes_with_the_job_and_a_job_without_one_reads_as_before() -> None:
    assert decode_job(encode_job(job(PARENT))).traceparent == PARENT
    assert b"traceparent" not in encode_job(job(""))
    assert decode_job(encode_job(job(""))).traceparent == ""


class TestWorker:
    """The day began 1000 s before the monotonic clock, which stands at 9 s; the job was made at 1000 s."""

    def spans_of(self, times: AttemptTimes, attempt: int = 1, parent: str = PARENT) -> Mapping[str, ReadableSpan]:
        recorded = Recorded()
        metrics = WorkerMetrics(Meter("w1"), "m", tracer=recorded.tracer, clock=lambda: 1009.0, monotonic=lambda: 9.0)
        metrics.over(job(parent), attempt, "ended", times)
        return recorded.spans()

    def seconds(self, span: ReadableSpan) -> tuple[float, float]:
        assert span.start_time is not None
        assert span.end_time is not None
        return span.start_time / 1e9, span.end_time / 1e9

    def test_an_attempt_is_queue_prefill_and_decode(self) -> None:
        spans = self.spans_of(AttemptTimes(1.0, admitted_s=2.0, first_token_s=4.0, last_token_s=8.0))
        assert {name: self.seconds(span) for name, span in spans.items()} == {
            "queue": (1000.0, 1002.0),
            "prefill": (1002.0, 1004.0),
            "decode": (1004.0, 1009.0),
        }
        attributes = spans["decode"].attributes or {}
        assert attributes["tokenferry.request_id"] == "r1"
        assert attributes["tokenferry.worker"] == "w1"
        assert attributes["tokenferry.outcome"] == "ended"

    def test_a_later_attempt_waits_from_when_its_worker_took_it(self) -> None:
        spans = self.spans_of(AttemptTimes(3.0, admitted_s=4.0), attempt=2)
        assert self.seconds(spans["queue"]) == (1003.0, 1004.0)
        assert set(spans) == {"queue", "prefill"}

    def test_what_was_never_admitted_only_waited(self) -> None:
        assert self.seconds(self.spans_of(AttemptTimes(3.0))["queue"]) == (1000.0, 1009.0)

    def test_a_job_without_a_context_has_no_spans(self) -> None:
        assert self.spans_of(AttemptTimes(1.0, 2.0, 3.0, 4.0), parent="") == {}
