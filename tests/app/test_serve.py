"""The real HTTP server on a loopback socket: the openai client, and what only sockets can show."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI

from app.application import Application, ApplicationSettings, create_app
from app.server import SEND_BUFFER_BYTES, BodyOutlet, Server, listen
from app.text.scripted import scripted_text_edge
from bridge.streams.reader import Reader
from tasks.observe.live import LiveCell
from tasks.protocol import keys
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import TerminalEvent, decode_entry
from tasks.protocol.record import Append, Appended, RequestRecords
from tasks.protocol.submit import Submitter
from tests.app.web import HELLO, MODEL, Worker, worker_info
from tests.conftest import RedisServer
from tokenferry.cell.one_process import LocalServer, open_server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with open_server(MODEL, environ={}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="local", max_retries=0) as made:
        yield made


def address(server: LocalServer) -> tuple[str, int]:
    host, port = server.origin.removeprefix("http://").split(":")
    return host, int(port)


def post(connection: socket.socket, version: bytes = b"HTTP/1.1", **fields: Any) -> None:
    body = json.dumps({"model": MODEL, "messages": HELLO, **fields}).encode()
    head = b"POST /v1/chat/completions " + version + b"\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))


def read_until(connection: socket.socket, end: bytes, data: bytes = b"") -> bytes:
    while end not in data:
        part = connection.recv(1 << 20)
        assert part, f"closed before {end!r}: {data[-200:]!r}"
        data += part
    return data


def read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 20):
        data += part
    return data


def id_in(data: bytes) -> str:
    found = re.search(rb"chatcmpl-\w+", data)
    assert found is not None
    return found.group().decode()


def end_of(records: RequestRecords, request_id: str) -> TerminalEvent:
    """Waits for the terminal entry."""
    position: Any = "0"
    while True:
        [[_, entries]] = records._redis.xread({keys.out(request_id): position}, block=5_000)
        for position, fields in entries:
            if isinstance(event := decode_entry(position, fields), TerminalEvent):
                return event


def test_the_openai_client_lists_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tokenferry"


def test_the_openai_client_gets_the_same_text_streamed_and_whole(client: OpenAI) -> None:
    messages: Any = HELLO
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 40
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1


def test_the_openai_client_accumulates_a_stream(client: OpenAI) -> None:
    five_tokens = [{"role": "user", "content": "hello\x03\x05"}]
    with client.chat.completions.stream(model=MODEL, messages=five_tokens) as stream:  # type: ignore[arg-type]
        completion = stream.get_final_completion()
    assert completion.choices[0].finish_reason == "stop"
    assert (completion.choices[0].message.content or "").count("<") == 5
    assert completion.choices[0].message.role == "assistant"


def test_the_openai_client_streams_and_accumulates_several_choices(client: OpenAI) -> None:
    five_tokens: Any = [{"role": "user", "content": "hello\x03\x05"}]
    asked: Any = {"model": MODEL, "messages": five_tokens, "n": 3, "logprobs": True, "top_logprobs": 2}
    with client.chat.completions.stream(**asked) as stream:
        completion = stream.get_final_completion()
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    for streamed, choice in zip(completion.choices, whole.choices, strict=True):
        assert streamed.message.content == choice.message.content
        assert (streamed.finish_reason, streamed.message.role) == ("stop", "assistant")
        assert streamed.logprobs is not None
        assert choice.logprobs is not None
        assert streamed.logprobs.content == choice.logprobs.content
        tokens = [entry.token for entry in choice.logprobs.content or ()]
        assert tokens == re.findall(r"<\d+>", choice.message.content or "")
        assert {len(entry.top_logprobs) for entry in choice.logprobs.content or ()} == {2}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 15


def test_retries_of_the_openai_client_with_a_key_never_generate_twice(server: LocalServer) -> None:
    messages: Any = HELLO
    headers = {"Idempotency-Key": "one-of-a-kind"}
    redis: Any = server.records._redis
    before = set(redis.scan_iter(keys.request("*")))
    impatient = OpenAI(base_url=server.base_url, api_key="local", max_retries=5, timeout=0.3, default_headers=headers)
    with impatient as client:
        reply = client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, max_tokens=60)
    assert reply.headers["x-idempotent-replay"] == "true"
    assert reply.retries_taken > 0
    completion = reply.parse()
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 60
    made = set(redis.scan_iter(keys.request("*"))) - before
    assert made == {keys.request(completion.id).encode()}
    state = server.records.state(completion.id)
    assert state is not None
    assert (state.state, state.attempt) == ("finished", 1)


def test_the_openai_client_is_told_of_another_body_at_once(client: OpenAI) -> None:
    messages: Any = HELLO
    again = client.with_options(max_retries=2, default_headers={"Idempotency-Key": "two-bodies"})
    again.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    with pytest.raises(openai.ConflictError) as conflict:
        again.chat.completions.create(model=MODEL, messages=messages, max_tokens=2)
    assert conflict.value.code == "idempotency_conflict"


def test_the_openai_client_raises_its_own_errors(client: OpenAI) -> None:
    def create(**fields: Any) -> Any:
        return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **fields})

    with pytest.raises(openai.NotFoundError) as not_found:
        create(model="nope", stream=True)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        create(temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        create(messages=[{"role": "user", "content": "x" * 9000}])
    assert too_long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_closing_the_socket_cancels_the_request(server: LocalServer, stream: bool) -> None:
    with socket.create_connection(address(server)) as connection:
        post(connection, stream=stream, ignore_eos=True)
        if stream:
            request_id = id_in(read_until(connection, b'"content":"<'))
        else:
            request_id = wait_for_open_request(server)
    end = end_of(server.records, request_id)
    assert (end.state, end.reason) == ("cancelled", "disconnect")


def wait_for_open_request(server: LocalServer) -> str:
    redis: Any = server.records._redis
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        for key in redis.scan_iter("tf:reader:*:open"):
            for raw in redis.smembers(key):
                return str(raw.decode())
    raise AssertionError("no request came")


def test_a_connection_serves_one_request_after_the_other(server: LocalServer) -> None:
    with socket.create_connection(address(server)) as connection:
        for _ in range(3):
            post(connection, stream=True, max_tokens=3)
            assert read_until(connection, b"\r\n0\r\n\r\n").count(b'"content":"<') >= 1
            post(connection, temperature=9)
            assert b'"param":"temperature"' in read_until(connection, b"}}")


def test_requests_sent_ahead_are_answered_in_order(server: LocalServer) -> None:
    with socket.create_connection(address(server)) as connection:
        post(connection, stream=True, max_tokens=30)
        post(connection, temperature=9)
        data = read_until(connection, b'"param":"temperature"')
        assert data.index(b"[DONE]") < data.index(b"HTTP/1.1 400")


def test_a_huge_chunked_upload_is_refused_and_the_connection_goes_on(server: LocalServer) -> None:
    connection = http.client.HTTPConnection(*address(server))
    parts = (b"x" * 1_000_000 for _ in range(40))
    headers = {"content-type": "application/json", "transfer-encoding": "chunked"}
    connection.request("POST", "/v1/chat/completions", parts, headers, encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["error"]["code"]) == (413, "body_too_large")
    connection.request("GET", "/livez")
    assert connection.getresponse().read() == b'{"status": "ok"}'
    connection.close()


def test_bytes_that_are_no_http_get_an_error_in_openai_shape(server: LocalServer) -> None:
    with socket.create_connection(address(server)) as connection:
        connection.sendall(b"garbage\r\n\r\n")
        data = read_to_end(connection)
    assert data.startswith(b"HTTP/1.1 400 ")
    assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "trouble",
    [{"write_paused": True}, {"disconnected": True}, {"response_complete": True}, {"chunked_encoding": None}],
)
def test_the_short_way_is_for_clients_that_keep_up(trouble: dict[str, Any]) -> None:
    def outlet(write_paused: bool = False, **cycle: Any) -> BodyOutlet:
        fine = {"chunked_encoding": True, "disconnected": False, "response_complete": False}
        return BodyOutlet(SimpleNamespace(flow=SimpleNamespace(write_paused=write_paused), **{**fine, **cycle}))  # type: ignore[arg-type]

    assert outlet().is_ready
    assert not outlet(**trouble).is_ready


def test_the_kernel_buffers_little_for_each_client_and_several_processes_can_share_the_port() -> None:
    with listen("127.0.0.1", 0, stall_limit_s=30) as first:
        port = first.getsockname()[1]
        # Linux doubles it.
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) in (SEND_BUFFER_BYTES, 2 * SEND_BUFFER_BYTES)
        assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        with listen("127.0.0.1", port, stall_limit_s=30) as second:
            assert second.getsockname()[1] == port


def test_an_address_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        listen("203.0.113.1", 0, stall_limit_s=30)


NUM_LATE_TOKENS = 400_000
"""2 MB of text."""


@dataclass
class WebProcess:
    port: int
    process: subprocess.Popen[str]
    records: RequestRecords
    worker: Worker

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port))


@pytest.fixture
def web(real_server: RedisServer) -> Iterator[WebProcess]:
    """The web process over a real server, with a worker that does what the test does."""
    code = "import os, logging; logging.basicConfig(level=logging.INFO); "
    code += "from tasks.process.settings import WebSettings; "
    code += "from app.main import run; run(WebSettings.from_env(os.environ))"
    environ = {**os.environ, "MODEL": MODEL, "PORT": "0", "HOST": "127.0.0.1", "REDIS_URL": str(real_server.url)}
    records = RequestRecords(real_server.connect())
    worker = Worker(records, worker_info(max_model_len=10_000_000, kv_cache_tokens=10_000_000))
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = 0
        for line in process.stderr:
            if found := re.search(r"listening on http://127.0.0.1:(\d+)/v1", line):
                port = int(found.group(1))
                break
        try:
            yield WebProcess(port, process, records, worker)
        finally:
            process.kill()


def test_sigterm_ends_open_streams_with_an_event_and_the_process_within_4_s(
    web: WebProcess, real_server: RedisServer
) -> None:
    with web.connect() as connection:
        post(connection, stream=True)
        request_id = id_in(read_until(connection, b'"role":"assistant"'))
        web.worker.claim(request_id)
        web.worker.append(request_id, 0, 101)
        read_until(connection, b"<101>")
        began_s = time.monotonic()
        web.process.send_signal(signal.SIGTERM)
        web.process.send_signal(signal.SIGTERM)
        with web.connect() as late:
            # Whoever comes during the drain is told, not cut off.
            post(late)
            assert b"HTTP/1.1 503" in read_until(late, b'"shutting_down"')
        data = read_until(connection, b"\r\n0\r\n\r\n")
    assert b'"code":"shutting_down"' in data
    assert web.process.wait(5) == 0
    assert time.monotonic() - began_s < 4
    end = end_of(web.records, request_id)
    assert (end.state, end.reason) == ("cancelled", "disconnect")
    assert real_server.connect().zcard(keys.READERS) == 0


def test_a_client_that_reads_late_costs_little_memory_and_gets_everything_in_order(web: WebProcess) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.connect(("127.0.0.1", web.port))
        post(connection, stream=True)
        data = read_until(connection, b'"role":"assistant"')
        request_id = id_in(data)
        web.worker.claim(request_id)
        before_kb = memory_kb(web.process.pid)
        tokens = tuple(100 + number % 900 for number in range(100))
        for first in range(0, NUM_LATE_TOKENS, 10_000):
            indices = range(first, first + 10_000, 100)
            web.records.append_many([Append(request_id, 1, index, tokens) for index in indices])
        web.worker.append(request_id, NUM_LATE_TOKENS, end="length")
        with web.connect() as other:
            # By then the reader has seen all of the above.
            post(other, stream=True)
            other_id = id_in(read_until(other, b'"role":"assistant"'))
            web.worker.claim(other_id)
            web.worker.append(other_id, 0, 101, end="length")
            read_until(other, b"[DONE]")
        growth_kb = memory_kb(web.process.pid) - before_kb
        data = read_until(connection, b"\r\n0\r\n\r\n", data)
    assert growth_kb < 1024
    expected = "".join(f"<{token}>" for token in tokens) * (NUM_LATE_TOKENS // 100)
    assert "".join(re.findall(r'"content":"(.*?)"', dechunk(data).decode())) == expected


def memory_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1))


def dechunk(data: bytes) -> bytes:
    """The body of a chunked response."""
    body = b""
    start = data.index(b"\r\n\r\n") + 4
    while True:
        size_end = data.index(b"\r\n", start)
        size = int(data[start:size_end], 16)
        if not size:
            return body
        body += data[size_end + 2 : size_end + 2 + size]
        start = size_end + size + 4


def test_a_client_that_reads_nothing_is_dropped_and_cancelled(fake_server: RedisServer) -> None:
    redis = fake_server.connect()
    records = RequestRecords(redis)
    worker = Worker(records, worker_info(max_model_len=1_000_000, kv_cache_tokens=1_000_000))
    reader = Reader(fake_server.connect("blocking"), redis, "reader-1", records)
    application = create_app(
        text_edges={MODEL: scripted_text_edge()},
        records=records,
        submitter=Submitter(records, build_broker(fake_server.connect("queue")), redis),
        reader=reader,
        live=LiveCell(redis),
        settings=ApplicationSettings(stall_limit_s=0.3),
    )
    with listen("127.0.0.1", 0, stall_limit_s=30) as listener, serving(application, listener):
        with socket.create_connection(listener.getsockname()) as connection:
            post(connection, stream=True)
            request_id = id_in(read_until(connection, b'"role":"assistant"'))
            worker.claim(request_id)
            index = 0
            while isinstance(worker.append(request_id, index, *([100] * 20_000)), Appended):
                index += 20_000
            end = end_of(records, request_id)
            assert (end.state, end.reason) == ("cancelled", "disconnect")
            assert b"[DONE]" not in read_to_end(connection)


@contextmanager
def serving(application: Application, listener: socket.socket) -> Iterator[None]:
    """The server in a thread."""

    class ThreadServer(Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            is_up.set()

    is_up = threading.Event()
    server = ThreadServer(application, exit_s=None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert is_up.wait(10)
        yield
    finally:
        assert server._loop is not None
        server._loop.call_soon_threadsafe(server.end)
        thread.join(10)
