"""A checked request to its answer over HTTP: put on offer, or joined, then streamed or gathered.

Owns what every generating endpoint does alike once it has an `Ask`, and how an answer is delivered from its spec:
the first time, to a second client with the same idempotency key, and to one that comes back for the rest. Refuses to
know Redis, and the JSON of requests. What may block runs in a worker thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response
from redis.exceptions import RedisError

from app.answers.admission import Admission, Admitted, Ask
from app.answers.closing import ClientPart, Closer
from app.answers.drain import OpenAnswers
from app.errors import ended_early, failed_here, invalid, model_not_found, queue_unreachable
from app.http.api_keys import KEY_NAME
from app.http.connection import CONNECTION, OUTLET
from app.http.exchange import EXCHANGE, Exchange
from app.render.chat import ChatShape, Shape
from app.render.choice import ChoiceText, text_machine
from app.render.chunks import ChunkStream
from app.render.completion import CompletionShape
from app.render.logprobs import TokenNames
from app.render.spec import AnswerSpec
from app.render.whole import WholeChoice, completion, num_cached_tokens, progress, workers_of
from app.text.edge import TextEdge
from bridge.streams.choices import ChoiceStreams, open_streams
from bridge.streams.collect import EndedEarly, collect
from bridge.streams.events import StreamLost
from bridge.streams.history import History
from bridge.streams.reader import Reader
from bridge.streams.relay import ClientGone, Relay
from bridge.streams.subscription import Waiting
from tasks.protocol.contract import TerminalEvent
from tasks.protocol.record import Idempotency, RequestRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KEY_LENGTH = 255
LONG_ANSWER = 4096
"""Tokens, those shown beside others too: more take milliseconds to render, and then the streams would wait for it."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the headers of a request ask for."""

    outlives_reader: bool
    idempotency: Idempotency | None


class Answering:
    def __init__(
        self,
        *,
        text_edges: Mapping[str, TextEdge],
        admission: Admission,
        records: RequestRecords,
        history: History,
        reader: Reader,
        answers: OpenAnswers,
        closer: Closer,
        pool: Executor,
        keep_alive_s: float,
    ) -> None:
        self._text_edges = text_edges
        self._names = {model: TokenNames(edge.token_name) for model, edge in text_edges.items()}
        self._admission = admission
        self._records = records
        self._history = history
        self._reader = reader
        self._answers = answers
        self._closer = closer
        self._pool = pool
        self._keep_alive_s = keep_alive_s
        self._minders: set[asyncio.Future[None]] = set()

    def check_accepting(self) -> None:
        """Raises ApiError once the process is shutting down."""
        self._answers.check_accepting()

    def check_room(self, body: bytes, wishes: Wishes) -> None:
        """Raises ApiError for a request that will not find room in the queue, whatever else is in it."""
        if wishes.idempotency is None:  # one with a key may have been accepted before
            self._admission.check_room_unread(body, self._text_edges)

    async def answer(self, req: Request, resp: Response, ask: Ask) -> None:
        """The whole way of a new request. Raises ApiError."""
        exchange: Exchange = req.scope[EXCHANGE]
        ask = replace(ask, spec=replace(ask.spec, owner=owner_of(req)), traceparent=exchange.span.traceparent)
        admitted = await self._admit(ask)
        spec = admitted.spec
        resp.set_header("x-request-id", spec.request_id)
        exchange.model = spec.model
        exchange.is_new = ask.is_read and not admitted.is_joined
        exchange.num_prompt_tokens = spec.num_prompt_tokens
        if admitted.is_joined:
            resp.set_header("x-idempotent-replay", "true")
        elif spec.stop and ask.outlives_reader:
            self._mind(spec)
        if not ask.is_read:
            resp.content_type = MEDIA_JSON
            resp.data = await self.state(spec)
            return
        await self.deliver(req, resp, spec, attach=admitted.is_joined)

    async def deliver(
        self,
        req: Request,
        resp: Response,
        spec: AnswerSpec,
        *,
        stream: bool | None = None,
        position: Sequence[int] | None = None,
        attach: bool = False,
    ) -> None:
        """Sends the answer from its start, or what comes after `position`; as the spec says, unless `stream` does.

        `attach` if this process is perhaps no reader of it yet. Raises ApiError.
        """
        texts = self.choice_texts(spec, position)
        # From here on somebody must leave the generation, whatever happens: the relay or the collector.
        connection = req.scope[CONNECTION]
        connection.name = spec.request_id
        part = ClientPart(self._closer, spec.choice_ids, spec.model)
        connection.at_end(part.end)
        if attach:
            await self._attach(spec, part)
        streams = open_streams(self._reader, spec.choice_ids, Waiting(asyncio.get_running_loop()))
        exchange: Exchange = req.scope[EXCHANGE]
        exchange.model = spec.model
        exchange.num_prompt_tokens = spec.num_prompt_tokens
        exchange.choices = texts
        streams.on_first_token(exchange.first_token)
        self._answers.add(streams)
        connection.at_end(partial(self._answers.discard, streams))
        connection.on_gone(lambda: streams.fail(ClientGone()))
        if spec.stream if stream is None else stream:
            self._stream(req, resp, streams, ChunkStream(spec, self.shape(spec), texts, position), part)
        else:
            await self._gather(req, resp, spec, streams, [WholeChoice(text) for text in texts], part)

    def shape(self, spec: AnswerSpec) -> Shape:
        names = self._names[spec.model]
        return ChatShape(names, spec) if spec.kind == "chat" else CompletionShape(names, spec)

    def choice_texts(self, spec: AnswerSpec, position: Sequence[int] | None = None) -> list[ChoiceText]:
        """Raises ApiError if the model is not served here."""
        edge = self._text_edges.get(spec.model)
        if edge is None:
            raise model_not_found(spec.model, self._text_edges)
        return [
            ChoiceText(
                spec,
                edge.detokenizer(spec.stop),
                text_machine(spec, number),
                -1 if position is None else position[number],
            )
            for number in range(spec.num_choices)
        ]

    async def state(self, spec: AnswerSpec) -> bytes:
        """How far the answer is, with what is known of it, as JSON. Raises ApiError."""
        choices = [WholeChoice(text) for text in self.choice_texts(spec)]
        try:
            data = await self.in_thread(partial(self._render_state, spec, choices))
        except StreamLost as error:
            raise failed_here(error) from error
        for number, one in enumerate(choices):
            if one.is_satisfied and one.end_event is None:
                # Whoever should have seen it is gone.
                self._closer.close_soon(spec.choice_ids[number], "finished", "stop", spec.model)
        return data

    async def stored(self, spec: AnswerSpec) -> bytes | None:
        """An answer that has finished, as JSON; None if it has gone meanwhile, or is damaged. Raises ApiError."""
        choices = [WholeChoice(text) for text in self.choice_texts(spec)]
        try:
            return await self.in_thread(partial(self._render_stored, spec, choices))
        except StreamLost as error:
            log.error("%s cannot be listed: %s", spec.request_id, error)
            return None

    def _render_stored(self, spec: AnswerSpec, choices: Sequence[WholeChoice]) -> bytes | None:
        """Blocking, and long for long answers."""
        for one, events in zip(choices, self._history.read(spec.choice_ids), strict=True):
            one.take(events)
        if any(one.end_event is None for one in choices):
            return None
        return orjson.dumps(completion(spec, self.shape(spec), choices))

    def _render_state(self, spec: AnswerSpec, choices: Sequence[WholeChoice]) -> bytes:
        """Blocking, and long for long answers."""
        record = self._records.state(spec.request_id)
        is_claimed = record is not None and record.state != "offered"
        for one, events in zip(choices, self._history.read(spec.choice_ids), strict=True):
            one.take(events)
        return orjson.dumps(progress(spec, self.shape(spec), choices, is_claimed))

    def _mind(self, spec: AnswerSpec) -> None:
        """Looks for the stop strings of an answer that nobody has to read: without that its worker would go on."""
        streams = open_streams(self._reader, spec.choice_ids, Waiting(asyncio.get_running_loop()))
        choices = [WholeChoice(text) for text in self.choice_texts(spec)]
        part = ClientPart(self._closer, spec.choice_ids, spec.model, is_reader=False)
        minder = asyncio.ensure_future(collect(streams, choices, part))
        self._minders.add(minder)
        minder.add_done_callback(self._minded)

    def _minded(self, minder: asyncio.Future[None]) -> None:
        self._minders.discard(minder)
        if not minder.cancelled() and (error := minder.exception()) is not None:
            # Whoever looks at the answer is told; and finds its stop strings, if nobody has seen them.
            log.info("an answer that outlives its readers is not minded any more: %r", error)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Runs what blocks. Raises ApiError when Redis is away."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, call)
        except RedisError as error:
            log.warning("Redis not reachable: %s", error)
            raise queue_unreachable() from error

    async def _admit(self, ask: Ask) -> Admitted:
        self._admission.check_room(ask)
        self._admission.num_under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._admission.admit, ask)
        except RedisError as error:
            # It may be on offer nevertheless: the reply was lost. Nobody would read it, except one that repeats it.
            may_be_asked_again = ask.idempotency is not None
            self._closer.give_up_soon(ask.spec.choice_ids, ask.spec.model, may_be_asked_again=may_be_asked_again)
            log.warning("%s refused, Redis not reachable: %s", ask.spec.request_id, error)
            raise queue_unreachable() from error
        finally:
            self._admission.num_under_way -= 1

    async def _attach(self, spec: AnswerSpec, part: ClientPart) -> None:
        try:
            await self.in_thread(partial(self._closer.attach, spec.choice_ids))
        except BaseException:
            part.leave(range(spec.num_choices))
            raise

    def _stream(
        self, req: Request, resp: Response, streams: ChoiceStreams, chunks: ChunkStream, part: ClientPart
    ) -> None:
        relay = Relay(streams, chunks, part, keep_alive_s=self._keep_alive_s, outlet=req.scope.get(OUTLET))
        req.scope[CONNECTION].at_end(relay.finish)
        exchange: Exchange = req.scope[EXCHANGE]
        exchange.num_cached_tokens = lambda: chunks.num_cached_tokens
        exchange.streams(lambda: relay.num_bytes_written)
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("cache-control", "no-cache")
        # nginx would otherwise collect the events before passing them on.
        resp.set_header("x-accel-buffering", "no")
        resp.stream = relay

    async def _gather(
        self,
        req: Request,
        resp: Response,
        spec: AnswerSpec,
        streams: ChoiceStreams,
        choices: list[WholeChoice],
        part: ClientPart,
    ) -> None:
        def ends() -> dict[int, TerminalEvent]:
            return {number: one.end_event for number, one in enumerate(choices) if one.end_event is not None}

        exchange: Exchange = req.scope[EXCHANGE]
        exchange.num_cached_tokens = lambda: num_cached_tokens(spec, ends())
        try:
            await collect(streams, choices, part)
        except ClientGone:
            return
        except EndedEarly as early:
            raise ended_early(early.end) from early
        except Exception as error:
            raise failed_here(error) from error
        resp.content_type = MEDIA_JSON
        if workers := workers_of(ends().values()):
            resp.set_header("x-worker", workers)
        render = partial(_rendered, spec, self.shape(spec), choices)
        num_shown = sum(one.text.num_tokens for one in choices) * (1 + (spec.num_logprobs or 0))
        resp.data = await self.in_thread(render) if num_shown > LONG_ANSWER else render()


def _rendered(spec: AnswerSpec, shape: Shape, choices: Sequence[WholeChoice]) -> bytes:
    return orjson.dumps(completion(spec, shape, choices))


def wishes_of(req: Request, body: bytes) -> Wishes:
    """Raises ApiError for a header that has no meaning."""
    on_disconnect = (req.get_header("x-disconnect") or "cancel").strip().lower()
    if on_disconnect not in ("cancel", "continue"):
        raise invalid("X-Disconnect", "The header X-Disconnect must be continue or cancel.")
    key = req.get_header("idempotency-key")
    if key is None:
        return Wishes(on_disconnect == "continue", None)
    if not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise invalid(
            "Idempotency-Key", f"The header Idempotency-Key must have from 1 to {MAX_KEY_LENGTH} characters."
        )
    # A digest, so that what a client sends never becomes a part of the name of a key in Redis.
    name = hashlib.sha256(b"\0".join([owner_of(req).encode(), key.encode()])).hexdigest()
    digest = hashlib.sha256(b"\0".join([req.path.encode(), body])).hexdigest()
    return Wishes(on_disconnect == "continue", Idempotency(name, digest))


def owner_of(req: Request) -> str:
    """In whose name the request is made; empty where there are no API keys."""
    return req.scope.get(KEY_NAME) or ""
