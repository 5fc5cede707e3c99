"""The headers that every response has: which request it answers, and how long that took.

Owns `x-request-id` and `openai-processing-ms`. Refuses to know what is answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from uuid import uuid4

from falcon.asgi import Request, Response

from app.http.connection import ARRIVED_S

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
