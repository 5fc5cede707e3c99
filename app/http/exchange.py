"""What is said of each HTTP exchange when it is over: one log line, the numbers, and the span.

Owns the facts of an exchange, from the arrival of its request to the last byte. Refuses to know what is answered:
whoever answers tells it the model and the tokens. No text of a client, nor of a model, gets here: of the request
line it knows the method and the path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from falcon.asgi import Request, Response

from app.http.connection import CONNECTION, Connection
from tasks.observe.metrics import E2E, HTTP_REQUESTS, STREAM_BYTES, TTFT, Meter
from tasks.process.tracing import OFF, Span, Tracer, Value

log = logging.getLogger("app.access")

EXCHANGE = "tokenferry.exchange"
QUIET_PATHS = ("/livez", "/readyz", "/metrics")
"""Asked for by machines all the time: logged as debug, without a span."""
MAX_PATH = 256


class ChoiceTokens(Protocol):
    """`app.render.choice.ChoiceText`, as far as it is used here."""

    @property
    def num_tokens(self) -> int: ...


class Exchange:
    """One HTTP exchange; its answerer fills in what it knows."""

    __slots__ = (
        "_clock",
        "_written",
        "choices",
        "connection",
        "first_token_s",
        "is_new",
        "method",
        "model",
        "num_cached_tokens",
        "num_prompt_tokens",
        "path",
        "request_id",
        "route",
        "span",
        "started_s",
        "status",
    )

    def __init__(
        self, method: str, path: str, connection: Connection, span: Span, clock: Callable[[], float]
    ) -> None:
        self.method = method
        self.path = path
        self.connection = connection
        self.span = span
        self.started_s = clock()
        self.route = "unknown"
        self.status = 0
        self.request_id = "-"
        self.model = ""
        self.is_new = False
        """A request for a new answer, and not for one that is there."""
        self.first_token_s: float | None = None
        self.num_prompt_tokens = 0
        self.choices: Sequence[ChoiceTokens] = ()
        self.num_cached_tokens: Callable[[], int] = lambda: 0
        self._written: Callable[[], int] | None = None
        self._clock = clock

    def streams(self, written: Callable[[], int]) -> None:
        """The answer is a stream, and `written` says how many bytes went past the connection's `send`."""
        self._written = written

    def first_token(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = self._clock()

    @property
    def num_stream_bytes(self) -> int:
        return 0 if self._written is None else self.connection.num_bytes_sent + self._written()


class Exchanges:
    """Falcon middleware; the first of all, so that it sees what the others answer."""

    def __init__(self, meter: Meter, clock: Callable[[], float], tracer: Tracer = OFF) -> None:
        """`clock` is monotonic."""
        self._meter = meter
        self._clock = clock
        self._tracer = tracer
        self._open: set[Exchange] = set()
        self._num_stream_bytes = 0
        meter.ask(STREAM_BYTES, value=self._stream_bytes)

    async def process_request(self, req: Request, resp: Response) -> None:
        parent = req.get_header("traceparent") or ""
        span = (OFF if req.path in QUIET_PATHS else self._tracer).begin(req.method, parent)
        connection = req.scope[CONNECTION]
        exchange = Exchange(req.method, req.path, connection, span, self._clock)
        req.scope[EXCHANGE] = exchange
        self._open.add(exchange)
        connection.at_end(lambda: self._over(exchange))

    async def process_response(self, req: Request, resp: Response, resource: object, req_succeeded: bool) -> None:
        exchange: Exchange | None = req.scope.get(EXCHANGE)
        if exchange is not None:
            exchange.status = resp.status_code
            exchange.route = req.uri_template or "unknown"
            exchange.request_id = resp.get_header("x-request-id") or "-"

    def _over(self, exchange: Exchange) -> None:
        self._open.discard(exchange)
        self._num_stream_bytes += exchange.num_stream_bytes
        now_s = self._clock()
        method = exchange.method if exchange.route != "unknown" else "any"
        self._meter.count(HTTP_REQUESTS, method, exchange.route, str(exchange.status))
        if exchange.is_new:
            if exchange.first_token_s is not None:
                waited_s = exchange.first_token_s - exchange.started_s
                self._meter.histogram(TTFT, exchange.model).observe(waited_s)
            self._meter.histogram(E2E, exchange.model).observe(now_s - exchange.started_s)
        self._log(exchange, now_s)
        self._end_span(exchange)

    def _log(self, exchange: Exchange, now_s: float) -> None:
        level = logging.DEBUG if exchange.path in QUIET_PATHS else logging.INFO
        if not log.isEnabledFor(level):
            return
        facts: list[tuple[str, str | int | float]] = [
            ("status", exchange.status),
            ("ms", round((now_s - exchange.started_s) * 1000, 1)),
        ]
        if exchange.model:
            facts += [
                ("model", exchange.model),
                ("prompt_tokens", exchange.num_prompt_tokens),
                ("tokens", _num_tokens(exchange)),
                ("cached", exchange.num_cached_tokens()),
            ]
            if exchange.first_token_s is not None:
                facts.append(("ttft_ms", round((exchange.first_token_s - exchange.started_s) * 1000, 1)))
        if exchange.connection.is_gone:
            facts.append(("left", "early"))
        path = exchange.path[:MAX_PATH]
        line = " ".join(f"{name}={value}" for name, value in facts)
        fields = {"method": exchange.method, "path": path, **dict(facts)}
        log.log(
            level,
            "%s %s %s %s",
            exchange.request_id,
            exchange.method,
            path,
            line,
            extra={"fields": {"request_id": exchange.request_id, **fields}},
        )

    def _end_span(self, exchange: Exchange) -> None:
        about: dict[str, Value] = {
            "http.request.method": exchange.method,
            "http.route": exchange.route,
            "http.response.status_code": exchange.status,
            "tokenferry.request_id": exchange.request_id,
        }
        if exchange.model:
            about["gen_ai.request.model"] = exchange.model
            about["gen_ai.usage.input_tokens"] = exchange.num_prompt_tokens
            about["gen_ai.usage.output_tokens"] = _num_tokens(exchange)
        exchange.span.end(about, name=f"{exchange.method} {exchange.route}", failed=exchange.status >= 500)

    def _stream_bytes(self) -> int:
        return self._num_stream_bytes + sum(exchange.num_stream_bytes for exchange in tuple(self._open))


def _num_tokens(exchange: Exchange) -> int:
    return sum(choice.num_tokens for choice in exchange.choices)
