"""A load generator for any server that streams the OpenAI chat API on this machine.

Owns the prompts, the open connections and the figures. Refuses to know our server: it is the same for every peer.
Sockets are read as raw asyncio protocols, so that its own share of the processors stays small; it reports that share.
`tokenferry bench` shows it to people, `python -m bench.load` gives JSON lines and tables for reports.

TTFT is from sending the request to the first event with text. An inter-token gap lies between two events with text of
one stream (an event may hold several tokens, see tokens_per_event). Tokens a second are the completion tokens of all
answers over the time from the first request to the end of the last answer.
"""

from __future__ import annotations

import asyncio
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.request import Request, urlopen

import orjson

KINDS = ("short", "long", "shared")
_WORDS_OF = {"short": 42, "long": 490, "prefill": 1950}
CONCURRENCY = (1, 4, 16, 32)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_REQUESTS = 10_000

_WORDS = """
    apple road cloud table music water horse light stone paper green house train field night ocean bread chair
    clock river mouse plant sugar tower uncle voice wheel youth amber beach cabin dream eagle flame grain honey
""".split()  # noqa: SIM905 (a list of words reads better as text)


@dataclass(frozen=True, slots=True)
class Target:
    """Where the requests go."""

    host: str
    port: int
    path: str
    model: str
    key: str


@dataclass(frozen=True, slots=True)
class Load:
    """What one run asks for."""

    num_requests: int = 0
    """0: one for each stream, at least four."""
    max_tokens: int = 128
    timeout_s: float = 240.0
    """For one answer."""
    seed: int = 0
    offset: int = 0
    """Number of the first request: another one, other prompts."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Merged into every request; None takes a field away, for servers that refuse it."""


@dataclass(slots=True)
class Tally:
    """What all streams of one run have seen. Times in seconds."""

    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_events: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


class Stream(asyncio.Protocol):
    """One streamed answer: HTTP response head, chunked or plain body, server-sent events. Ends `finished` once."""

    def __init__(self, request: bytes, tally: Tally, finished: asyncio.Future[None]) -> None:
        self._request = request
        self._tally = tally
        self._finished = finished
        self._raw = bytearray()  # received, not yet taken apart
        self._text = bytearray()  # body, after the transfer coding
        self._head_seen = False
        self._chunked = False
        self._status = 0
        self._done = False
        self._failed = False
        self._usage: dict[str, Any] | None = None
        self._sent_s = self._last_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._sent_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        if not self._head_seen and not self._take_head():
            return
        self._take_body()
        if self._status == 200:
            self._take_events()
        if self._done and self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._finished.done():  # it took too long, and was given up
            return
        if self._status != 200:
            self._tally.errors[f"HTTP {self._status}: {bytes(self._text[:200]).decode(errors='replace')}"] += 1
        elif self._failed:
            pass  # counted when it was read
        elif not self._done:
            self._tally.errors["stream ended without [DONE]"] += 1
        elif self._usage is None:
            self._tally.errors["no usage"] += 1
        else:
            self._tally.num_output_tokens += self._usage["completion_tokens"]
            self._tally.num_prompt_tokens += self._usage["prompt_tokens"]
            details = self._usage.get("prompt_tokens_details") or {}
            self._tally.num_cached_tokens += details.get("cached_tokens") or 0
        self._finished.set_result(None)

    def give_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _take_head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._raw[:end]).lower()
        del self._raw[: end + 4]
        self._status = int(head.split(b" ", 2)[1])
        self._chunked = b"transfer-encoding: chunked" in head
        self._head_seen = True
        return True

    def _take_body(self) -> None:
        if not self._chunked:
            self._text += self._raw
            self._raw.clear()
            return
        while (line_end := self._raw.find(b"\r\n")) >= 0:
            size = int(self._raw[:line_end].split(b";")[0], 16)
            if len(self._raw) < line_end + 4 + size:
                return
            self._text += self._raw[line_end + 2 : line_end + 2 + size]
            del self._raw[: line_end + 4 + size]

    def _take_events(self) -> None:
        now_s = time.perf_counter()
        *complete, rest = self._text.replace(b"\r\n", b"\n").split(b"\n\n")
        self._text = rest
        for event in complete:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._take_data(bytes(line[5:]).strip(), now_s)

    def _take_data(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = orjson.loads(data)
        if event.get("error"):
            self._failed = True
            self._tally.errors[f"in the stream: {event['error'].get('message', event['error'])}"] += 1
        self._usage = event.get("usage") or self._usage
        for choice in event.get("choices") or ():
            if (choice.get("delta") or {}).get("content"):
                self._tally.num_events += 1
                if self._last_s:
                    self._tally.gaps.append(now_s - self._last_s)
                else:
                    self._tally.ttfts.append(now_s - self._sent_s)
                self._last_s = now_s
            if choice.get("finish_reason"):
                self._tally.finish_reasons[choice["finish_reason"]] += 1


def words(num_words: int, rng: random.Random) -> str:
    """Common words, each about one token in the vocabularies we measure with."""
    return " ".join(rng.choice(_WORDS) for _ in range(num_words))


def messages(kind: str, number: int, seed: int) -> list[dict[str, str]]:
    """The conversation of request `number`: another one for each number, the same for each run."""
    rng = random.Random(f"{seed} {kind} {number}")
    ask = f"Number {number}. Tell a long story about these words: "
    if kind == "shared":
        rules = "You follow these notes. " + words(980, random.Random(f"{seed} notes"))
        return [{"role": "system", "content": rules}, {"role": "user", "content": ask + words(24, rng)}]
    return [{"role": "user", "content": ask + words(_WORDS_OF[kind], rng)}]


def encode_request(target: Target, body: dict[str, Any]) -> bytes:
    payload = orjson.dumps(body)
    head = [f"POST {target.path}/chat/completions HTTP/1.1", f"Host: {target.host}:{target.port}"]
    head += [
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "Connection: close",
        f"Content-Length: {len(payload)}",
    ]
    if target.key:
        head.append(f"Authorization: Bearer {target.key}")
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload


async def one_answer(target: Target, request: bytes, tally: Tally, timeout_s: float) -> None:
    """Send one request on a connection of its own and wait for its end. Failures are counted, never raised."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()
    stream = Stream(request, tally, finished)
    try:
        await loop.create_connection(lambda: stream, target.host, target.port)
    except OSError as error:
        tally.errors[f"no connection: {error}"] += 1
        return
    try:
        await asyncio.wait_for(finished, timeout_s)
    except TimeoutError:
        tally.errors[f"no end after {timeout_s:.0f} s"] += 1
        stream.give_up()


async def drive(target: Target, requests: Sequence[bytes], concurrency: int, timeout_s: float) -> Tally:
    """Keep `concurrency` streams open until every request has been answered."""
    tally = Tally()
    left: Iterator[bytes] = iter(requests)

    async def keep_asking() -> None:
        for request in left:
            await one_answer(target, request, tally, timeout_s)

    await asyncio.gather(*(keep_asking() for _ in range(concurrency)))
    return tally


def percentile_ms(values: Sequence[float], share: float) -> float | None:
    """Nearest rank, in milliseconds; None of nothing."""
    if not values:
        return None
    rank = max(1, math.ceil(share * len(values)))
    return round(sorted(values)[rank - 1] * 1000, 2)


def body_of(target: Target, kind: str, number: int, load: Load) -> dict[str, Any]:
    """The request `number`."""
    body = {
        "model": target.model,
        "messages": messages(kind, number, load.seed),
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        **load.extra,
    }
    return {name: value for name, value in body.items() if value is not None}


def run(target: Target, kind: str, concurrency: int, load: Load) -> dict[str, Any]:
    """One measurement: its figures, ready to be printed."""
    num_requests = min(load.num_requests or max(4, concurrency), MAX_REQUESTS)
    numbers = range(load.offset, load.offset + num_requests)
    requests = [encode_request(target, body_of(target, kind, number, load)) for number in numbers]
    cpu_before, started_s = _cpu_seconds(), time.perf_counter()
    tally = asyncio.run(drive(target, requests, concurrency, load.timeout_s))
    wall_s = time.perf_counter() - started_s
    return {
        "kind": kind,
        "concurrency": concurrency,
        "requests": num_requests,
        "wall_s": round(wall_s, 2),
        "output_tokens": tally.num_output_tokens,
        "prompt_tokens": tally.num_prompt_tokens,
        "cached_tokens": tally.num_cached_tokens,
        "output_tokens_per_s": round(tally.num_output_tokens / wall_s, 1),
        "ttft_p50_ms": percentile_ms(tally.ttfts, 0.5),
        "ttft_p95_ms": percentile_ms(tally.ttfts, 0.95),
        "itl_p50_ms": percentile_ms(tally.gaps, 0.5),
        "itl_p95_ms": percentile_ms(tally.gaps, 0.95),
        "tokens_per_event": round(tally.num_output_tokens / tally.num_events, 2) if tally.num_events else None,
        "finish_reasons": dict(tally.finish_reasons),
        "errors": sum(tally.errors.values()),
        "first_errors": list(tally.errors)[:3],
        "client_cpu_share": round((_cpu_seconds() - cpu_before) / wall_s, 3),
    }


def first_model(base_url: str, key: str) -> str:
    request = Request(f"{base_url}/models", headers={"Authorization": f"Bearer {key or 'none'}"})
    with urlopen(request, timeout=10) as reply:
        return str(orjson.loads(reply.read())["data"][0]["id"])


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
