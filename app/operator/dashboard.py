"""`GET /`: the dashboard, one page with its style and script, and what it asks for: live pictures and timelines.

Owns the files of the page and the headers that keep a page from loading or sending anything elsewhere. The page
itself is open to everybody and holds nothing; with API keys its data needs one, as everything else does.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from falcon import HTTP_304
from falcon.asgi import Request, Response
from redis.exceptions import RedisError

from app.errors import ApiError, queue_unreachable
from app.http.connection import CONNECTION
from app.operator.picture import facts_of, timeline
from app.operator.viewers import Viewers
from tasks.observe.live import LiveCell
from tasks.protocol import keys
from tasks.protocol.record import RequestRecords

MAX_ID_LENGTH = 200

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("dashboard.html", "text/html; charset=utf-8"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard/icon.svg": ("icon.svg", "image/svg+xml"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/dashboard/playground.js": ("playground.js", "text/javascript; charset=utf-8"),
    "/dashboard/server.js": ("server.js", "text/javascript; charset=utf-8"),
}
"""Path to file and media type."""

HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    data: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, PageFile]:
    found = {}
    for path, (name, media_type) in FILES.items():
        data = (files("app.operator") / "page" / name).read_bytes()
        found[path] = PageFile(data, media_type, f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return found


class Page:
    """The files, from memory."""

    def __init__(self) -> None:
        self._files = read_files()

    async def on_get(self, req: Request, resp: Response) -> None:
        file = self._files[req.path]
        resp.set_headers({**HEADERS, "etag": file.etag})
        if file.etag in (req.get_header("if-none-match") or ""):
            resp.status = HTTP_304
            return
        resp.content_type = file.media_type
        resp.data = file.data

    on_head = on_get


class Pictures:
    """The live picture as server-sent events, one a second; see `app.operator.picture.Picture`."""

    def __init__(self, viewers: Viewers) -> None:
        self._viewers = viewers

    async def on_get(self, req: Request, resp: Response) -> None:
        viewer = self._viewers.join()
        connection = req.scope[CONNECTION]
        connection.name = "dashboard"
        connection.at_end(lambda: self._viewers.leave(viewer))
        connection.on_gone(viewer.end)
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("cache-control", "no-cache")
        resp.set_header("x-accel-buffering", "no")
        resp.stream = viewer


class Timeline:
    """`GET /dashboard/requests/{id}`: what happened to one request, as far as Redis still has it."""

    def __init__(self, live: LiveCell, records: RequestRecords, pool: Executor) -> None:
        self._live = live
        self._records = records
        self._pool = pool

    async def on_get(self, req: Request, resp: Response, request_id: str) -> None:
        if len(request_id) > MAX_ID_LENGTH:
            raise not_kept(request_id)
        try:
            resp.media = await asyncio.get_running_loop().run_in_executor(self._pool, self._read, request_id)
        except RedisError as error:
            raise queue_unreachable() from error

    def _read(self, request_id: str) -> dict[str, Any]:
        state = self._records.state(request_id)
        facts = facts_of(self._live.facts_of(request_id, keys.KEPT_EVENTS))
        if state is None and not facts:
            raise not_kept(request_id)
        return timeline(request_id, state, facts)


def not_kept(request_id: str) -> ApiError:
    return ApiError(
        404,
        f"Nothing is kept here of a request `{request_id[:100]}`: it never was, or it is older than the last facts "
        "in Redis. The catalog keeps what happened for longer: `tokenferry request ID` shows it.",
        code="request_not_found",
        param="request_id",
    )
