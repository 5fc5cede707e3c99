"""A request's body on its way from the socket to a checked value.

Owns how much is read, and where it is parsed: a large body in a worker thread, so that it does not hold up the
streams. Refuses to know what is in it (`app.fields`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from falcon.asgi import Request

from app.errors import body_too_large
from app.fields import check_headers

INLINE_BODY_BYTES = 16_384

T = TypeVar("T")


async def parsed_body(req: Request, parse: Callable[[bytes], T], *, max_bytes: int, pool: Executor) -> T:
    """What `parse` makes of the body. Raises ApiError, and what `parse` raises."""
    check_headers(req.content_type, req.get_header("content-encoding"))
    body = await read_body(req, max_bytes)
    if len(body) <= INLINE_BODY_BYTES:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(pool, parse, body)


async def read_body(req: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ApiError once it is known to be too large; the rest is left to the HTTP server."""
    if (req.content_length or 0) > max_bytes:
        raise body_too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    async for part in req.stream:
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise body_too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)
