"""A client that reads answers byte by byte, remembers when what came, and may leave, or read slowly, or not at all.

Owns what one exchange looked like from outside, broken connections too. Refuses to judge it: `tests.faults.verdict`
does. Written on raw streams, because a client library hides what these tests are about.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Literal

HOST = "127.0.0.1"
SMALL_BUFFER_BYTES = 4096

End = Literal["", "done", "error", "refused", "left", "cut", "hung", "unreached"]
"""done: a clean end. error: an error event in a stream. refused: an error status. left: this client closed the
connection. cut: it broke. hung: the client's time was over. unreached: nobody listened."""


Habit = Literal["plain", "resume", "retry", "stop", "background"]
"""What a client does beyond asking once (`tests.faults.persistent`)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves."""

    content: str
    max_tokens: int
    stop: tuple[str, ...] = ()
    is_streamed: bool = True
    leave_after: int | None = None
    """Close the connection after so many events with text; 0: as soon as the request is sent."""
    pause_s: float = 0.0
    """After each read, with small buffers: a slow reader."""
    num_choices: int = 1
    habit: Habit = "plain"
    fields: tuple[tuple[str, Any], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Seen:
    """One exchange from outside. Times are monotonic seconds."""

    ask: Ask
    web: int
    began_s: float = 0.0
    ended_s: float = 0.0
    end: End = ""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    request_id: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    """Of each choice."""
    finish_reasons: dict[int, list[str]] = field(default_factory=dict)
    error_code: str = ""
    ids: list[tuple[str, dict[int, int]]] = field(default_factory=list)
    """(id of an event with text, number of characters of each choice that came with it and before)."""
    last_id: str = ""
    arrivals_s: list[float] = field(default_factory=list)
    num_completion_tokens: int = 0
    is_marked_done: bool = False

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.texts.get(0, "")

    @property
    def answered_in_s(self) -> float:
        return self.ended_s - self.began_s


async def ask(
    port: int,
    wanted: Ask,
    *,
    web: int = 0,
    model: str = "scripted",
    limit_s: float = 60.0,
    into: Seen | None = None,
) -> Seen:
    """Send one request and read its answer as it wants to be read. Never raises for what the server does.

    `into` is filled while the answer comes.
    """
    seen = into or Seen(wanted, web)
    seen.began_s = time.monotonic()
    request = request_bytes("POST", "/v1/chat/completions", body_of(wanted, model), wanted.headers)
    await exchange(port, request, seen, limit_s)
    return seen


async def exchange(port: int, request: bytes, seen: Seen, limit_s: float) -> None:
    """Send these bytes and read the answer into `seen`, as its ask wants it to be read."""
    seen.end, seen.status, seen.error_code = "", 0, ""
    try:
        await asyncio.wait_for(_exchange(port, request, seen), limit_s)
    except TimeoutError:
        seen.end = "hung"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        seen.end = seen.end or "cut"
    seen.ended_s = time.monotonic()


class Asking:
    """An exchange under way: `seen` fills while it lasts. Made on a running event loop."""

    def __init__(
        self, port: int, wanted: Ask, *, web: int = 0, model: str = "scripted", limit_s: float = 60.0
    ) -> None:
        self.seen = Seen(wanted, web)
        self._task = asyncio.ensure_future(ask(port, wanted, web=web, model=model, limit_s=limit_s, into=self.seen))

    async def events(self, num_events: int) -> Seen:
        """Wait for so many events with text, or the end."""
        while len(self.seen.arrivals_s) < num_events and not self._task.done():  # noqa: ASYNC110 (a test looks on)
            await asyncio.sleep(0.002)
        return self.seen

    async def end(self) -> Seen:
        return await self._task

    async def leave(self) -> Seen:
        """Close the connection."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self.seen.end = self.seen.end or "left"
        return self.seen


def body_of(wanted: Ask, model: str) -> bytes:
    fields: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": wanted.content}],
        "max_completion_tokens": wanted.max_tokens,
        "temperature": 0,
        "stream": wanted.is_streamed,
        **dict(wanted.fields),
    }
    if wanted.num_choices > 1:
        fields["n"] = wanted.num_choices
    if wanted.is_streamed:
        fields["stream_options"] = {"include_usage": True}
    if wanted.stop:
        fields["stop"] = list(wanted.stop)
    return json.dumps(fields).encode()


def request_bytes(method: str, path: str, body: bytes = b"", headers: tuple[tuple[str, str], ...] = ()) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: tokenferry", "connection: close", f"content-length: {len(body)}"]
    if body:
        lines.append("content-type: application/json")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _exchange(port: int, request: bytes, seen: Seen) -> None:
    wanted = seen.ask
    try:
        reader, writer = await _connect(port, is_slow=wanted.pause_s > 0)
    except OSError:
        seen.end = "unreached"
        return
    try:
        writer.write(request)
        await writer.drain()
        if wanted.leave_after == 0:
            seen.end = "left"
            return
        await read_answer(reader, seen)
    finally:
        writer.transport.abort()


async def _connect(port: int, *, is_slow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if not is_slow:
        return await asyncio.open_connection(HOST, port)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, (HOST, port))
    except BaseException:
        sock.close()
        raise
    return await asyncio.open_connection(sock=sock, limit=SMALL_BUFFER_BYTES)


async def read_answer(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Read one response, of either kind, into `seen`."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    seen.status = int(head[0].split(" ")[1])
    seen.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head if line)}
    seen.request_id = seen.headers.get("x-request-id", "")
    if seen.headers.get("transfer-encoding") == "chunked":
        await _read_events(reader, seen)
        return
    body = await reader.readexactly(int(seen.headers.get("content-length", "0")))
    _take_whole(json.loads(body or b"{}"), seen)


def _take_whole(answer: dict[str, Any], seen: Seen) -> None:
    if answer.get("error"):
        seen.end, seen.error_code = "refused", str(answer["error"]["code"])
        return
    seen.request_id = answer["id"]
    if answer.get("status") in ("queued", "in_progress"):
        seen.end = "left"
        return
    for choice in answer["choices"]:
        seen.texts[choice["index"]] = choice["message"]["content"]
        seen.finish_reasons[choice["index"]] = [choice["finish_reason"]]
    seen.num_completion_tokens = answer["usage"]["completion_tokens"]
    seen.end, seen.is_marked_done = "done", True


async def _read_events(reader: asyncio.StreamReader, seen: Seen) -> None:
    pending = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pending += (await reader.readexactly(size + 2))[:-2]
        *blocks, pending = pending.split(b"\n\n")
        for block in blocks:
            _take_event(block, seen)
        if seen.ask.leave_after is not None and len(seen.arrivals_s) >= seen.ask.leave_after:
            seen.end = "left"
            return
        if seen.ask.pause_s:
            await asyncio.sleep(seen.ask.pause_s)
    seen.end = "error" if seen.error_code else "done"


def _take_event(block: bytes, seen: Seen) -> None:
    event_id, data = "", b""
    for line in block.split(b"\n"):
        if line.startswith(b"id: "):
            event_id = seen.last_id = line[4:].decode()
        elif line.startswith(b"data: "):
            data = line[6:]
    if data == b"[DONE]":
        seen.is_marked_done = True
    elif data:
        _take_chunk(json.loads(data), event_id, seen)


def _take_chunk(chunk: dict[str, Any], event_id: str, seen: Seen) -> None:
    if "error" in chunk:
        seen.error_code = str(chunk["error"]["code"])
        return
    seen.request_id = chunk["id"]
    if usage := chunk.get("usage"):
        seen.num_completion_tokens = usage["completion_tokens"]
    for choice in chunk["choices"]:
        index = choice["index"]
        if choice["finish_reason"]:
            seen.finish_reasons.setdefault(index, []).append(choice["finish_reason"])
        if text := choice["delta"].get("content"):
            seen.texts[index] = seen.texts.get(index, "") + text
            seen.arrivals_s.append(time.monotonic())
            seen.ids.append((event_id, {number: len(known) for number, known in seen.texts.items()}))
