"""Cross-origin requests: which web pages may use this server from a browser.

Owns the `access-control-*` headers, on every response, errors too: without them a page cannot even read what was
wrong. Credentials are never allowed, so `*` gives a page nothing but what the server gives anybody.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from falcon.asgi import Request, Response

ANY = "*"

EXPOSED = "x-request-id, x-worker, x-idempotent-replay, openai-processing-ms, retry-after, www-authenticate"
PREFLIGHT_S = 86_400

_HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,2000}")


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
