"""A request's body on its way from the socket to a checked value.

Owns how much is read, and where it is parsed: a large body, or one with a schema, in a worker thread, so that it does
not hold up the streams. Refuses to know what is in it (`app.contract.fields`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from falcon.asgi import Request

from app.errors import body_too_large, malformed

INLINE_BODY_BYTES = 16_384
_MAY_TAKE_LONG = (b'"tools"', b'"json_schema"')
"""A schema can take a while to check, however short it is."""

T = TypeVar("T")


async def json_body(req: Request, max_bytes: int) -> bytes:
    """The whole body of a request that says that it is JSON.

    Raises ApiError, for a body that is too large as soon as that is known; the rest is left to the HTTP server.
    """
    check_headers(req.content_type, req.get_header("content-encoding"))
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


async def parsed(body: bytes, parse: Callable[[bytes], T], pool: Executor) -> T:
    """What `parse` makes of it. Raises what `parse` raises."""
    if len(body) <= INLINE_BODY_BYTES and not any(name in body for name in _MAY_TAKE_LONG):
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(pool, parse, body)


def check_headers(content_type: str | None, content_encoding: str | None) -> None:
    """Raises ApiError unless the body claims to be plain JSON. A missing content type is taken for JSON."""
    if content_encoding and content_encoding.strip().lower() != "identity":
        raise malformed("Compressed request bodies are not supported.", "unsupported_content_encoding")
    media_type = (content_type or "application/json").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise malformed(
            "The request body must be JSON, with content type application/json.", "unsupported_content_type"
        )
