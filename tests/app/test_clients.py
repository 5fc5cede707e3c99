"""The openai clients where they are asynchronous or leave early, and the HTTP that clients and proxies rely on."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import APITimeoutError, AsyncOpenAI, OpenAI
from pydantic import BaseModel

from app.application import ApplicationSettings, create_app
from app.server import KEEP_ALIVE_S as IDLE_S
from app.server import listen
from app.text.scripted import scripted_text_edge
from bridge.streams.reader import Reader
from bridge.streams.relay import KEEP_ALIVE_S
from tasks.observe.live import LiveCell
from tasks.protocol.broker import build_broker
from tasks.protocol.record import RequestRecords
from tasks.protocol.submit import Submitter
from tests.app.test_serve import (
    address,
    end_of,
    id_in,
    post,
    read_to_end,
    read_until,
    serving,
    wait_for_open_request,
)
from tests.app.web import HELLO, MODEL, Worker, worker_info
from tests.conftest import RedisServer
from tokenferry.cell.one_process import LocalServer, open_server

MESSAGES: Any = HELLO
SHORT_S = 0.05
TWENTY_TOKENS = "\x03\x14"
"""Asks the scripted model to end by itself."""


class City(BaseModel):
    city: str


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server(MODEL, environ={}, scripted_step_ms=2) as running:
        yield running


@pytest.fixture
async def client(server: LocalServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=server.base_url, api_key="local", max_retries=0) as client:
        yield client


async def test_the_async_openai_client_streams_many_answers_at_once(client: AsyncOpenAI) -> None:
    async def answer(number: int) -> None:
        asked: Any = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"number {number}{TWENTY_TOKENS}"}],
            "stream_options": {"include_usage": True},
        }
        async with client.chat.completions.stream(**asked) as stream:
            texts = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        del asked["stream_options"]
        whole = await client.chat.completions.create(**asked)
        assert "".join(texts) == final.choices[0].message.content == whole.choices[0].message.content
        assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
        assert final.usage is not None
        assert final.usage.completion_tokens == 20

    await asyncio.gather(*(answer(number) for number in range(8)))


async def test_the_async_openai_client_parses_into_a_model_of_pydantic(client: AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": '\x0e{"city": "Paris"}\x0f'}]
    answer = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Paris")


def test_closing_a_stream_of_the_openai_client_cancels_its_generation(server: LocalServer) -> None:
    with OpenAI(base_url=server.base_url, api_key="local", max_retries=0) as client:
        with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4000, stream=True) as stream:
            request_id = next(iter(stream)).id
    end = end_of(server.records, request_id)
    assert (end.state, end.reason) == ("cancelled", "disconnect")


async def test_cancelling_a_task_that_waits_for_the_openai_client_cancels_its_generation(
    client: AsyncOpenAI, server: LocalServer
) -> None:
    asking = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4000)
    task = asyncio.ensure_future(asking)
    request_id = await asyncio.to_thread(wait_for_open_request, server)
    task.cancel()
    end = await asyncio.to_thread(end_of, server.records, request_id)
    assert (end.state, end.reason) == ("cancelled", "disconnect")


async def test_a_time_out_of_the_openai_client_cancels_its_generation(
    client: AsyncOpenAI, server: LocalServer
) -> None:
    hasty = client.with_options(timeout=0.5)
    asking = asyncio.ensure_future(hasty.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4000))
    request_id = await asyncio.to_thread(wait_for_open_request, server)
    with pytest.raises(APITimeoutError):
        await asking
    end = await asyncio.to_thread(end_of, server.records, request_id)
    assert (end.state, end.reason) == ("cancelled", "disconnect")


def test_a_conversation_goes_round_through_a_tool(server: LocalServer) -> None:
    """What a runner of tools does: ask, call what is to be called, tell the results, ask again."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools: Any = [{"type": "function", "function": function}]
    dictated = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    messages: list[Any] = [{"role": "user", "content": f"\x0e{dictated}\x0f"}]
    with OpenAI(base_url=server.base_url, api_key="local", max_retries=0) as client:
        for _ in range(3):
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                choice = stream.get_final_completion().choices[0]
            messages.append(choice.message)
            for call in choice.message.tool_calls or []:
                city = json.loads(call.function.arguments)["city"]
                result = f"\x0eIt rains in {city}.\x0f"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if choice.finish_reason == "stop":
                break
    assert messages[-1].content == "It rains in Paris."
    assert len(messages) == 4


def test_a_stream_without_tokens_is_never_silent_for_long(fake_server: RedisServer) -> None:
    """A proxy cuts a connection on which nothing comes: here, while every slot is taken and none becomes free."""
    redis = fake_server.connect()
    records = RequestRecords(redis)
    worker = Worker(records, worker_info())
    application = create_app(
        text_edges={MODEL: scripted_text_edge()},
        records=records,
        submitter=Submitter(records, build_broker(fake_server.connect("queue")), redis),
        reader=Reader(fake_server.connect("blocking"), redis, "reader-1", records),
        live=LiveCell(redis),
        settings=ApplicationSettings(keep_alive_s=SHORT_S),
    )
    with listen("127.0.0.1", 0, stall_limit_s=30) as listener, serving(application, listener):
        with socket.create_connection(listener.getsockname()) as connection:
            connection.settimeout(40 * SHORT_S)
            post(connection, stream=True)
            data = read_until(connection, b": keep-alive\n")
            while data.count(b": keep-alive\n") < 4:
                data += connection.recv(1 << 16)
            request_id = id_in(data)
            worker.claim(request_id)
            worker.append(request_id, 0, 100, end="length")
            data = read_until(connection, b"\r\n0\r\n\r\n", data)
    assert b'"content":"<100>"' in data
    assert data.index(b": keep-alive") < data.index(b"<100>") < data.index(b"[DONE]")


def test_two_keep_alive_times_are_shorter_than_the_time_outs_of_proxies() -> None:
    assert ApplicationSettings().keep_alive_s == KEEP_ALIVE_S
    assert 2 * KEEP_ALIVE_S < 10


def test_an_idle_connection_is_kept_for_longer_than_clients_and_proxies_keep_theirs(server: LocalServer) -> None:
    """httpx keeps an idle connection for 5 s, nginx for 60 s: whoever may use it again must be the first to close."""
    assert IDLE_S > 60
    connection = http.client.HTTPConnection(*address(server))
    sockets = []
    for _ in range(3):
        connection.request("GET", "/v1/models")
        assert connection.getresponse().read()
        sockets.append(connection.sock)
    assert len(set(sockets)) == 1
    assert sockets[0] is not None
    connection.close()


@pytest.mark.parametrize(("stream", "begin"), [(True, b"id: -1\ndata: {"), (False, b'{"id":')])
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(
    server: LocalServer, stream: bool, begin: bytes
) -> None:
    """As nginx asks until it is told otherwise."""
    with socket.create_connection(address(server)) as connection:
        post(connection, version=b"HTTP/1.0", stream=stream, max_tokens=3)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(begin)
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")
