"""The headers that every response has: which request it answers, how long that took, and which pages may read it.

Owns `x-request-id`, `openai-processing-ms` and the `access-control-*` headers. These are on errors, too: without them
a page cannot even read what was wrong. Credentials are never allowed, so `*` gives a page nothing but what the server
gives anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from uuid import uuid4

from falcon.asgi import Request, Response

from app.http.connection import ARRIVED_S

ANY = "*"

EXPOSED = "x-request-id, x-worker, x-idempotent-replay, openai-processing-ms, retry-after, www-authenticate"
PREFLIGHT_S = 86_400

_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")

_STARTED_S = "tokenferry.started_s"
_SANE_ID = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")


class ResponseHeaders:
    """Falcon middleware.

    `x-request-id` is what the client called its request, if that can stand in a header and in a log; else what the
    resource set (the id of a completion); else a fresh one. `openai-processing-ms` is the time from the arrival of
    the request's head until the response begins: for a stream until it was accepted, else the whole answer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    async def process_request(self, req: Request, resp: Response) -> None:
        req.scope[_STARTED_S] = req.scope.get(ARRIVED_S) or self._clock()

    async def process_response(self, req: Request, resp: Response, resource: object, req_succeeded: bool) -> None:
        given = req.get_header("x-request-id")
        if given is not None and _SANE_ID.fullmatch(given):
            resp.set_header("x-request-id", given)
        elif resp.get_header("x-request-id") is None:
            resp.set_header("x-request-id", f"req-{uuid4().hex}")
        started_s = req.scope.get(_STARTED_S)
        if started_s is not None:
            resp.set_header("openai-processing-ms", str(round((self._clock() - started_s) * 1000)))


class Cors:
    """Falcon middleware. `origins` as a browser spells them; `ANY` for all; empty: no page of another origin."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    async def process_response(self, req: Request, resp: Response, resource: object, req_succeeded: bool) -> None:
        origin = req.get_header("origin")
        if not self._origins or origin is None:
            return
        if ANY in self._origins:
            resp.set_header("access-control-allow-origin", ANY)
        else:
            resp.append_header("vary", "origin")
            if origin not in self._origins:
                return
            resp.set_header("access-control-allow-origin", origin)
        resp.set_header("access-control-expose-headers", EXPOSED)
        if req.method == "OPTIONS" and req_succeeded and req.get_header("access-control-request-method"):
            self._allow(req, resp)

    def _allow(self, req: Request, resp: Response) -> None:
        """The answer to a preflight: what Falcon says the path takes, and the headers that were asked for."""
        wanted = req.get_header("access-control-request-headers") or ""
        # `*` would leave `Authorization` out.
        headers = wanted if _HEADER_NAMES.fullmatch(wanted) else "authorization, content-type"
        resp.set_header("access-control-allow-methods", resp.get_header("allow") or "")
        resp.set_header("access-control-allow-headers", headers)
        resp.set_header("access-control-max-age", str(PREFLIGHT_S))
