"""The web process: composition root.

Builds the clients, the text edge and the application from the settings, and serves until it is told to end.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from uuid import uuid4

from app.application import ApplicationSettings, create_app
from app.http.api_keys import KeyFile, KeyFileError
from app.server import Server, listen
from app.text.edge import TextEdge, open_text_edge
from app.text.scripted import scripted_text_edge
from bridge.streams.reader import MAX_BLOCK_S, Reader
from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.names import SCRIPTED, resolve, served_name
from tasks.observe.board import MetricsBoard
from tasks.observe.live import LiveCell
from tasks.process.clients import connect
from tasks.process.memory import settle
from tasks.process.settings import WebSettings
from tasks.process.tracing import open_tracer
from tasks.protocol.broker import build_broker
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter

log = logging.getLogger(__name__)


def run(settings: WebSettings) -> None:
    """The whole life of the process: returns after SIGTERM or SIGINT.

    Raises ModelError, CheckpointError or TokenizerError for a model that cannot be used.
    """
    limits = application_settings(settings)
    keys = key_file(settings)
    listener = _listen(settings, limits)
    redis = connect(settings.redis_url, use="short")
    records = RequestRecords(
        redis,
        stream_ttl_s=settings.stream_ttl_s,
        first_token_deadline_ms=settings.first_token_deadline_s * 1000,
        store_ttl_s=settings.store_days * 86_400,
        store_max=settings.store_max,
    )
    submitter = Submitter(records, build_broker(connect(settings.redis_url, use="queue")), redis)
    reader_id = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
    blocking = connect(settings.redis_url, use="blocking", max_connections=2, max_block_s=MAX_BLOCK_S)
    reader = Reader(blocking, redis, reader_id, records)
    model, edge = text_edge_of(settings)
    application = create_app(
        text_edges={model: edge},
        records=records,
        submitter=submitter,
        reader=reader,
        live=LiveCell(redis),
        settings=limits,
        keys=keys,
        board=MetricsBoard(redis),
        tracer=open_tracer(os.environ, "web", reader_id),
    )
    # The reader's thread must not keep the event loop from running for a whole default interval of 5 ms.
    sys.setswitchinterval(0.001)
    settle()
    log.info("%s serves %s", reader_id, model)
    Server(application).run(sockets=[listener])


def text_edge_of(settings: WebSettings) -> tuple[str, TextEdge]:
    """The name under which the model is served, and its text edge."""
    if settings.model == SCRIPTED:
        return SCRIPTED, scripted_text_edge()
    return served_name(settings.model), open_text_edge(open_checkpoint(resolve(settings.model, settings.cache_dir)))


def application_settings(settings: WebSettings) -> ApplicationSettings:
    return ApplicationSettings(max_waiting=settings.max_waiting, cors_origins=settings.cors_origins)


def key_file(settings: WebSettings) -> KeyFile | None:
    """Who is let in. Ends the process if the file cannot be used."""
    if settings.api_keys_file is None:
        return None
    try:
        return KeyFile(settings.api_keys_file)
    except KeyFileError as error:
        sys.exit(f"API_KEYS_FILE: {error}")


def _listen(settings: WebSettings, limits: ApplicationSettings) -> socket.socket:
    try:
        return listen(settings.host, settings.port, stall_limit_s=limits.stall_limit_s)
    except OSError as error:
        sys.exit(f"cannot listen on HOST={settings.host} PORT={settings.port}: {error}")
