"""Tools, structured output and thoughts over HTTP: the shapes that clients see, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage
from pydantic import BaseModel

from app.dialect.formats import HERMES, LLAMA3
from app.http.body import parsed
from app.text.edge import TextEdge
from app.text.templates import ChatFormat
from tests.app.web import EOS, MODEL, Exchange, Web
from tokenferry.cell.one_process import LocalServer, open_server

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOKYO = PARIS.replace("Paris", "Tokyo")
BOTH = ['{"city": "Paris"}', '{"city": "Tokyo"}']


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": SCHEMA}}


TOOLS = [tool("weather"), tool("news")]
FORCED = {"type": "function", "function": {"name": "weather"}}


def edge(format: ChatFormat) -> TextEdge:
    """Output id N is the byte N."""
    return TextEdge(
        format=format,
        encode_pieces=lambda pieces: [1, 2, 3],
        encode=lambda text: [],
        token_bytes=lambda i: bytes([i]),
        eos_token_ids=[EOS],
        vocab_size=256,
    )


HERMES_EDGE = {MODEL: edge(ChatFormat(lambda messages: []))}
LLAMA3_EDGE = {MODEL: edge(ChatFormat(lambda messages: [], LLAMA3))}
THINKING_EDGE = {MODEL: edge(ChatFormat(lambda messages: [], HERMES, reasoning="think"))}


async def answered(web: Web, text: str, group: int = 1, end: str = "stop", **fields: Any) -> Exchange:
    """The exchange of a request that is answered with `text`, `group` tokens at a time."""
    worker = web.worker()
    exchange = await web.chat(**fields)
    assert exchange.status in (0, 200), exchange.body
    worker.claim("chatcmpl-1")
    tokens = list(text.encode())
    for start in range(0, len(tokens), group):
        worker.append("chatcmpl-1", start, *tokens[start : start + group])
        await web.turn()
    worker.append("chatcmpl-1", len(tokens), EOS, end=end)
    await web.turn()
    assert exchange.is_over
    return exchange


def deltas(exchange: Exchange) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in exchange.chunks for choice in chunk["choices"]]


def accumulated(exchange: Exchange) -> dict[int, dict[str, Any]]:
    """Calls by index, as clients put them together."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas(exchange):
        for part in delta.get("tool_calls", []):
            function = part["function"]
            if "id" in part:
                assert part["index"] not in calls, "id, type and name come once"
                calls[part["index"]] = {"id": part["id"], "type": part["type"], "name": function["name"], "args": ""}
            else:
                assert part.keys() == {"index", "function"}
                assert function.keys() == {"arguments"}
            calls[part["index"]]["args"] += function.get("arguments", "")
    return calls


def reasons(exchange: Exchange) -> list[str]:
    found = [choice["finish_reason"] for chunk in exchange.chunks for choice in chunk["choices"]]
    return [reason for reason in found if reason is not None]


@pytest.mark.parametrize("group", [1, 3, 1000])
async def test_streamed_calls_have_id_type_and_name_once_and_arguments_that_join_to_json(
    group: int, outlet: bool
) -> None:
    web = Web(text_edges=HERMES_EDGE, outlet=outlet)
    exchange = await answered(web, f"So:\n{PARIS}\n{TOKYO}", group, stream=True, tools=TOOLS)
    calls = accumulated(exchange)
    assert sorted(calls) == [0, 1]
    assert [call["args"] for call in calls.values()] == BOTH
    assert {call["type"] for call in calls.values()} == {"function"}
    assert {call["name"] for call in calls.values()} == {"weather"}
    assert calls[0]["id"] != calls[1]["id"]
    assert exchange.text == "So:"
    assert deltas(exchange)[0]["role"] == "assistant"
    assert reasons(exchange) == ["tool_calls"]


async def test_a_stream_and_a_whole_answer_have_the_same_calls() -> None:
    exchange = await answered(Web(text_edges=HERMES_EDGE), PARIS + TOKYO, stream=True, tools=TOOLS)
    streamed = [(call["id"], call["name"], call["args"]) for call in accumulated(exchange).values()]
    [choice] = (await answered(Web(text_edges=HERMES_EDGE), PARIS + TOKYO, tools=TOOLS)).json["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    calls = [(call["id"], call["function"]) for call in message["tool_calls"]]
    assert streamed == [(number, function["name"], function["arguments"]) for number, function in calls]
    assert len(streamed) == 2


@pytest.mark.parametrize(
    ("choice", "reason"), [("auto", "tool_calls"), ("required", "tool_calls"), (FORCED, "stop"), (None, "tool_calls")]
)
@pytest.mark.parametrize("stream", [True, False])
async def test_calls_end_with_tool_calls_and_a_function_that_was_named_with_stop(
    choice: Any, reason: str, stream: bool
) -> None:
    web = Web(text_edges=HERMES_EDGE)
    exchange = await answered(web, PARIS, stream=stream, tools=TOOLS, tool_choice=choice)
    found = reasons(exchange) if stream else [exchange.json["choices"][0]["finish_reason"]]
    assert found == [reason]


async def test_an_answer_of_text_is_one_with_tools_too() -> None:
    web = Web(text_edges=HERMES_EDGE)
    [choice] = (await answered(web, "1 < 2", tools=TOOLS)).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("1 < 2", "stop")
    assert "tool_calls" not in choice["message"]


async def test_calls_that_are_cut_by_the_limit_end_with_length() -> None:
    web = Web(text_edges=HERMES_EDGE)
    exchange = await answered(
        web, PARIS.partition('is"')[0], end="length", stream=True, tools=TOOLS, tool_choice="required"
    )
    assert accumulated(exchange)[0]["args"] == '{"city": "Par'
    assert reasons(exchange) == ["length"]


async def test_a_model_is_read_in_the_format_that_it_writes() -> None:
    web = Web(text_edges=LLAMA3_EDGE)
    text = '{"name": "weather", "parameters": {"city": "Paris"}}'
    exchange = await answered(web, text, stream=True, tools=TOOLS)
    assert [call["args"] for call in accumulated(exchange).values()] == BOTH[:1]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_text_that_looks_like_a_call_is_content(fields: Any) -> None:
    web = Web(text_edges=HERMES_EDGE)
    [choice] = (await answered(web, PARIS, **fields)).json["choices"]
    assert choice["message"]["content"] == PARIS


@pytest.mark.parametrize("group", [1, 7, 1000])
async def test_thoughts_are_told_apart_and_never_hold_half_a_tag(group: int) -> None:
    text = f"<think>\nHm: {PARIS} </thi\n</think>\n\nYes. {TOKYO}"
    web = Web(text_edges=THINKING_EDGE)
    exchange = await answered(web, text, group, stream=True, tools=TOOLS)
    thought = "".join(delta.get("reasoning_content") or "" for delta in deltas(exchange))
    assert thought == f"Hm: {PARIS} </thi"
    assert exchange.text == "Yes."
    assert [call["args"] for call in accumulated(exchange).values()] == BOTH[1:]


async def test_thoughts_are_a_field_of_the_whole_answer_and_are_counted() -> None:
    web = Web(text_edges=THINKING_EDGE)
    answer = (await answered(web, "<think>Hm.</think>Yes.")).json
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    assert 3 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= len("<think>Hm.</think>")


async def test_the_job_has_the_grammar_of_what_was_asked_for() -> None:
    web = Web(text_edges=HERMES_EDGE)
    worker = web.worker()
    await web.chat(tools=TOOLS, tool_choice="required")
    await web.chat(response_format={"type": "json_object"})
    await web.chat()
    grammars = [worker.claim(f"chatcmpl-{number}").sampling.grammar for number in (1, 2, 3)]
    assert "weather" in grammars[0]
    assert "additionalProperties" in grammars[1]
    assert grammars[2] == ""


@pytest.mark.parametrize(
    ("body", "is_off"),
    [
        (b'{"tools": []}', True),
        (b'{"response_format": {"type": "json_schema"}}', True),
        (b'{"messages": []}', False),
        (b" " * 20_000, True),
    ],
)
def test_what_may_take_long_to_check_is_checked_off_the_event_loop(body: bytes, is_off: bool) -> None:
    with ThreadPoolExecutor() as pool:
        thread = asyncio.run(parsed(body, lambda body: threading.get_ident(), pool))
    assert (thread != threading.get_ident()) == is_off


# The whole line, with the scripted model: it says what a prompt dictates, as far as a grammar allows.


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    server: LocalServer
    with open_server(MODEL, environ={}, scripted_step_ms=0) as server:
        with OpenAI(base_url=server.base_url, api_key="local", max_retries=0) as made:
            yield made


def ask(client: OpenAI, dictated: str, **fields: Any) -> tuple[ChatCompletionMessage, str]:
    messages: Any = [{"role": "user", "content": f"\x0e{dictated}\x0f"}]
    fields.setdefault("max_tokens", 400)
    answer = client.chat.completions.create(model=MODEL, messages=messages, **fields)
    return answer.choices[0].message, answer.choices[0].finish_reason


def by_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def test_a_schema_is_enforced_against_what_the_model_would_say(client: OpenAI) -> None:
    enum = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    for dictated in ("Blue!", '{"colour": "blue"}', '{"colour": "green"}', "   "):
        message, reason = ask(client, dictated, response_format=by_schema(enum))
        assert json.loads(message.content or "")["colour"] in ("red", "green")
        assert reason == "stop"


def test_json_ends_though_the_model_would_go_on_with_white_space_or_digits(client: OpenAI) -> None:
    two = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "string"}}, "required": ["a", "b"]}
    for schema in (two, {}):
        for dictated in ("{" + " " * 60, '{"a": ' + "7" * 60, '{"a":' + "\n" * 60):
            message, reason = ask(client, dictated, response_format=by_schema(schema))
            assert reason == "stop"
            assert isinstance(json.loads(message.content or ""), dict)
    message, reason = ask(client, '{"a": 1', response_format=by_schema(two), max_tokens=5)
    assert (message.content, reason) == ('{"a":', "length")


def test_a_demanded_call_is_made_whatever_the_model_would_say(client: OpenAI) -> None:
    for dictated in ("Hello.", PARIS.replace("weather", "made_up"), PARIS.replace("city", "town")):
        for choice, reason in (("required", "tool_calls"), (FORCED, "stop")):
            message, found = ask(client, dictated, tools=TOOLS, tool_choice=choice)
            assert found == reason
            assert message.tool_calls
            for call in message.tool_calls:
                assert call.type == "function"
                assert list(json.loads(call.function.arguments)) == ["city"]


def test_without_parallel_calls_one_is_made(client: OpenAI) -> None:
    for choice in ("required", "auto"):
        for is_parallel, num_calls in ((True, 2), (False, 1)):
            message, _ = ask(
                client, f"{PARIS}\n{TOKYO}", tools=TOOLS, tool_choice=choice, parallel_tool_calls=is_parallel
            )
            assert len(message.tool_calls or []) == num_calls


def test_a_free_answer_may_call_or_not(client: OpenAI) -> None:
    message, reason = ask(client, "No need. <b>", tools=TOOLS)
    assert (message.content, message.tool_calls, reason) == ("No need. <b>", None, "stop")
    message, reason = ask(client, f"Let me see.\n{PARIS}", tools=TOOLS)
    assert (message.content, reason) == ("Let me see.", "tool_calls")


def test_the_openai_client_parses_into_models_of_pydantic(client: OpenAI) -> None:
    class Step(BaseModel):
        text: str
        result: float | None

    class Proof(BaseModel):
        steps: list[Step]
        verdict: Literal["true", "false"]

    dictated = '{"steps": [{"text": "So.", "result": 1.5}, {"text": "", "result": null}], "verdict": "maybe"}'
    messages: Any = [{"role": "user", "content": f"\x0e{dictated}\x0f"}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Proof)
    proof = answer.choices[0].message.parsed
    assert proof is not None
    assert proof.steps == [Step(text="So.", result=1.5), Step(text="", result=None)]
    assert proof.verdict in ("true", "false")


def test_the_openai_clients_strict_functions_are_parsed(client: OpenAI) -> None:
    class Weather(BaseModel):
        """The weather of a city."""

        city: str
        days: int

    messages: Any = [{"role": "user", "content": "\x0e<tool_call>\n{\x0f"}]
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_the_openai_clients_stream_helper_puts_calls_together(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"\x0e{PARIS}\n{TOKYO}\x0f"}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:  # type: ignore[arg-type]
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [event.arguments for event in done] == BOTH
    assert final.finish_reason == "tool_calls"
    assert [call.function.arguments for call in final.message.tool_calls or []] == BOTH


def test_several_choices_have_calls_of_their_own(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": f"\x0e{PARIS}\x0f"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, n=3)  # type: ignore[arg-type]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3


def test_a_conversation_with_calls_and_results_is_taken(client: OpenAI) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": BOTH[0]}}]
    for content in ({"content": None}, {}, {"content": ""}):
        for result in ("Rainy", [{"type": "text", "text": "Rainy"}]):
            messages: Any = [
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "tool_calls": calls, **content},
                {"role": "tool", "tool_call_id": "c1", "content": result},
                {"role": "user", "content": "\x0eWet.\x0f"},
            ]
            answer = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "Wet."


def test_a_schema_that_cannot_be_enforced_is_refused_naming_the_keyword(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, "", response_format=by_schema({"type": "array", "uniqueItems": True}))
    assert caught.value.param == "response_format.json_schema.schema"
