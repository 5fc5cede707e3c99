"""What clients of OpenAI's API trip over elsewhere, over HTTP: budgets, message shapes, models, whole requests."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from app.contract.chat import CHAT_FIELDS
from app.text.edge import TextEdge, open_text_edge
from app.text.scripted import scripted_text_edge
from tests.app.text_checkpoints import CHATML, GEMMA, checkpoint_of, smollm2, trained
from tests.app.web import HELLO, MODEL, Exchange, Web

RETRIED = {408, 409, 429, *range(500, 600)}
"""Statuses after which OpenAI's clients try again by themselves."""


async def ask(web: Web, path: str, **fields: Any) -> Exchange:
    return await web.request("POST", path, orjson.dumps(fields), {"content-type": "application/json"})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_of_one_token_gives_one_token_and_length(web: Web, path: str, stream: bool) -> None:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "hi"}
    worker = web.worker()
    options = {"stream_options": {"include_usage": True}} if stream else {}
    exchange = await ask(web, path, model=MODEL, max_tokens=1, stream=stream, **prompt, **options)
    request_id = "chatcmpl-1" if "chat" in path else "cmpl-1"
    assert worker.claim(request_id).sampling.max_tokens == 1
    worker.append(request_id, 0, 101, end="length")
    await web.turn()
    parts = exchange.chunks if stream else [exchange.json]
    reasons = [c["finish_reason"] for part in parts for c in part["choices"] if c["finish_reason"]]
    assert reasons == ["length"]
    assert parts[-1]["usage"]["completion_tokens"] == 1
    assert exchange.body.count(b"<101>") == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_of_no_tokens_is_no_chat_and_never_an_endless_one(web: Web, name: str, stream: bool) -> None:
    web.worker()
    exchange = await web.chat(**{name: 0}, stream=stream)
    assert (exchange.status, exchange.error["param"]) == (400, name)


async def test_prompt_details_are_there_without_being_asked_for(web: Web) -> None:
    worker = web.worker()
    for number, cached in ((1, 0), (2, 8)):
        exchange = await web.chat()
        worker.claim(f"chatcmpl-{number}")
        worker.append(f"chatcmpl-{number}", 0, 101, end="length", cached=cached)
        await web.turn()
        assert exchange.json["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


EDGES: dict[str, TextEdge] = {
    "chatml": open_text_edge(checkpoint_of(smollm2(), CHATML, (2,))),
    "gemma": open_text_edge(checkpoint_of(trained(False)[1], GEMMA, (1,))),
    "no template": open_text_edge(checkpoint_of(trained(False)[1], None, (1,))),
    MODEL: scripted_text_edge(),
}
TEXT = [{"type": "text", "text": "x"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATIONS = {
    "developer": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}],
    "system and developer": [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
    ],
    "system after user": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
    "two users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "assistant first": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}],
    "assistant last": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "only system": [{"role": "system", "content": "a"}],
    "names": [{"role": "user", "name": "Ann", "content": "a"}],
    "empty": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": TEXT * 3}],
    "calls without content": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": TEXT},
    ],
    "calls with null": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "Rainy"},
    ],
}


@pytest.mark.parametrize("model", EDGES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
async def test_every_order_and_shape_of_messages_is_a_prompt_for_every_kind_of_model(
    model: str, conversation: str
) -> None:
    web = Web(text_edges=EDGES)
    exchange = await ask(web, "/tokenize", model=model, messages=CONVERSATIONS[conversation])
    assert exchange.status == 200, exchange.body
    assert exchange.json["count"] > 0


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_a_list_of_text_parts_is_the_prompt_of_the_plain_string(role: str) -> None:
    web = Web(text_edges=EDGES)
    tokens = []
    for content in ("Rainy today", [{"type": "text", "text": "Rainy"}, {"type": "text", "text": " today"}]):
        messages = [*HELLO, {"role": role, "content": content, "tool_call_id": "c1"}]
        tokens.append((await ask(web, "/tokenize", model="chatml", messages=messages)).json["tokens"])
    assert tokens[0] == tokens[1]


EVERYTHING: dict[str, Any] = {
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "n": 1,
    "seed": 1,
    "stop": ["x"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"5": 1},
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": True},
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "user": "u",
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "text"},
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "web_search_options": None,
    "moderation": None,
    "store": True,
    "prediction": {"type": "content", "content": "x"},
    "reasoning_effort": "low",
    "verbosity": "low",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "safety_identifier": "s",
}


async def test_a_request_with_every_documented_field_at_once_is_taken(web: Web) -> None:
    documented = {name for name, field in CHAT_FIELDS.items() if not field.is_extension}
    assert set(EVERYTHING) == documented - {"model", "messages"}
    web.worker()
    exchange = await web.chat(**EVERYTHING)
    assert exchange.status == 200, exchange.body


async def test_a_made_up_field_is_ignored(web: Web) -> None:
    web.worker()
    assert (await web.chat(stream=True, made_up={"a": 1})).status == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x", "format": "mp3"}),
        ("web_search_options", {}),
        ("moderation", {"model": "x"}),
    ],
)
async def test_a_documented_field_that_is_not_applied_is_refused_by_name_and_says_why(
    web: Web, name: str, value: Any
) -> None:
    web.worker()
    exchange = await web.chat(**{name: value})
    assert (exchange.status, exchange.error["param"]) == (400, name)
    assert exchange.error["code"] == "unsupported_value"
    assert CHAT_FIELDS[name].note in exchange.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_images_and_summaries_of_thoughts_are_refused_in_openai_s_shape(
    web: Web, fields: dict[str, Any], param: str
) -> None:
    web.worker()
    exchange = await web.chat(**fields)
    assert exchange.status == 400
    assert exchange.error.keys() == {"message", "type", "param", "code"}
    assert (exchange.error["param"], exchange.error["code"]) == (param, "unsupported_value")


@pytest.mark.parametrize("reasoning", [None, {}, {"effort": "low"}, {"summary": None}])
async def test_reasoning_that_asks_for_no_summary_is_taken(web: Web, reasoning: Any) -> None:
    web.worker()
    assert (await web.chat(stream=True, reasoning=reasoning)).status == 200


@pytest.mark.parametrize("seed", [2**63, 10**30, 1.5, "1", True])
async def test_a_number_that_is_no_integer_here_is_told_which_are(web: Web, seed: Any) -> None:
    web.worker()
    body = json.dumps({"model": MODEL, "messages": HELLO, "seed": seed}).encode()
    exchange = await web.request("POST", "/v1/chat/completions", body)
    assert (exchange.status, exchange.error["param"]) == (400, "seed")
    assert exchange.error["message"] == f"seed must be an integer from {-(2**63)} to {2**63 - 1}."


async def test_a_bias_on_a_token_that_the_model_does_not_have_names_the_token(web: Web) -> None:
    web.worker()
    exchange = await web.chat(logit_bias={"5": 1, "50256": -100})
    assert (exchange.status, exchange.error["param"]) == (400, "logit_bias")
    assert "50256" in exchange.error["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", "/v1/chat/completions", {"messages": HELLO}),
        ("POST", "/v1/completions", {"prompt": "hi"}),
        ("POST", "/tokenize", {"prompt": "hi"}),
        ("POST", "/v1/embeddings", {"input": "hi"}),
        ("GET", "/v1/models/nope", {}),
    ],
)
async def test_an_unknown_model_is_404_everywhere(
    web: Web, method: str, path: str, fields: dict[str, Any], stream: bool
) -> None:
    web.worker()
    body = orjson.dumps({"model": "nope", "stream": stream, **fields})
    exchange = await web.request(method, path, body if method == "POST" else b"")
    assert exchange.status == 404
    assert exchange.headers["content-type"] == "application/json"
    assert exchange.error["type"] == "invalid_request_error"
    assert exchange.error["code"] == ("unknown_url" if "embeddings" in path else "model_not_found")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 3000}]},
        {"messages": [{"role": "user", "content": "x" * 970}], "max_tokens": 100},
        {"temperature": "0.7"},
        {"temperature": True},
        {"top_p": 0},
        {"presence_penalty": 10},
        {"model": "nope"},
        {"stop": ["x"] * 5},
    ],
)
async def test_what_the_client_got_wrong_is_never_a_status_that_clients_retry(
    web: Web, fields: dict[str, Any]
) -> None:
    web.worker()
    exchange = await web.chat(**fields)
    assert 400 <= exchange.status < 500
    assert exchange.status not in RETRIED
    assert "retry-after" not in exchange.headers
