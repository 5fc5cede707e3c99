"""`POST /v1/chat/completions`: one request from its bytes to its answer.

Owns the order of the steps; each step is somebody else's. Refuses to know Redis. What may block (admission) or takes
long (a large body, a long prompt) runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response
from redis.exceptions import RedisError

from app.admission import Admission
from app.answers import Closer, OpenAnswers
from app.disconnect import CONNECTION, OUTLET, Connection
from app.errors import body_too_large, failed_here, invalid, model_not_found, queue_unreachable
from app.openai_in import ChatCall, check_headers, parse_chat
from app.openai_out import ChunkStream, Head, completion
from app.text_edge import Detokenizer, PromptError, TextEdge
from bridge.collect import collect
from bridge.relay import ClientGone, Relay
from bridge.subscription import Subscription

logger = logging.getLogger(__name__)

INLINE_BODY_BYTES = 16_384
"""Larger bodies are parsed and encoded in a worker thread, so that they do not hold up the other streams."""


class Subscribes(Protocol):
    """`bridge.reader.Reader`, as far as it is used here."""

    reader_id: str

    def subscribe(self, request_id: str, after_index: int = -1) -> Subscription: ...


@dataclass(frozen=True, slots=True)
class ChatSettings:
    max_body_bytes: int
    keep_alive_s: float


class ChatCompletions:
    def __init__(
        self,
        *,
        text_edges: Mapping[str, TextEdge],
        admission: Admission,
        reader: Subscribes,
        answers: OpenAnswers,
        closer: Closer,
        pool: Executor,
        settings: ChatSettings,
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._text_edges = text_edges
        self._admission = admission
        self._reader = reader
        self._answers = answers
        self._closer = closer
        self._pool = pool
        self._settings = settings
        self._new_id = new_id
        self._new_seed = new_seed
        self._clock = clock

    async def on_post(self, req: Request, resp: Response) -> None:
        self._answers.check_accepting()
        request_id = self._new_id()
        resp.set_header("x-request-id", request_id)
        call, edge, prompt_token_ids = await self._read(req)
        detokenizer = edge.detokenizer(call.stop)
        head = await self._admit(request_id, call, edge, prompt_token_ids)
        # From here on somebody must end the generation, whatever happens: the relay or `_answer`.
        subscription = self._subscribe(request_id, req.scope[CONNECTION])
        if call.stream:
            self._stream(req, resp, subscription, ChunkStream(head, detokenizer, call.include_usage))
        else:
            await self._answer(resp, subscription, head, detokenizer)

    async def _read(self, req: Request) -> tuple[ChatCall, TextEdge, list[int]]:
        check_headers(req.content_type, req.get_header("content-encoding"))
        body = await read_body(req, self._settings.max_body_bytes)
        if len(body) <= INLINE_BODY_BYTES:
            return self._parse(body)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._parse, body)

    def _parse(self, body: bytes) -> tuple[ChatCall, TextEdge, list[int]]:
        call = parse_chat(body)
        edge = self._text_edges.get(call.model)
        if edge is None:
            raise model_not_found(call.model)
        try:
            return call, edge, edge.render_chat(call.messages)
        except PromptError as error:
            raise invalid(error.param, error.message) from error

    async def _admit(self, request_id: str, call: ChatCall, edge: TextEdge, prompt_token_ids: list[int]) -> Head:
        now_s = self._clock()
        admit = partial(
            self._admission.admit,
            request_id,
            call,
            prompt_token_ids,
            edge.eos_token_ids,
            seed=self._new_seed(),
            created_ms=int(now_s * 1000),
        )
        try:
            limits = await asyncio.get_running_loop().run_in_executor(self._pool, admit)
        except RedisError as error:
            # It may be on offer nevertheless: the reply was lost. Nobody would read it.
            self._closer.close_soon(request_id, "cancelled", "not_accepted")
            logger.warning("%s refused, Redis not reachable: %s", request_id, error)
            raise queue_unreachable() from error
        return Head(request_id, int(now_s), call.model, limits.fingerprint, len(prompt_token_ids))

    def _subscribe(self, request_id: str, connection: Connection) -> Subscription:
        connection.name = request_id
        subscription = self._reader.subscribe(request_id)
        self._answers.add(subscription)
        connection.at_end(partial(self._answers.discard, subscription))
        connection.on_gone(lambda: subscription.fail(ClientGone()))
        return subscription

    def _stream(self, req: Request, resp: Response, subscription: Subscription, chunks: ChunkStream) -> None:
        close_request = partial(self._closer.close_soon, subscription.request_id)
        relay = Relay(
            subscription,
            chunks,
            close_request,
            keep_alive_s=self._settings.keep_alive_s,
            outlet=req.scope.get(OUTLET),
        )
        req.scope[CONNECTION].at_end(relay.finish)
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("cache-control", "no-cache")
        # nginx would otherwise collect the events before passing them on.
        resp.set_header("x-accel-buffering", "no")
        resp.stream = relay

    async def _answer(self, resp: Response, subscription: Subscription, head: Head, detokenizer: Detokenizer) -> None:
        close_request = partial(self._closer.close_soon, head.request_id)
        try:
            answer = await collect(subscription, detokenizer, close_request)
        except ClientGone:
            close_request("cancelled", "disconnect")
            return
        except Exception as error:
            close_request("cancelled", getattr(error, "reason", "reader_lost"))
            raise failed_here(error) from error
        resp.content_type = MEDIA_JSON
        if answer.end.worker:
            resp.set_header("x-worker", answer.end.worker)
        resp.data = orjson.dumps(completion(head, answer))


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
