"""The contract as a document: it is valid, it is served, and it is what the tables and the clients say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import orjson
import pytest
from openai.types.chat import chat_completion_stream_options_param, completion_create_params

from app.contract.chat import CHAT_FIELDS
from app.contract.completion import COMPLETION_FIELDS
from app.contract.fields import Field
from app.endpoints.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from app.errors import ApiError
from app.reference.compatibility import page, values
from app.reference.openapi import OPERATIONS, body_schema, document
from app.reference.shapes import SCHEMAS
from tests.app.web import HELLO, MODEL, Web

ROOT = Path(__file__).parents[3]
TABLES = {
    "chat": CHAT_FIELDS,
    "completions": COMPLETION_FIELDS,
    "tokenize": TOKENIZE_FIELDS,
    "detokenize": DETOKENIZE_FIELDS,
}


async def test_it_is_served_for_the_models_of_the_server(web: Web) -> None:
    exchange = await web.request("GET", "/openapi.json")
    assert (exchange.status, exchange.headers["content-type"]) == (200, "application/json")
    assert exchange.json == orjson.loads(orjson.dumps(document([MODEL])))
    schema = exchange.json["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
    assert schema["application/json"]["schema"]["properties"]["model"]["enum"] == [MODEL]


async def test_every_operation_is_routed(web: Web) -> None:
    for operation in OPERATIONS:
        path = operation.path.replace("{model}", MODEL).replace("{completion_id}", "chatcmpl-1")
        exchange = await web.request("OPTIONS", path)
        assert operation.method.upper() in exchange.headers["allow"], path


@pytest.mark.parametrize("table", TABLES)
def test_every_request_body_has_a_schema_that_is_one(table: str) -> None:
    jsonschema_rs.Draft202012Validator(body_schema(TABLES[table], ["m"]))


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_response_has_a_schema_that_is_one(name: str) -> None:
    jsonschema_rs.Draft202012Validator({**SCHEMAS[name], "components": {"schemas": SCHEMAS}})


def test_every_field_that_openai_documents_for_chat_is_in_the_table() -> None:
    documented = set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    extensions = {name for name, field in CHAT_FIELDS.items() if field.is_extension}
    assert documented == set(CHAT_FIELDS) - extensions
    options = CHAT_FIELDS["stream_options"].kind.schema()["properties"]
    assert (
        chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__.keys() <= options.keys()
    )


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for table in TABLES.values() for name, field in table.items()]
)
def test_what_is_not_applied_says_why(name: str, field: Field) -> None:
    assert field.policy == "applied" or field.note
    assert not field.note or field.note.endswith(".")


CANDIDATES: list[Any] = [
    True, 0, 1, 2, 5, 128, 129, -1, 0.5, 2.5, 2**63, "", "x", "auto", "none", "x" * 513, [], ["a"], ["a"] * 5,
    [1, 2], [[1]], [[]], {}, {"type": "text"}, {"5": 1}, {"include_usage": True}, {"a": "b"}, ["text"],
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_of_a_field_takes_what_its_check_takes(table: str) -> None:
    num_taken = num_refused = 0
    for name, field in TABLES[table].items():
        schema = jsonschema_rs.Draft202012Validator(field.kind.schema())
        for value in CANDIDATES:
            try:
                field.kind.read(value, name)
            except ApiError:
                num_refused += not schema.is_valid(value)
            else:
                num_taken += 1
                assert schema.is_valid(value), (name, value)
    assert num_taken > 4
    assert num_refused > 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fails", [False, True])
async def test_answers_have_the_shapes_that_the_document_shows(
    web: Web, path: str, stream: bool, fails: bool
) -> None:
    chat = "chat" in path
    fields = {"messages": HELLO} if chat else {"prompt": "hi", "echo": True}
    whole, chunk = ("ChatCompletion", "ChatCompletionChunk") if chat else ("Completion", "Completion")
    worker = web.worker()
    body = orjson.dumps({"model": MODEL, "n": 2, "stream": stream, **fields})
    exchange = await web.request("POST", path, body)
    first = exchange.headers.get("x-request-id") or ("chatcmpl-1" if chat else "cmpl-1")
    for request_id in (first, f"{first}.1"):
        worker.claim(request_id)
        worker.append(request_id, 0, 101, 102, end="engine_error" if fails else "stop")
    await web.turn()
    if not stream:
        assert matches("Error" if fails else whole, exchange.json)
        return
    lines = [line[6:] for line in exchange.body.decode().split("\n") if line.startswith("data: ")]
    last = lines.pop()
    assert matches("Error", orjson.loads(last)) if fails else last == "[DONE]"
    assert len(lines) > 1
    assert all(matches(chunk, orjson.loads(line)) for line in lines)


def matches(name: str, value: Any) -> bool:
    schema = {**SCHEMAS[name], "components": {"schemas": SCHEMAS}}
    return jsonschema_rs.Draft202012Validator(schema).is_valid(value)


MESSAGES: list[Any] = [
    {"role": "user", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "x"}], "name": None},
    {"role": "user", "content": [{"type": "refusal", "refusal": "x"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "x"}]},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "x", "tool_calls": []},
    {
        "role": "assistant",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}],
    },
    {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "", "arguments": ""}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "x", "tool_call_id": "a"},
    {"role": "tool", "content": "x"},
    {"role": "robot", "content": "x"},
    {"role": "user"},
    "x",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_schema_of_a_message_takes_exactly_what_its_check_takes(message: Any) -> None:
    kind = CHAT_FIELDS["messages"].kind
    try:
        kind.read([message], "messages")
    except ApiError:
        is_taken = False
    else:
        is_taken = True
    assert jsonschema_rs.Draft202012Validator(kind.schema()).is_valid([message]) == is_taken


def test_the_page_in_docs_is_the_contract() -> None:
    assert (ROOT / "docs/compatibility.md").read_text() == page(), (
        "python -m app.reference.compatibility > docs/compatibility.md"
    )


def test_the_page_has_every_field_with_what_is_done_with_it() -> None:
    text = page()
    for table in TABLES.values():
        for name, field in table.items():
            [line, *_] = [line for line in text.splitlines() if line.startswith(f"| `{name}`")]
            assert field.policy in line or line.count("|") == 5


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number, above 0 to 1"),
        ({"type": "string", "maxLength": 5}, "string of at most 5 characters"),
        ({"enum": [[], "a"]}, '`[]`, `"a"`'),
        ({}, "any"),
    ],
)
def test_a_schema_is_said_in_a_few_words(schema: dict[str, Any], text: str) -> None:
    assert values(schema) == text
