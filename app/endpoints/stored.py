"""`/v1/chat/completions`, of what is stored: the list, the messages of one, its metadata, and its end.

Owns what a client may ask of a list, and the JSON of lists. Refuses to know how an answer is rendered
(`app.answers.delivery`), and what becomes stored (`tasks.protocol.stored`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response

from app.answers.delivery import Answering, owner_of
from app.contract.fields import Field, read_body
from app.contract.generation import METADATA
from app.endpoints.known import KnownAnswers
from app.errors import completion_not_found, completion_not_over, completion_not_stored, invalid
from app.http.body import json_body
from app.render.spec import AnswerSpec, SpecError, decode_spec
from tasks.protocol.stored import StoredAnswers

log = logging.getLogger(__name__)

MAX_LIMIT = 100
DEFAULT_LIMIT = 20
CHUNK = 200
"""How many are looked at in one call."""

UPDATE_FIELDS: Mapping[str, Field] = {
    "metadata": Field(METADATA, is_required=True, note="Takes the place of all that was there; {} leaves none."),
}

_LIMIT = re.compile(r"\d{1,3}", re.ASCII)
_METADATA = re.compile(r"metadata\[([^\[\]]+)\]")


@dataclass(frozen=True, slots=True)
class Listing:
    """A part of a list."""

    limit: int
    after: str
    """The id before its first; empty: it begins where the list begins."""
    newest_first: bool


@dataclass(frozen=True, slots=True)
class Filter:
    models: frozenset[str]
    metadata: Mapping[str, str] = field(default_factory=dict)

    def takes(self, spec: AnswerSpec) -> bool:
        return spec.model in self.models and self.metadata.items() <= spec.metadata.items()


class StoredCompletions:
    def __init__(
        self,
        *,
        models: Sequence[str],
        answering: Answering,
        known: KnownAnswers,
        stored: StoredAnswers,
        max_body_bytes: int,
    ) -> None:
        self._models = frozenset(models)
        self._answering = answering
        self._known = known
        self._stored = stored
        self._max_body_bytes = max_body_bytes

    async def show_list(self, req: Request, resp: Response) -> None:
        page = page_of(req)
        model = req.get_param("model")
        wanted = Filter(self._models if model is None else self._models & {model}, metadata_of(req))
        specs = await self._answering.in_thread(partial(self._find, owner_of(req), page, wanted))
        items = [(spec.request_id, await self._answering.stored(spec)) for spec in specs[: page.limit]]
        shown = [(name, orjson.Fragment(data)) for name, data in items if data is not None]
        _send(resp, _listing(shown, has_more=len(specs) > page.limit))

    async def on_get(self, req: Request, resp: Response, completion_id: str) -> None:
        await self._known.on_get(req, resp, completion_id)

    async def on_head(self, req: Request, resp: Response, completion_id: str) -> None:
        await self._known.on_head(req, resp, completion_id)

    async def on_post(self, req: Request, resp: Response, completion_id: str) -> None:
        values = read_body(await json_body(req, self._max_body_bytes), UPDATE_FIELDS)
        spec = replace(await self._spec(req, resp, completion_id), metadata=dict(values["metadata"]))
        self._answering.choice_texts(spec)  # what is not served here cannot be shown afterwards
        if not await self._answering.in_thread(partial(self._stored.amend, spec.request_id, spec.encode())):
            raise completion_not_found(completion_id)
        resp.content_type = MEDIA_JSON
        resp.data = await self._answering.state(spec)

    async def on_delete(self, req: Request, resp: Response, completion_id: str) -> None:
        spec = await self._spec(req, resp, completion_id)
        match await self._answering.in_thread(partial(self._stored.delete, spec.request_id, spec.owner)):
            case "unknown":
                raise completion_not_found(completion_id)
            case "open":
                raise completion_not_over(completion_id)
        _send(resp, {"object": "chat.completion.deleted", "id": spec.request_id, "deleted": True})

    async def on_get_messages(self, req: Request, resp: Response, completion_id: str) -> None:
        page = page_of(req)
        spec = await self._spec(req, resp, completion_id)
        data = await self._answering.in_thread(partial(self._stored.messages, spec.request_id))
        if data is None:
            raise completion_not_found(completion_id)
        messages = [
            (name := f"{spec.request_id}-{number}", {"id": name, **message, "content_parts": None})
            for number, message in enumerate(orjson.loads(data))
        ]
        if page.newest_first:
            messages.reverse()
        start = 0
        if page.after:
            names = [name for name, _ in messages]
            if page.after not in names:
                raise invalid("after", "after must be the id of one of these messages.")
            start = names.index(page.after) + 1
        rest = messages[start:]
        _send(resp, _listing(rest[: page.limit], has_more=len(rest) > page.limit))

    async def _spec(self, req: Request, resp: Response, completion_id: str) -> AnswerSpec:
        """Raises ApiError."""
        spec = await self._known.spec(req, completion_id)
        if not spec.store:
            raise completion_not_stored(completion_id)
        resp.set_header("x-request-id", spec.request_id)
        return spec

    def _find(self, owner: str, page: Listing, wanted: Filter) -> list[AnswerSpec]:
        """What is on the page, and one more if there is more. Blocking. Raises ApiError."""
        found: list[AnswerSpec] = []
        after = page.after
        while True:
            rows = self._stored.page(owner, after, newest_first=page.newest_first, count=CHUNK)
            if rows is None and after == page.after:
                raise invalid("after", "after must be the id of a stored completion.")
            for request_id, answer in rows or ():
                spec = _readable(request_id, answer)
                if spec is not None and wanted.takes(spec):
                    found.append(spec)
                if len(found) > page.limit:
                    return found
            if rows is None or len(rows) < CHUNK:
                return found
            after = rows[-1][0]


def page_of(req: Request) -> Listing:
    """Raises ApiError for a parameter that has no meaning."""
    limit = req.get_param("limit", default=str(DEFAULT_LIMIT))
    if not _LIMIT.fullmatch(limit) or not 1 <= int(limit) <= MAX_LIMIT:
        raise invalid("limit", f"limit must be a whole number from 1 to {MAX_LIMIT}.")
    order = req.get_param("order", default="asc")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    after = req.get_param("after")
    if after == "":
        raise invalid("after", "after must be the id of an item of the list.")
    return Listing(int(limit), after or "", order == "desc")


def metadata_of(req: Request) -> Mapping[str, str]:
    """The pairs that are looked for. Raises ApiError."""
    wanted = {}
    for name in req.params:
        if name.startswith("metadata"):
            found = _METADATA.fullmatch(name)
            if found is None:
                raise invalid("metadata", "metadata must be spelled metadata[key]=value.")
            wanted[found[1]] = req.get_param(name, default="")
    return wanted


def _readable(request_id: str, answer: bytes) -> AnswerSpec | None:
    """None if its time is over, or if it is of another version of this server."""
    if not answer:
        return None
    try:
        return decode_spec(answer)
    except SpecError as error:
        log.error("%s cannot be listed: %s", request_id, error)
        return None


def _listing(items: Sequence[tuple[str, Any]], *, has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": [item for _, item in items],
        "first_id": items[0][0] if items else None,
        "last_id": items[-1][0] if items else None,
        "has_more": has_more,
    }


def _send(resp: Response, value: Mapping[str, Any]) -> None:
    resp.content_type = MEDIA_JSON
    resp.data = orjson.dumps(value)
