"""`POST /tokenize` and `POST /detokenize`, also under /v1: what a model's tokenizer makes of a text, and back.

Owns the two contracts. The prompt of messages is the one that a chat request with them would have. Shapes as in
other servers; nothing here needs a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response
from redis.exceptions import RedisError

from app.contract.fields import Field, read_body
from app.contract.generation import GENERATION_FIELDS, check_token_ids
from app.contract.kinds import Boolean, Text, TokenIds
from app.contract.messages import Messages
from app.dialect.conversation import PromptError
from app.errors import invalid, model_not_found, prompt_refused
from app.http.body import json_body, parsed
from app.text.edge import TextEdge
from tasks.protocol.record import RequestRecords

TOKENIZE_FIELDS: Mapping[str, Field] = {
    "model": GENERATION_FIELDS["model"],
    "prompt": Field(Text(), note="A plain text."),
    "messages": Field(Messages(), note="A conversation, in place of a prompt: the tokens that a chat would have."),
    "add_special_tokens": Field(
        Boolean(), default=True, note="What a prompt begins with, where the model wants it. Messages have it always."
    ),
}

DETOKENIZE_FIELDS: Mapping[str, Field] = {
    "model": GENERATION_FIELDS["model"],
    "tokens": Field(TokenIds(min_items=0), is_required=True, note="Control tokens are shown by their names."),
}


class Tokenize:
    def __init__(
        self, text_edges: Mapping[str, TextEdge], records: RequestRecords, *, max_body_bytes: int, pool: Executor
    ) -> None:
        self._text_edges = text_edges
        self._records = records
        self._max_body_bytes = max_body_bytes
        self._pool = pool

    async def on_post(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._max_body_bytes)
        model, token_ids = await parsed(body, self._tokens, self._pool)
        limit = await asyncio.get_running_loop().run_in_executor(self._pool, self._max_model_len, model)
        resp.media = {"tokens": token_ids, "count": len(token_ids), "max_model_len": limit}

    async def on_post_back(self, req: Request, resp: Response) -> None:
        body = await json_body(req, self._max_body_bytes)
        resp.content_type = MEDIA_JSON
        resp.data = await parsed(body, self._text, self._pool)

    def _tokens(self, body: bytes) -> tuple[str, list[int]]:
        values = read_body(body, TOKENIZE_FIELDS)
        edge = self._edge(values)
        if (values["prompt"] is None) == (values["messages"] is None):
            raise invalid("prompt", "Either prompt or messages must be given, and not both.")
        try:
            if values["messages"] is not None:
                return values["model"], edge.render_chat(values["messages"])
            return values["model"], edge.encode(values["prompt"], add_special_tokens=values["add_special_tokens"])
        except PromptError as error:
            raise prompt_refused(error) from error

    def _text(self, body: bytes) -> bytes:
        values = read_body(body, DETOKENIZE_FIELDS)
        edge = self._edge(values)
        check_token_ids(values["tokens"], edge.vocab_size, "tokens")
        return orjson.dumps({"prompt": edge.decode(values["tokens"])})

    def _edge(self, values: Mapping[str, Any]) -> TextEdge:
        edge = self._text_edges.get(values["model"])
        if edge is None:
            raise model_not_found(values["model"], self._text_edges)
        return edge

    def _max_model_len(self, model: str) -> int | None:
        """What every live worker can take, prompt and answer together; None if none is known at the moment."""
        try:
            workers = [info for info, _ in self._records.workers(model)]
        except RedisError:
            return None
        return min((min(info.max_model_len, info.kv_cache_tokens) for info in workers), default=None)
