"""`GET /openapi.json`: the whole contract as an OpenAPI 3.1 document.

Owns the list of operations. What a request may hold comes from the tables that check it, and what a response holds
from `app.reference.shapes`, so the document cannot say anything else than the server does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import orjson
from falcon import MEDIA_JSON
from falcon.asgi import Request, Response

from app.contract.chat import CHAT_FIELDS
from app.contract.completion import COMPLETION_FIELDS
from app.contract.fields import Field
from app.endpoints.stored import DEFAULT_LIMIT, MAX_LIMIT, UPDATE_FIELDS
from app.endpoints.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from app.reference.shapes import SCHEMAS, Schema, ref

ERRORS: Mapping[int, str] = {
    400: "The request is wrong: `param` names the field, and the message says what to do.",
    401: "The server has API keys, and the request has none of them.",
    404: "There is no such model, or no such completion.",
    405: "The path does not take this method; `Allow` has those that it takes.",
    409: "The idempotency key was used for another request, or the completion is not over yet.",
    413: "The body is too large.",
    429: "Too many requests are waiting; `Retry-After` says when to come back.",
    500: "The server had an error.",
    503: "No worker serves the model, or the queue cannot be reached; `Retry-After` says when to come back.",
}
ALWAYS = (401, 405)
BODY = (400, 404, 413)
GENERATING = (409, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    answer: str
    """The schema of a good response."""
    fields: Mapping[str, Field] | None = None
    chunk: str | None = None
    """The schema of the events of a streamed response."""
    errors: tuple[int, ...] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)


WISHES: Mapping[str, Schema] = {
    "Idempotency-Key": {
        "type": "string",
        "pattern": "^[!-~]{1,255}$",
        "description": "The same request with the same key is generated once, the second one joins the "
        "answer; after a failure it is generated anew.",
    },
    "X-Disconnect": {
        "type": "string",
        "enum": ["cancel", "continue"],
        "description": "What becomes of the answer when its client disconnects.",
    },
}


def _known_answers(path: str, answer: str, chunk: str) -> tuple[Operation, ...]:
    one = f"{path}/{{completion_id}}"
    return (
        Operation(
            "get",
            one,
            "How far an answer is and what is known of it, or with `stream` the rest of it as events.",
            answer,
            chunk=chunk,
            errors=(400, 404, 500, 503),
            query={
                "stream": {"type": "boolean"},
                "starting_after": {"type": "string", "description": "The id of the last event that the client has."},
            },
        ),
        Operation("post", f"{one}/cancel", "End an answer.", answer, errors=(404, 500, 503)),
    )


PAGE: Mapping[str, Schema] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
    "after": {"type": "string", "minLength": 1, "description": "The id of the last one on the page before."},
    "order": {"type": "string", "enum": ["asc", "desc"], "default": "asc", "description": "By the time."},
}


def _stored(path: str) -> tuple[Operation, ...]:
    one, failures = f"{path}/{{completion_id}}", (400, 500, 503)
    search: Mapping[str, Schema] = {
        "model": {"type": "string"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
    }
    return (
        Operation(
            "get",
            path,
            "Stored answers that have finished.",
            "ChatCompletionList",
            errors=failures,
            query={**PAGE, **search},
        ),
        Operation(
            "get",
            f"{one}/messages",
            "What a stored answer answers.",
            "ChatCompletionMessageList",
            errors=(404, *failures),
            query=PAGE,
        ),
        Operation(
            "post",
            one,
            "Replace the metadata of a stored answer.",
            "ChatCompletionState",
            UPDATE_FIELDS,
            errors=(*BODY, 500, 503),
        ),
        Operation("delete", one, "Delete a stored answer.", "ChatCompletionDeleted", errors=(404, 409, 500, 503)),
    )


def _everywhere(path: str, summary: str, answer: str, fields: Mapping[str, Field]) -> tuple[Operation, ...]:
    return tuple(Operation("post", f"{prefix}{path}", summary, answer, fields, None, BODY) for prefix in ("", "/v1"))


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        "ChatCompletion",
        CHAT_FIELDS,
        "ChatCompletionChunk",
        BODY + GENERATING,
        headers=WISHES,
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue texts.",
        "Completion",
        COMPLETION_FIELDS,
        "Completion",
        BODY + GENERATING,
        headers=WISHES,
    ),
    *_known_answers("/v1/chat/completions", "ChatCompletionState", "ChatCompletionChunk"),
    *_stored("/v1/chat/completions"),
    *_known_answers("/v1/completions", "CompletionState", "Completion"),
    Operation("get", "/v1/models", "The models that are served.", "ModelList"),
    Operation("get", "/v1/models/{model}", "One of the models.", "Model", errors=(404,)),
    *_everywhere("/tokenize", "A text or a conversation to tokens.", "Tokens", TOKENIZE_FIELDS),
    *_everywhere("/detokenize", "Tokens to text.", "Text", DETOKENIZE_FIELDS),
    Operation("get", "/livez", "The process runs.", "Health"),
    Operation("get", "/readyz", "A request would be answered.", "Health"),
)


def document(models: Sequence[str]) -> dict[str, Any]:
    """For a server that serves these models."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, models)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tokenferry",
            "version": version("tokenferry"),
            "description": "Language models behind the OpenAI API. Fields that are not listed are ignored, and null"
            " is the same as an absent field.",
        },
        "paths": paths,
        "components": {
            "schemas": SCHEMAS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def body_schema(fields: Mapping[str, Field], models: Sequence[str]) -> Schema:
    """What the table of fields takes."""
    properties = {name: _property(field) for name, field in fields.items()}
    if "model" in properties:
        properties["model"]["enum"] = list(models)
    return {
        "type": "object",
        "required": [name for name, field in fields.items() if field.is_required],
        "properties": properties,
    }


def _property(field: Field) -> Schema:
    schema = field.kind.schema()
    if not field.is_required:
        schema = {"anyOf": [schema, {"type": "null"}]}
    note = field.note if field.policy == "applied" else f"{field.policy.capitalize()}. {field.note}"
    return {**schema, "description": note} if note else schema


def _operation(operation: Operation, models: Sequence[str]) -> dict[str, Any]:
    content: dict[str, Any] = {MEDIA_JSON: {"schema": ref(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "itemSchema": _event(operation.chunk)}
    responses = {"200": {"description": operation.summary, "content": content}}
    for status in sorted({*ALWAYS, *operation.errors}):
        responses[str(status)] = {
            "description": ERRORS[status],
            "content": {MEDIA_JSON: {"schema": ref("Error")}},
        }
    if operation.path == "/readyz":
        responses["503"] = {"description": "It would not.", "content": {MEDIA_JSON: {"schema": ref("Health")}}}
    found: dict[str, Any] = {
        "operationId": f"{operation.method}{re.sub(r'[/{}.]+', '_', operation.path)}".rstrip("_"),
        "summary": operation.summary,
        "responses": responses,
    }
    if operation.fields is not None:
        schema = body_schema(operation.fields, models)
        found["requestBody"] = {"required": True, "content": {MEDIA_JSON: {"schema": schema}}}
    parameters = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "enum": list(models)} if name == "model" else {"type": "string"},
        }
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    for place, schemas in (("query", operation.query), ("header", operation.headers)):
        parameters += [_parameter(name, place, schema) for name, schema in schemas.items()]
    if parameters:
        found["parameters"] = parameters
    return found


def _parameter(name: str, place: str, schema: Schema) -> dict[str, Any]:
    style = {"style": "deepObject", "explode": True} if schema["type"] == "object" else {}
    return {"name": name, "in": place, "schema": schema, **style}


def _event(chunk: str) -> Schema:
    """One server-sent event: its data is a chunk, or an error that ends the stream, and at last `[DONE]`."""
    data = {
        "type": "string",
        "contentMediaType": MEDIA_JSON,
        "contentSchema": {"anyOf": [ref(chunk), ref("Error")]},
        "description": "The last event of a complete answer has `[DONE]` here.",
    }
    return {"type": "object", "required": ["data"], "properties": {"id": {"type": "string"}, "data": data}}


class OpenApi:
    def __init__(self, models: Sequence[str]) -> None:
        self._document = orjson.dumps(document(models))

    async def on_get(self, req: Request, resp: Response) -> None:
        resp.content_type = MEDIA_JSON
        resp.data = self._document

    on_head = on_get
