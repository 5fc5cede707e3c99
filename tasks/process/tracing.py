"""Spans of one request through all processes, by OpenTelemetry, if the operator wants them.

Owns the passage between our times and OpenTelemetry's spans. Refuses to import OpenTelemetry unless
an endpoint is set: without one `OFF` does nothing, and the package need not be there. What the SDK
itself reads from `OTEL_*` variables (service name, headers, sampler) holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from tasks.process.settings import SettingsError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Goes over the former, and is the whole address."""
EXPORT_S = 2
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

Value = str | int | float | bool
Attributes = Mapping[str, Value]


class Span(Protocol):
    @property
    def traceparent(self) -> str:
        """What others name as their parent (W3C Trace Context); empty when nothing is recorded."""

    def end(self, attributes: Attributes, *, name: str, failed: bool = False) -> None: ...


class Tracer(Protocol):
    @property
    def is_on(self) -> bool: ...
    def begin(self, name: str, parent: str) -> Span:
        """A span of a server; `parent` is a traceparent, and taken for none if it is empty or malformed."""

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        """A span that is over already; times of day."""

    def flush(self) -> None:
        """Sends what has not been sent; blocks for EXPORT_S at most."""


class _NoSpan:
    traceparent = ""

    def end(self, attributes: Attributes, *, name: str, failed: bool = False) -> None:
        pass


class _Off:
    is_on = False

    def begin(self, name: str, parent: str) -> Span:
        return _NO_SPAN

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        pass

    def flush(self) -> None:
        pass


_NO_SPAN = _NoSpan()
OFF: Tracer = _Off()


def open_tracer(environ: Mapping[str, str], service: str, process: str) -> Tracer:
    """What the environment asks for; `service` is the kind of process. Raises SettingsError."""
    if not (environ.get(ENDPOINT, "").strip() or environ.get(TRACES_ENDPOINT, "").strip()):
        return OFF
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(f"{ENDPOINT} needs OpenTelemetry: pip install 'tokenferry[otel]' ({error})") from error
    name = environ.get("OTEL_SERVICE_NAME", "").strip() or f"tokenferry-{service}"
    provider = TracerProvider(
        resource=Resource.create({"service.name": name, "service.instance.id": process}), shutdown_on_exit=False
    )
    exporter = OTLPSpanExporter(endpoint=_endpoint(environ), timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OtelTracer(provider)


def _endpoint(environ: Mapping[str, str]) -> str:
    own = environ.get(TRACES_ENDPOINT, "").strip()
    return own or environ[ENDPOINT].strip().rstrip("/") + "/v1/traces"


class OtelTracer:
    """Over a `TracerProvider` of the OpenTelemetry SDK."""

    is_on = True

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("tokenferry")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, parent: str) -> Span:
        span = self._tracer.start_span(name, context=self._context(parent), kind=self._trace.SpanKind.SERVER)
        return _OtelSpan(self, span)

    def record(self, name: str, parent: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        span = self._tracer.start_span(name, context=self._context(parent), start_time=int(start_s * 1e9))
        span.set_attributes(dict(attributes))
        span.end(int(end_s * 1e9))

    def flush(self) -> None:
        self._provider.force_flush(1_000)

    def traceparent(self, span: Any) -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=self._trace.set_span_in_context(span))
        return carrier.get("traceparent", "")

    def fail(self, span: Any) -> None:
        span.set_status(self._trace.StatusCode.ERROR)

    def _context(self, parent: str) -> Any:
        # An empty context, and not the one of the thread that happens to run this.
        from opentelemetry.context import Context

        if not _TRACEPARENT.fullmatch(parent):
            return Context()
        return self._propagator.extract({"traceparent": parent}, context=Context())


class _OtelSpan:
    def __init__(self, tracer: OtelTracer, span: Any) -> None:
        self._tracer = tracer
        self._span = span
        self.traceparent = tracer.traceparent(span)

    def end(self, attributes: Attributes, *, name: str, failed: bool = False) -> None:
        self._span.update_name(name)
        self._span.set_attributes(dict(attributes))
        if failed:
            self._tracer.fail(self._span)
        self._span.end()
