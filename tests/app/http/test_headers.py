"""The headers that every response has, and the methods that every path takes."""

from __future__ import annotations

import pytest

from app.http.connection import ARRIVED_S
from tests.app.web import BODY, EOS, Exchange, Web


@pytest.mark.parametrize("given", ["abc-123", "req/1:2.3_4=+", "x" * 128])
async def test_a_request_keeps_the_id_that_its_client_gave_it(web: Web, given: str) -> None:
    exchange = await web.request("GET", "/v1/models", headers={"x-request-id": given})
    assert exchange.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "\u00e4", "a\tb", '"'])
async def test_an_id_that_does_not_belong_into_a_header_is_replaced(web: Web, given: str) -> None:
    exchange = await web.request("GET", "/v1/models", headers={"x-request-id": given})
    assert exchange.headers["x-request-id"].startswith("req-")


async def test_the_time_that_a_response_took_counts_from_the_arrival_of_the_request(web: Web) -> None:
    """Not from the moment at which somebody had time for it."""
    exchange = Exchange(web, "GET", "/v1/models", {}, [b""])
    exchange.scope[ARRIVED_S] = web.now_s - 2.5
    await web.settle()
    assert exchange.headers["openai-processing-ms"] == "2500"


async def test_the_completion_keeps_its_own_id_beside_the_client_s(web: Web) -> None:
    worker, exchange = await web.claimed_post(BODY, x_request_id="m")
    worker.append("chatcmpl-1", 0, EOS, end="stop")
    await web.turn()
    assert exchange.headers["x-request-id"] == "m"
    assert exchange.json["id"] == "chatcmpl-1"


async def test_a_response_says_how_long_it_took(web: Web) -> None:
    worker = web.worker()
    exchange = await web.chat()
    web.now_s += 1.5
    worker.claim("chatcmpl-1")
    worker.append("chatcmpl-1", 0, EOS, end="stop")
    await web.turn()
    assert exchange.headers["openai-processing-ms"] == "1500"
    assert (await web.request("GET", "/nothing")).headers["openai-processing-ms"] == "0"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/scripted", "/livez", "/readyz", "/openapi.json"])
async def test_where_get_is_head_is_too_without_a_body(web: Web, path: str) -> None:
    web.worker()
    get, head = await web.request("GET", path), await web.request("HEAD", path)
    assert (get.status, head.status) == (200, 200)
    assert (len(get.body) > 0, head.body) == (True, b"")
    assert head.headers["content-length"] == str(len(get.body))
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", {"POST"}),
        ("/v1/completions", {"POST"}),
        ("/tokenize", {"POST"}),
        ("/openapi.json", {"GET", "HEAD"}),
        ("/v1/models", {"GET", "HEAD"}),
        ("/readyz", {"GET", "HEAD"}),
    ],
)
async def test_options_and_a_refused_method_say_what_a_path_takes(web: Web, path: str, methods: set[str]) -> None:
    exchange = await web.request("OPTIONS", path)
    assert exchange.status in (200, 204)
    assert methods <= set(exchange.headers["allow"].split(", "))
    exchange = await web.request("PATCH", path)
    assert (exchange.status, exchange.error["code"]) == (405, "method_not_allowed")
    assert methods <= set(exchange.headers["allow"].split(", "))
