"""The web application, wired: the only place where routes, resources and the parts behind them meet.

Owns the wiring and the periodic work of the process. Everything with an outside (Redis, clock, ids) is handed in, so
that a test or the one-process server can hand in its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast
from uuid import uuid4

import falcon.asgi
from falcon import HTTPError
from falcon.asgi import Request, Response

from app.answers.admission import Admission
from app.answers.closing import Closer
from app.answers.delivery import Answering
from app.answers.drain import OpenAnswers
from app.endpoints.chat import ChatCompletions
from app.endpoints.completions import Completions
from app.endpoints.intake import Intake
from app.endpoints.known import KnownAnswers
from app.endpoints.models import Models
from app.endpoints.stored import StoredCompletions
from app.endpoints.tokenize import Tokenize
from app.errors import ApiError, internal_error
from app.http.api_keys import OPEN_PATHS, ApiKeys, KeyFile
from app.http.connection import Asgi, DisconnectWatch, Receive, Scope, Send
from app.http.exchange import Exchanges
from app.http.headers import ANY, Cors, ResponseHeaders
from app.operator.dashboard import FILES, Page, Pictures, Timeline
from app.operator.health import Live, Ready
from app.operator.metrics import Metrics
from app.operator.picture import Picture
from app.operator.viewers import Viewers
from app.reference.openapi import OpenApi
from app.text.edge import TextEdge
from bridge.streams.reader import Reader
from bridge.streams.relay import KEEP_ALIVE_S
from tasks.observe.board import MetricsBoard, MetricsWriter
from tasks.observe.live import LiveCell
from tasks.process.tracing import OFF, Tracer
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter

log = logging.getLogger(__name__)

TICK_S = 0.5
POOL_THREADS = 4


@dataclass(frozen=True, slots=True)
class ApplicationSettings:
    max_waiting: int = 256
    max_body_bytes: int = 8 * 1024 * 1024
    keep_alive_s: float = KEEP_ALIVE_S
    stall_limit_s: float = 30.0
    cors_origins: tuple[str, ...] = (ANY,)


class Application:
    """The ASGI application, and what its process needs to do with it."""

    def __init__(
        self,
        watch: DisconnectWatch,
        reader: Reader,
        answers: OpenAnswers,
        closer: Closer,
        metrics: MetricsWriter | None,
        tracer: Tracer,
        viewers: Viewers,
    ) -> None:
        self._watch = watch
        self._viewers = viewers
        self._reader = reader
        self._answers = answers
        self._closer = closer
        self._metrics = metrics
        self._tracer = tracer
        self._ticker: asyncio.Task[None] | None = None

    @property
    def num_open(self) -> int:
        """Answers that are under way."""
        return len(self._answers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._watch(scope, receive, send)

    def tick(self, now_s: float) -> None:
        """The periodic work; `now_s` is monotonic time."""
        self._watch.sweep(now_s)
        self._closer.retry()

    async def drain(self, budget_s: float) -> None:
        """From now on new requests are refused; open answers get `budget_s` to finish, then a final error event."""
        self._viewers.close()
        await self._answers.drain(budget_s)

    def start(self) -> None:
        """Call on the event loop that serves the application. The lifespan protocol does."""
        self._reader.start(asyncio.get_running_loop())
        self._ticker = asyncio.create_task(self._tick_for_ever())
        if self._metrics is not None:
            self._metrics.start()

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.get_running_loop().run_in_executor(None, self._shut_down)

    def _shut_down(self) -> None:
        self._closer.shut_down(timeout_s=1.0)
        # Requests that could not be closed stay in the reader's set: the watchdog ends them when its lease is over.
        self._reader.stop(keep_lease=self._closer.num_pending > 0)
        if self._metrics is not None:
            self._metrics.stop(0.2)
        self._tracer.flush()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(time.monotonic())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            match (await receive())["type"]:
                case "lifespan.startup":
                    self.start()
                    await send({"type": "lifespan.startup.complete"})
                case "lifespan.shutdown":
                    await self.stop()
                    await send({"type": "lifespan.shutdown.complete"})
                    return


def create_app(
    *,
    text_edges: Mapping[str, TextEdge],
    records: RequestRecords,
    submitter: Submitter,
    reader: Reader,
    live: LiveCell,
    settings: ApplicationSettings,
    keys: KeyFile | None = None,
    board: MetricsBoard | None = None,
    tracer: Tracer = OFF,
    pool: Executor | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid4().hex,
    new_seed: Callable[[], int] = lambda: random.getrandbits(63),
) -> Application:
    """`pool` runs what blocks; `clock` is the time of day, `monotonic` the time for limits. Without a `board` the
    numbers of this process are its own affair."""
    pool = pool or ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="web-redis")
    meter = reader.meter
    answers = OpenAnswers(meter)
    closer = Closer(records, reader.reader_id, pool, meter)
    answering = Answering(
        text_edges=text_edges,
        admission=Admission(
            records, submitter, reader_id=reader.reader_id, max_waiting=settings.max_waiting, clock=monotonic
        ),
        records=records,
        history=reader.history,
        reader=reader,
        answers=answers,
        closer=closer,
        pool=pool,
        keep_alive_s=settings.keep_alive_s,
    )
    known = KnownAnswers(answering, records, meter)
    stored = StoredCompletions(
        models=list(text_edges),
        answering=answering,
        known=known,
        stored=records.stored,
        max_body_bytes=settings.max_body_bytes,
    )
    intake = Intake(
        text_edges=text_edges,
        answering=answering,
        pool=pool,
        max_body_bytes=settings.max_body_bytes,
        new_id=new_id,
        new_seed=new_seed,
        clock=clock,
    )
    models = Models(text_edges, int(clock()))
    asgi = falcon.asgi.App()
    asgi.req_options.strip_url_path_trailing_slash = True
    asgi.add_route("/v1/chat/completions", ChatCompletions(intake, answering, stored))
    asgi.add_route("/v1/chat/completions/{completion_id}", stored)
    asgi.add_route("/v1/chat/completions/{completion_id}/messages", stored, suffix="messages")
    asgi.add_route("/v1/chat/completions/{completion_id}/cancel", known, suffix="cancel")
    asgi.add_route("/v1/completions", Completions(intake, answering))
    asgi.add_route("/v1/completions/{completion_id}", known)
    asgi.add_route("/v1/completions/{completion_id}/cancel", known, suffix="cancel")
    asgi.add_route("/v1/models", models)
    asgi.add_route("/v1/models/{model:path}", models, suffix="one")
    asgi.add_route("/openapi.json", OpenApi(list(text_edges)))
    tokenize = Tokenize(text_edges, records, max_body_bytes=settings.max_body_bytes, pool=pool)
    for prefix in ("", "/v1"):
        asgi.add_route(f"{prefix}/tokenize", tokenize)
        asgi.add_route(f"{prefix}/detokenize", tokenize, suffix="back")
    asgi.add_route("/metrics", Metrics(meter, board, records, pool))
    asgi.add_route("/livez", Live())
    asgi.add_route("/readyz", Ready(list(text_edges), records, answers, pool))
    page = Page()
    for path in FILES:
        asgi.add_route(path, page)
    viewers = Viewers(Picture(live).look, pool)
    asgi.add_route("/dashboard/events", Pictures(viewers))
    asgi.add_route("/dashboard/requests/{request_id}", Timeline(live, records, pool))
    let_in = ApiKeys(keys, (*OPEN_PATHS, *FILES))
    exchanges = Exchanges(meter, monotonic, tracer)
    asgi.add_middleware([exchanges, ResponseHeaders(monotonic), Cors(settings.cors_origins), let_in])
    asgi.add_error_handler(Exception, _on_exception)
    asgi.add_error_handler(HTTPError, _on_http_error)
    asgi.add_error_handler(ApiError, _on_api_error)
    watch = DisconnectWatch(cast(Asgi, asgi), stall_limit_s=settings.stall_limit_s, clock=monotonic)
    writer = None if board is None else MetricsWriter(board, meter)
    return Application(watch, reader, answers, closer, writer, tracer, viewers)


async def _on_api_error(req: Request, resp: Response, error: ApiError, params: object) -> None:
    resp.status = error.status
    resp.set_headers(dict(error.headers))
    resp.content_type = "application/json"
    resp.data = error.render()
    resp.text = resp.media = None


async def _on_http_error(req: Request, resp: Response, error: HTTPError, params: object) -> None:
    """What Falcon itself refuses: an unknown path, a method that a path does not have."""
    message = {
        404: f"Unknown path: {req.method} {req.path[:256]}. The API is under /v1.",
        405: f"{req.path[:256]} does not take {req.method}.",
    }.get(error.status_code, error.title or "The request was refused.")
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    refusal = ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
    await _on_api_error(req, resp, refusal, params)


async def _on_exception(req: Request, resp: Response, error: Exception, params: object) -> None:
    log.error("%s %s %s failed", resp.get_header("x-request-id") or "-", req.method, req.path, exc_info=error)
    await _on_api_error(req, resp, internal_error(), params)
