"""Everything in one process: `with open_server(model="...") as server: server.base_url`.

Composition root of the one-process server: web, one worker and the bridge over an in-memory Redis, through the same
codec and the same scripts as the processes use, so that fencing is identical. For tests, notebooks and
`tokenferry serve --one-process`. Nothing outlives the block, the catalog only if DATA_DIR is given.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import fakeredis
from redis import Redis

from app.application import Application, ApplicationSettings, create_app
from app.main import application_settings, key_file, text_edge_of
from app.server import Server as HttpServer
from app.server import listen
from bridge.main import start_bridge
from bridge.streams.reader import Reader
from decode.checkpoint.names import SCRIPTED
from tasks.observe.board import MetricsBoard
from tasks.observe.live import LiveCell
from tasks.process.clients import Use, connect_fake
from tasks.process.settings import WebSettings, WorkerSettings
from tasks.process.tracing import open_tracer
from tasks.protocol.broker import build_broker
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter
from tasks.worker.assembly import describe_worker, start_worker
from tasks.worker.loading import load_for, model_name
from tokenferry.cell.plan import find_model, origin
from tokenferry.errors import ForPeople

START_S = 30.0
STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server of this process."""

    model: str
    """The name that clients use."""
    origin: str
    records: RequestRecords

    @property
    def base_url(self) -> str:
        return f"{self.origin}/v1"


@contextlib.contextmanager
def open_server(
    model: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    environ: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[LocalServer]:
    """Serve inside the block. `port` 0 takes a free one.

    `settings` are the environment variables of the README in lower case (`max_num_seqs=4`); they and `model` go over
    `environ` (default: this process's).
    Raises SettingsError, ModelError, DecodeError, PreflightRefused, ForPeople (the address is taken).
    """
    environ = dict(os.environ if environ is None else environ)
    environ |= {name.upper(): str(value) for name, value in settings.items()}
    environ |= {"MODEL": model} if model is not None else {}
    web, worker = WebSettings.from_env(environ), WorkerSettings.from_env(environ)
    if worker.model != SCRIPTED:
        find_model(worker.model, worker.cache_dir)
    with contextlib.ExitStack() as stack:
        engine = load_for(worker, environ)
        listener = stack.enter_context(_listen(host, port))
        connect = _fake_clients(stack)
        records = RequestRecords(
            connect("short"),
            stream_ttl_s=web.stream_ttl_s,
            first_token_deadline_ms=web.first_token_deadline_s * 1000,
            store_ttl_s=web.store_days * 86_400,
            store_max=web.store_max,
        )
        submitter = Submitter(records, build_broker(connect("queue")), connect("short"))
        data_dir = environ.get("DATA_DIR", "").strip()
        folder = Path(data_dir) if data_dir else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        bridge = start_bridge(connect("short"), connect("queue"), records, submitter, data_dir=folder)
        stack.callback(bridge.stop)
        running = start_worker(
            engine,
            describe_worker(engine, model=model_name(worker), device=worker.device),
            redis=connect("short"),
            blocking=connect("blocking"),
            queue=connect("queue"),
            heartbeat_ms=worker.heartbeat_ms,
            lease_ms=max(worker.lease_ms, 5_000),  # one process: a lease that runs out means a busy interpreter
            stall_limit_s=worker.stall_limit_s,
            stream_ttl_s=worker.stream_ttl_s,
            tracer=open_tracer(environ, "worker", "local"),
        )
        stack.callback(running.stop)
        served, edge = text_edge_of(web)
        reader = Reader(connect("blocking"), connect("short"), f"local-{uuid4().hex[:8]}", records)
        application = create_app(
            text_edges={served: edge},
            records=records,
            submitter=submitter,
            reader=reader,
            live=LiveCell(connect("short")),
            settings=application_settings(web),
            keys=key_file(web),
            board=MetricsBoard(connect("short")),
            tracer=open_tracer(environ, "web", reader.reader_id),
        )
        stack.enter_context(_serving(application, listener))
        yield LocalServer(served, origin(host, listener.getsockname()[1]), records)


def _fake_clients(stack: contextlib.ExitStack) -> Callable[[Use], Redis]:
    """Clients over one in-memory server; closed with the stack."""
    server = fakeredis.FakeServer()

    def connect(use: Use) -> Redis:
        client = connect_fake(server, use=use)
        stack.callback(client.close)
        return client

    return connect


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    try:
        listener = listen(host, port, stall_limit_s=ApplicationSettings().stall_limit_s)
    except OSError as error:
        raise ForPeople(f"cannot listen on {host}:{port}: {error}") from error
    with listener:
        yield listener


class _ThreadServer(HttpServer):
    """The HTTP server, told to end by another thread instead of a signal."""

    def __init__(self, application: Application) -> None:
        super().__init__(application, exit_s=None)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    def end_from_outside(self) -> None:
        if self._loop is not None and self._loop.is_running():
            self._loop.call_soon_threadsafe(self.end)


@contextlib.contextmanager
def _serving(application: Application, listener: socket.socket) -> Iterator[None]:
    """The HTTP server in a thread, up inside the block."""
    server = _ThreadServer(application)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="web", daemon=True)
    thread.start()
    try:
        if not server.is_up.wait(START_S):
            raise ForPeople(f"the HTTP server did not start within {START_S:.0f} s")
        yield
    finally:
        server.end_from_outside()
        thread.join(STOP_S)
