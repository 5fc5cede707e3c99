"""`/v1/chat/completions/{id}`: an answer that was asked for before: how far it is, the rest of it, and its end.

Owns what a client may say about where it left. Refuses to know how an answer is delivered (`app.answers.delivery`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import partial

from falcon import MEDIA_JSON
from falcon.asgi import Request, Response

from app.answers.delivery import Answering, owner_of
from app.errors import ApiError, completion_not_found, internal_error, invalid
from app.render.spec import AnswerSpec, SpecError, decode_spec
from tasks.observe.metrics import Meter, count_end
from tasks.protocol.record import RequestRecords

log = logging.getLogger(__name__)

MAX_INDEX = 2**31
_POSITION = re.compile(r"-[12]|\d{1,10}", re.ASCII)


class KnownAnswers:
    def __init__(self, answering: Answering, records: RequestRecords, meter: Meter) -> None:
        self._answering = answering
        self._records = records
        self._meter = meter

    async def on_get(self, req: Request, resp: Response, completion_id: str) -> None:
        last_id = req.get_header("last-event-id")
        stream = _flag(req, "stream")
        if stream is None:
            stream = last_id is not None
        after = req.get_param("starting_after")
        if after is not None and not stream:
            raise invalid("starting_after", "starting_after may only be given when stream is true.")
        spec = await self.spec(req, completion_id)
        resp.set_header("x-request-id", spec.request_id)
        if not stream:
            await self._show(resp, spec)
            return
        self._answering.check_accepting()
        position = position_of(spec, after, last_id)
        await self._answering.deliver(req, resp, spec, stream=True, position=position, attach=True)

    async def on_head(self, req: Request, resp: Response, completion_id: str) -> None:
        """That of the state, whatever the query says: a stream has no head without being read."""
        spec = await self.spec(req, completion_id)
        resp.set_header("x-request-id", spec.request_id)
        await self._show(resp, spec)

    async def on_post_cancel(self, req: Request, resp: Response, completion_id: str) -> None:
        spec = await self.spec(req, completion_id)
        resp.set_header("x-request-id", spec.request_id)
        await self._answering.in_thread(partial(self._stop, spec))
        await self._show(resp, spec)

    async def _show(self, resp: Response, spec: AnswerSpec) -> None:
        resp.content_type = MEDIA_JSON
        resp.data = await self._answering.state(spec)

    async def spec(self, req: Request, completion_id: str) -> AnswerSpec:
        """That of an answer which is shown to whoever asks. Raises ApiError."""
        data = await self._answering.in_thread(partial(self._records.answer, completion_id))
        if not data:
            raise completion_not_found(completion_id)
        try:
            spec = decode_spec(data)
        except SpecError as error:
            log.error("%s cannot be shown: %s", completion_id, error)
            raise internal_error() from error
        if spec.owner != owner_of(req):
            raise completion_not_found(completion_id)
        return spec

    def _stop(self, spec: AnswerSpec) -> None:
        for choice_id in spec.choice_ids:
            if self._records.close(choice_id, "cancelled", "stopped"):
                count_end(self._meter, spec.model, "cancelled", "stopped")


def position_of(spec: AnswerSpec, starting_after: str | None, last_event_id: str | None) -> Sequence[int] | None:
    """What a client has, for each choice; None if it has nothing. Raises ApiError.

    An event source that connects again sends the id of its last event, with the address that it was made with: so
    the header is the newer of the two.
    """
    if last_event_id is not None:
        name, text = "Last-Event-ID", last_event_id
    elif starting_after is not None:
        name, text = "starting_after", starting_after
    else:
        return None
    numbers = text.strip().split(",")
    if len(numbers) != spec.num_choices or not all(_POSITION.fullmatch(number) for number in numbers):
        raise _no_position(name, spec.num_choices)
    position = [int(number) for number in numbers]
    if max(position) > MAX_INDEX:
        raise _no_position(name, spec.num_choices)
    return position


def _no_position(name: str, num_choices: int) -> ApiError:
    if num_choices == 1:
        return invalid(name, f"{name} must be the id of an event of this answer: a whole number from -1 on.")
    return invalid(
        name, f"{name} must be the id of an event of this answer: {num_choices} whole numbers, separated by commas."
    )


def _flag(req: Request, name: str) -> bool | None:
    value = req.get_param(name)
    if value is None:
        return None
    if value.lower() not in ("true", "false", "1", "0"):
        raise invalid(name, f"{name} must be true or false.")
    return value.lower() in ("true", "1")
