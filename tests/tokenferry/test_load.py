"""The load generator reads any cut of the bytes the same way, and counts every failure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from bench.load import parse_arguments, print_table
from tokenferry.load import (
    Load,
    Stream,
    Tally,
    Target,
    body_of,
    drive,
    encode_request,
    messages,
    percentile_ms,
)

CHUNKS: list[Any] = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"delta": {"content": "one"}, "finish_reason": None}]},
    {"choices": [{"delta": {"content": "two"}, "finish_reason": None}]},
    {"choices": [{"delta": {}, "finish_reason": "length"}]},
    {
        "choices": [],
        "usage": {"completion_tokens": 5, "prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}},
    },
]


def body(chunks: list[Any], done: bool = True) -> bytes:
    events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + (["data: [DONE]\n\n"] if done else [])
    return ": keep-alive\n\n".join(events).encode()


def chunked(payload: bytes, size: int = 17) -> bytes:
    pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def reply(payload: bytes, status: str = "200 OK", coding: str = "Transfer-Encoding: chunked\r\n") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: text/event-stream\r\n{coding}\r\n".encode() + payload


def read(data: bytes, cut: int) -> Tally:
    """What a stream counts when it receives `data` in pieces of `cut` bytes and then the end."""

    async def feed() -> Tally:
        tally = Tally()
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = Stream(b"", tally, finished)
        for start in range(0, len(data), cut):
            stream.data_received(data[start : start + cut])
        stream.connection_lost(None)
        await finished
        return tally

    return asyncio.run(feed())


@pytest.mark.parametrize("cut", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("coding", ["chunked", "plain"])
def test_any_cut_of_the_bytes_gives_the_same_figures(cut: int, coding: str) -> None:
    data = reply(chunked(body(CHUNKS))) if coding == "chunked" else reply(body(CHUNKS), coding="")
    tally = read(data, cut)
    assert (tally.num_output_tokens, tally.num_prompt_tokens, tally.num_cached_tokens) == (5, 7, 3)
    assert (tally.num_events, len(tally.ttfts), len(tally.gaps)) == (2, 1, 1)
    assert tally.finish_reasons == {"length": 1}
    assert not tally.errors


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (reply(b'{"error": {"message": "queue full"}}', "429 Too Many Requests", ""), "HTTP 429"),
        (reply(body(CHUNKS, done=False), coding=""), "without [DONE]"),
        (reply(body(CHUNKS[:-1]), coding=""), "no usage"),
        (reply(body([{"error": {"message": "worker lost"}}], done=False), coding=""), "worker lost"),
        (b"", "HTTP 0"),
    ],
)
def test_every_failure_is_counted_with_its_reason(data: bytes, error: str) -> None:
    errors = read(data, 10_000).errors
    assert [error in reason for reason in errors] == [True], errors
    assert sum(errors.values()) == 1


def test_a_server_that_is_not_there_is_an_error_not_a_crash() -> None:
    target = Target("127.0.0.1", 9, "/v1", "model", "")
    tally = asyncio.run(drive(target, [b"", b""], 2, 5.0))
    assert sum(tally.errors.values()) == 2


def test_requests_are_sent_whole_with_at_most_the_wanted_number_open() -> None:
    num_open = most_open = 0
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open, most_open
        num_open += 1
        most_open = max(most_open, num_open)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        seen.append(await reader.readexactly(length))
        writer.write(reply(chunked(body(CHUNKS))))
        num_open -= 1
        writer.close()

    async def measure() -> Tally:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            target = Target("127.0.0.1", server.sockets[0].getsockname()[1], "/v1", "model", "key")
            requests = [encode_request(target, {"number": number}) for number in range(5)]
            return await drive(target, requests, 2, 10.0)

    tally = asyncio.run(measure())
    assert sorted(seen) == [b'{"number":%d}' % number for number in range(5)]
    assert tally.num_output_tokens == 25
    assert most_open <= 2


def test_each_number_has_another_prompt_and_shared_ones_the_same_beginning() -> None:
    assert messages("short", 1, 0) == messages("short", 1, 0)
    assert messages("short", 1, 0) != messages("short", 2, 0)
    assert messages("shared", 1, 0)[0] == messages("shared", 2, 0)[0]
    assert len(messages("shared", 1, 0)[0]["content"].split()) > 900


def test_extra_fields_are_merged_and_null_takes_one_away() -> None:
    target = Target("127.0.0.1", 1, "/v1", "m", "")
    body = body_of(target, "short", 3, Load(max_tokens=7, extra={"ignore_eos": None, "seed": 5}))
    assert "ignore_eos" not in body
    assert (body["seed"], body["max_tokens"], body["messages"]) == (5, 7, messages("short", 3, 0))
    assert body_of(target, "short", 3, Load())["ignore_eos"] is True


def test_percentiles_are_nearest_ranks() -> None:
    values = [i / 1000 for i in range(1, 101)]
    assert (percentile_ms(values, 0.5), percentile_ms(values, 0.95), percentile_ms([], 0.5)) == (50.0, 95.0, None)


@pytest.mark.parametrize("arguments", [["--base-url", "http://example.com/v1"], ["-c", "0"], ["-c", "99999"]])
def test_other_machines_and_unbounded_loads_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)


def test_the_table_has_a_line_for_every_run(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, Any] = dict.fromkeys(
        ["kind", "concurrency", "output_tokens_per_s", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p95_ms"], 1
    )
    print_table([{**row, "cached_tokens": 0, "errors": 0, "client_cpu_share": 0.1}] * 2)
    assert len(capsys.readouterr().out.splitlines()) == 4
