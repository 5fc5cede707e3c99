"""The shapes of what this server answers, as JSON Schema.

Owns the schemas that `/openapi.json` shows and that the tests hold real responses against. Refuses to know how a
response is made. Shapes are open: a client must bear more members than are listed.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def record(**members: Schema) -> Schema:
    """An object that has all of these."""
    return {"type": "object", "required": list(members), "properties": members}


def with_optional(schema: Schema, **members: Schema) -> Schema:
    """`schema`, an object that may have these, too."""
    return {**schema, "properties": {**schema["properties"], **members}}


def listing(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def constant(value: str) -> Schema:
    return {"type": "string", "const": value}


FINISH_REASON = either({"type": "string", "enum": ["stop", "length", "tool_calls", "content_filter"]}, NULL)

_TOKEN = record(token=STRING, logprob=NUMBER, bytes=either(listing({**INTEGER, "maximum": 255}), NULL))
_TOOL_CALL = record(id=STRING, type=constant("function"), function=record(name=STRING, arguments=STRING))
_MESSAGE = with_optional(
    record(role=constant("assistant"), content=either(STRING, NULL), refusal=either(STRING, NULL)),
    reasoning_content=STRING,
    tool_calls=listing(_TOOL_CALL),
)
_CHAT_LOGPROBS = either(record(content=listing(ref("TokenLogprob"))), NULL)
_TOKEN_IDS = listing(INTEGER)
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING}
_DELTA: Schema = {
    "type": "object",
    "properties": {
        "role": constant("assistant"),
        "content": either(STRING, NULL),
        "refusal": either(STRING, NULL),
        "reasoning_content": STRING,
        "tool_calls": listing(record(index=INTEGER)),
    },
}
_COMPLETION_LOGPROBS = either(
    record(
        tokens=listing(STRING),
        token_logprobs=listing(either(NUMBER, NULL)),
        top_logprobs=either(listing(either({"type": "object", "additionalProperties": NUMBER}, NULL)), NULL),
        text_offset=listing(INTEGER),
    ),
    NULL,
)
_USAGE_DETAILS = {
    "prompt_tokens_details": record(cached_tokens=INTEGER),
    "completion_tokens_details": record(reasoning_tokens=INTEGER),
}

_STATUS: Schema = {"type": "string", "enum": ["queued", "in_progress", "completed", "failed", "cancelled"]}


def _state(answer: str) -> Schema:
    return {"allOf": [ref(answer), record(status=_STATUS)]}


def _page(item: Schema) -> Schema:
    name = either(STRING, NULL)
    return record(
        object=constant("list"), data=listing(item), first_id=name, last_id=name, has_more={"type": "boolean"}
    )


SCHEMAS: dict[str, Schema] = {
    "Error": record(error=record(message=STRING, type=STRING, param=either(STRING, NULL), code=either(STRING, NULL))),
    "Usage": record(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER, **_USAGE_DETAILS),
    "TokenLogprob": {
        **_TOKEN,
        "required": [*_TOKEN["required"], "top_logprobs"],
        "properties": {**_TOKEN["properties"], "top_logprobs": listing(_TOKEN)},
    },
    "ChatCompletion": with_optional(
        record(
            **_HEAD,
            object=constant("chat.completion"),
            system_fingerprint=either(STRING, NULL),
            choices=listing(
                with_optional(
                    record(index=INTEGER, message=_MESSAGE, logprobs=_CHAT_LOGPROBS, finish_reason=FINISH_REASON),
                    token_ids=_TOKEN_IDS,
                )
            ),
            usage=ref("Usage"),
        ),
        prompt_token_ids=_TOKEN_IDS,
    ),
    "ChatCompletionChunk": with_optional(
        record(
            **_HEAD,
            object=constant("chat.completion.chunk"),
            system_fingerprint=either(STRING, NULL),
            choices=listing(
                with_optional(record(index=INTEGER, delta=_DELTA, finish_reason=FINISH_REASON), token_ids=_TOKEN_IDS)
            ),
        ),
        prompt_token_ids=_TOKEN_IDS,
    ),
    "Completion": record(
        **_HEAD,
        object=constant("text_completion"),
        system_fingerprint=either(STRING, NULL),
        choices=listing(
            with_optional(
                record(index=INTEGER, text=STRING, logprobs=_COMPLETION_LOGPROBS, finish_reason=FINISH_REASON),
                prompt_token_ids=_TOKEN_IDS,
                token_ids=_TOKEN_IDS,
            )
        ),
    ),
    "ChatCompletionList": _page(ref("ChatCompletion")),
    "ChatCompletionMessageList": _page(record(id=STRING, role=STRING, content=either(STRING, NULL))),
    "ChatCompletionDeleted": record(
        object=constant("chat.completion.deleted"), id=STRING, deleted={"type": "boolean"}
    ),
    "ChatCompletionState": _state("ChatCompletion"),
    "CompletionState": _state("Completion"),
    "Model": record(id=STRING, object=constant("model"), created=INTEGER, owned_by=STRING),
    "ModelList": record(object=constant("list"), data=listing(ref("Model"))),
    "Tokens": record(tokens=listing(INTEGER), count=INTEGER, max_model_len=either(INTEGER, NULL)),
    "Text": record(prompt=STRING),
    "Health": record(status=STRING),
}
