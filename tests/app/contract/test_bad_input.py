"""Whatever is put into any field of any request: a 4xx in OpenAI's shape that names the field, and nothing queued.

Hand-picked poison in every field of every table, and then what hypothesis comes up with.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.contract.chat import CHAT_FIELDS
from app.contract.completion import COMPLETION_FIELDS
from app.contract.fields import Field
from app.contract.kinds import Anything, Fields, Text
from app.endpoints.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from tests.app.web import HELLO, MODEL, Exchange, Web

ENDPOINTS: dict[str, tuple[dict[str, Field], dict[str, Any]]] = {
    "/v1/chat/completions": (dict(CHAT_FIELDS), {"model": MODEL, "messages": HELLO}),
    "/v1/completions": (dict(COMPLETION_FIELDS), {"model": MODEL, "prompt": "hi"}),
    "/tokenize": (dict(TOKENIZE_FIELDS), {"model": MODEL, "prompt": "hi"}),
    "/detokenize": (dict(DETOKENIZE_FIELDS), {"model": MODEL, "tokens": [101]}),
}
FIELDS = [(path, name) for path, (fields, _) in ENDPOINTS.items() for name in fields]

NESTED = "[" * 900 + "]" * 900
POISON = {
    "NaN": "NaN",
    "infinity": "-Infinity",
    "1e999": "1e999",
    "a number of 5,000 digits": "9" * 5000,
    "a number of 300 digits": "-" + "9" * 300,
    "2 to the 64": str(2**64),
    "deep lists": NESTED,
    "deep objects": '{"a":' * 900 + "1" + "}" * 900,
    "deep lists in an object": f'{{"type":{NESTED},"a":{NESTED}}}',
    "a lone surrogate": '"\\ud83d"',
    "a lone surrogate in a list": '["\\ud83d"]',
    "a lone surrogate as a name": '{"\\ud83d":"\\ud83d"}',
    "10,000 strings": json.dumps(["x"] * 10_000),
    "10,000 numbers": json.dumps([-1] * 10_000),
    "10,000 names": json.dumps({str(number): "x" for number in range(10_000)}),
    "a string of 7 MB": '"' + "\\u00e4" * (7_000_000 // 6) + '"',
    "a list of null": "[null]",
    "a list of a list of null": "[[null]]",
    "an object of null": '{"a":null}',
}
"""JSON, as it is sent."""


async def send(web: Web, path: str, fields: dict[str, Any], name: str, literal: str) -> Exchange:
    """`name` is given as `literal`."""
    others = {key: value for key, value in fields.items() if key != name}
    start = orjson.dumps(others)[:-1] + (b"," if others else b"")
    body = start + b'"%b":%b}' % (name.encode(), literal.encode())
    return await web.request("POST", path, body, {"content-type": "application/json"})


def check_refusal(exchange: Exchange, name: str) -> None:
    """A 4xx in OpenAI's shape that names the field (a model that does not exist is named, too)."""
    assert 400 <= exchange.status < 500, exchange.body[:500]
    error = exchange.error
    assert error["type"] == "invalid_request_error"
    assert error["param"] is not None
    assert error["param"].startswith(name), error
    assert len(exchange.body) < 2000


def num_queued(web: Web) -> int:
    return len(list(web.redis.scan_iter("tf:*:req")))


def takes_anything(field: Field, name: str, poison: str) -> bool:
    """Where the value is not poison: fields that are not looked at, and texts of any length."""
    kind = field.kind
    if isinstance(kind, Anything) or (isinstance(kind, Fields) and POISON[poison].startswith("{")):
        return True
    return poison == "a string of 7 MB" and isinstance(kind, Text) and name == "prompt"


@pytest.mark.parametrize(("path", "name"), FIELDS)
async def test_no_poison_in_any_field_gets_through(web: Web, path: str, name: str) -> None:
    table, fields = ENDPOINTS[path]
    web.worker()
    for poison, literal in POISON.items():
        before = num_queued(web)
        started_s = time.process_time()
        exchange = await send(web, path, fields, name, literal)
        assert time.process_time() - started_s < 2, poison
        if takes_anything(table[name], name, poison):
            assert exchange.status in (0, 200, 400), poison
            continue
        check_refusal(exchange, name)
        assert num_queued(web) == before, poison


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@given(where=st.sampled_from(FIELDS), value=VALUES)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_is_taken_or_refused_by_name(where: tuple[str, str], value: Any) -> None:
    path, name = where
    _, fields = ENDPOINTS[path]

    async def test() -> None:
        web = Web()
        web.worker()
        exchange = await send(web, path, fields, name, json.dumps(value))
        if exchange.status in (0, 200):
            return
        error = exchange.error
        assert 400 <= exchange.status < 500
        assert error["param"].startswith(name) or (name, error["param"]) in RULES
        assert num_queued(web) == 0

    asyncio.run(test())


RULES = {("messages", "prompt"), ("echo", "logprobs"), ("logprobs", "top_logprobs"), ("tools", "tool_choice")}
"""Where two fields do not go together, the other one may be named."""


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"m", x}',
        b"",
        b"[]",
        b"[{}]",
        b'"model"',
        b"null",
        b"NaN",
        b'{"model":"\xff\xfe"}',
        b"\x00" * 100,
        b"\x1f\x8b\x08\x00",
        b"[" * 1_000_000,
        b'{"a":' * 1_000_000,
        b'{"model":"scripted"',
        b"\xef\xbb\xbf{}",
    ],
    ids=range(14),
)
async def test_a_body_that_is_no_json_object_is_refused_as_a_whole(web: Web, path: str, body: bytes) -> None:
    web.worker()
    exchange = await web.request("POST", path, body, {"content-type": "application/json"})
    assert exchange.status == 400
    assert (exchange.error["type"], exchange.error["param"]) == ("invalid_request_error", None)
    assert len(exchange.body) < 1000
    assert num_queued(web) == 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_body_of_10_mb_is_refused_without_being_parsed(web: Web, path: str) -> None:
    part = b"x" * 65_536
    exchange = await web.request("POST", path, [b'{"model":"', *[part] * 160, b'"}'])
    assert (exchange.status, exchange.error["code"]) == (413, "body_too_large")


async def test_memory_is_given_back_after_large_refused_requests(web: Web) -> None:
    web.worker()
    body = orjson.dumps({"model": MODEL, "messages": HELLO, "stop": ["x" * 1_000_000] * 4})
    for _ in range(3):
        assert (await web.post(body)).status == 400
    tracemalloc.start()
    try:
        for _ in range(5):
            gc.collect()
            tracemalloc.reset_peak()
            assert (await web.post(body)).status == 400
            # orjson reserves twelve times the body, and touches hardly any of that.
            assert tracemalloc.get_traced_memory()[1] < 15 * len(body)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


async def test_a_huge_path_and_odd_bytes_in_it_are_refused_in_shape(web: Web) -> None:
    for path in (
        "/" + "a" * 50_000,
        "/v1/models/" + "\ufffd\U0001f30a" * 100,
        "/v1/models/" + "x" * 50_000,
        "//nothing",
        "/..%2f",
    ):
        exchange = await web.request("GET", path)
        assert exchange.status == 404
        assert len(exchange.body) < 2000
