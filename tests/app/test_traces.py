"""One trace from the client through web and worker: by hand, and into a collector on this machine."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.app.web import HELLO, MODEL, Web
from tests.tasks.process.test_tracing import PARENT, Recorded
from tokenferry.cell.one_process import open_server


async def test_a_request_is_a_span_until_its_last_byte_and_its_job_belongs_to_it() -> None:
    recorded = Recorded()
    web = Web(tracer=recorded.tracer)
    worker = web.worker()
    exchange = await web.post({"model": MODEL, "messages": HELLO, "stream": True}, traceparent=PARENT)
    job = worker.claim("chatcmpl-1")
    assert recorded.spans() == {}
    worker.append("chatcmpl-1", 0, 65, end="length")
    await web.turn()
    await exchange.task
    [span] = recorded.spans().values()
    assert span.name == "POST /v1/chat/completions"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert job.traceparent.split("-")[2] == f"{span.context.span_id:016x}"
    attributes = span.attributes or {}
    assert attributes["tokenferry.request_id"] == "chatcmpl-1"
    assert attributes["gen_ai.usage.output_tokens"] == 1


async def test_machines_that_ask_for_health_and_metrics_make_no_spans() -> None:
    recorded = Recorded()
    web = Web(tracer=recorded.tracer)
    for path in ("/livez", "/readyz", "/metrics"):
        await web.get(path)
    assert recorded.spans() == {}


class Collector(HTTPServer):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[bytes] = []
        self.paths: set[str] = set()


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.paths.add(self.path)
        self.server.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.e2e
def test_a_collector_gets_the_whole_trace() -> None:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.05,))
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{collector.server_port}"
            settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "PREFLIGHT_FORCE": "1", "SCRIPTED_STEP_MS": "1"}
            with open_server(model="scripted", environ=settings) as server:
                host, _, port = server.origin.removeprefix("http://").rpartition(":")
                connection = http.client.HTTPConnection(host, int(port), timeout=20)
                body = orjson.dumps({"model": "scripted", "messages": HELLO, "max_tokens": 5})
                headers = {"content-type": "application/json", "traceparent": PARENT}
                connection.request("POST", "/v1/chat/completions", body, headers)
                assert connection.getresponse().status == 200
                connection.close()
        finally:
            collector.shutdown()
            thread.join()
    assert collector.paths == {"/v1/traces"}
    found = [
        (span.name, span.trace_id.hex())
        for data in collector.bodies
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    trace_id = PARENT.split("-")[1]
    assert sorted(found) == [(name, trace_id) for name in ("POST /v1/chat/completions", "decode", "prefill", "queue")]
