"""The web application over fakeredis, driven by hand: an ASGI client, a scripted worker, and a reader that is turned.

Nothing here runs by itself: `Web.turn` lets the reader read once and the event loop settle, `Worker` appends exactly
what a test says. Blocking calls run at once, in the caller's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import fakeredis
import orjson

from app.application import Application, ApplicationSettings, create_app
from app.http.api_keys import KeyFile
from app.text.edge import TextEdge
from app.text.scripted import scripted_text_edge
from bridge.streams.reader import Reader
from decode.checkpoint.names import SCRIPTED_EOS_TOKEN_ID
from decode.engine.sampling import TokenLogprobs
from tasks.observe.board import MetricsBoard
from tasks.observe.live import LiveCell
from tasks.process.clients import connect_fake
from tasks.process.tracing import OFF, Tracer
from tasks.protocol.broker import build_broker
from tasks.protocol.contract import GenerationJob, WorkerInfo, WorkerLoad, pack_logprobs
from tasks.protocol.record import Append, Claimed, RequestRecords, Terminal
from tasks.protocol.submit import Submitter

MODEL = "scripted"
FINGERPRINT = "fp-1"
HELLO = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": HELLO}
ID = "chatcmpl-1"
"""Of the first chat request of a test."""
START_S = 1_700_000_000.0
EOS = SCRIPTED_EOS_TOKEN_ID
NUM_PROMPT_TOKENS = len("user: hi\nassistant:")


class Inline(Executor):
    """A pool without threads."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def worker_info(worker: str = "w1", **changes: Any) -> WorkerInfo:
    known: dict[str, Any] = {
        "worker": worker,
        "pid": 1,
        "host": "h",
        "device": "cpu",
        "model": MODEL,
        "fingerprint": FINGERPRINT,
        "variant": "scripted",
        "max_model_len": 1000,
        "max_num_seqs": 8,
        "kv_cache_tokens": 4096,
        "started_ms": 0,
    }
    return WorkerInfo(**{**known, **changes})


class Worker:
    """Does to the request record what a worker does, one call at a time."""

    def __init__(self, records: RequestRecords, info: WorkerInfo) -> None:
        self.records = records
        self.info = info
        self.records.heartbeat(info, WorkerLoad(), lease_ms=3_600_000)

    def claim(self, request_id: str) -> GenerationJob:
        claimed = self.records.claim(request_id, 1, self.info.worker, self.info.fingerprint)
        assert isinstance(claimed, Claimed)
        return claimed.job

    def append(
        self,
        request_id: str,
        first_index: int,
        *token_ids: int,
        end: str | None = None,
        cached: int = 0,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> Any:
        terminal = Terminal("finished", end) if end in ("stop", "length") else None
        if end is not None and terminal is None:
            terminal = Terminal("failed", end)
        packed = pack_logprobs(logprobs)
        [result] = self.records.append_many(
            [Append(request_id, 1, first_index, token_ids, cached, terminal, logprobs=packed)]
        )
        return result


class Exchange:
    """One HTTP request through the ASGI interface, with a client that can leave, and can stop reading.

    It is also the outlet of its own response (`bridge.streams.relay.Outlet`), in the tests that have one.
    """

    def __init__(self, web: Web, method: str, path: str, headers: Mapping[str, str], parts: list[bytes]) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.is_over = False
        self.was_dropped = False
        self.num_parts_read = 0
        self.num_writes = 0
        self._parts = parts
        self._left = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        path, _, query = path.partition("?")
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("testserver", 80),
            "client": ("testclient", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "tokenferry.abort": self._abort,
        }
        if web.has_outlet:
            self.scope["tokenferry.outlet"] = self
        self.task = asyncio.ensure_future(web.app(self.scope, self._receive, self._send))

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[tuple[Any, Any]]:
        """(id, data) of every complete event so far, comments left out. With several choices the id is a text."""
        found: list[tuple[Any, Any]] = []
        for block in self.body.decode().split("\n\n")[:-1]:
            id_line, data_line = (line for line in block.split("\n") if not line.startswith(":"))
            data = data_line.removeprefix("data: ")
            name = id_line.removeprefix("id: ")
            found.append((name if "," in name else int(name), data if data == "[DONE]" else orjson.loads(data)))
        return found

    @property
    def chunks(self) -> list[Any]:
        return [data for _, data in self.events if data != "[DONE]"]

    @property
    def text(self) -> str:
        """Of a streamed answer with one choice."""
        return self.text_of(0)

    def content(self, stream: bool) -> str:
        """Of an answer with one choice, streamed or not."""
        content: str = self.text if stream else self.json["choices"][0]["message"]["content"]
        return content

    def text_of(self, choice: int) -> str:
        shown = [one for chunk in self.chunks for one in chunk.get("choices", ()) if one["index"] == choice]
        return "".join(one["delta"].get("content") or "" for one in shown)

    def leave(self) -> None:
        self._left.set()

    def stop_reading(self) -> None:
        self._reading.clear()

    def read_on(self) -> None:
        self._reading.set()

    @property
    def is_ready(self) -> bool:
        return self._reading.is_set() and not self._left.is_set()

    def write(self, data: bytes) -> None:
        assert self.status
        assert not self.is_over
        self.num_writes += 1
        self.body += data

    def _abort(self) -> None:
        self.was_dropped = True
        self._left.set()
        self._reading.set()

    async def _receive(self) -> dict[str, Any]:
        if self.num_parts_read < len(self._parts):
            self.num_parts_read += 1
            more = self.num_parts_read < len(self._parts)
            return {"type": "http.request", "body": self._parts[self.num_parts_read - 1], "more_body": more}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self._reading.wait()
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.is_over = not message.get("more_body", False)


class Web:
    """Everything of one web process, on the running event loop."""

    def __init__(
        self,
        *,
        text_edges: Mapping[str, TextEdge] | None = None,
        outlet: bool = False,
        keys: KeyFile | None = None,
        tracer: Tracer = OFF,
        pool: Executor | None = None,
        beside: Web | None = None,
        **settings: Any,
    ) -> None:
        """`beside` is another web process of the same cell."""
        self.has_outlet = outlet
        server: fakeredis.FakeServer = fakeredis.FakeServer() if beside is None else beside.server
        self.server: fakeredis.FakeServer = server
        self.redis = connect_fake(server, use="short")
        self.records = RequestRecords(self.redis)
        self.submitter = Submitter(self.records, build_broker(connect_fake(server, use="queue")), self.redis)
        self.reader = Reader(
            connect_fake(server, use="blocking"),
            self.redis,
            "reader-1" if beside is None else "reader-2",
            self.records,
            window=8,
            block_ms=None,
        )
        self.reader.bind(asyncio.get_running_loop())
        self.now_s = 0.0
        self.num_ids = 0 if beside is None else 100
        self.on_start: Callable[[Exchange], None] = lambda exchange: None
        self.app: Application = create_app(
            text_edges=text_edges or {MODEL: scripted_text_edge()},
            records=self.records,
            submitter=self.submitter,
            reader=self.reader,
            live=LiveCell(self.redis),
            settings=ApplicationSettings(**settings),
            keys=keys,
            board=MetricsBoard(self.redis),
            tracer=tracer,
            pool=pool or Inline(),
            clock=lambda: START_S,
            monotonic=lambda: self.now_s,
            new_id=self._new_id,
            new_seed=lambda: 4242,
        )

    def _new_id(self) -> str:
        self.num_ids += 1
        return str(self.num_ids)

    def worker(self, name: str = "w1", **changes: Any) -> Worker:
        return Worker(self.records, worker_info(name, **changes))

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def turn(self) -> None:
        """One read of the reader, delivered and relayed."""
        self.reader.tick(self.now_s)
        await self.settle()

    async def request(
        self, method: str, path: str, body: bytes | list[bytes] = b"", headers: Mapping[str, str] | None = None
    ) -> Exchange:
        parts = body if isinstance(body, list) else [body]
        exchange = Exchange(self, method, path, headers or {}, parts)
        self.on_start(exchange)
        await self.settle()
        return exchange

    async def post(self, body: bytes | dict[str, Any], **headers: str) -> Exchange:
        """A chat request. Header names with `_` for `-`."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        known = {"content-type": "application/json", "content-length": str(len(data))}
        known.update({name.replace("_", "-"): value for name, value in headers.items()})
        return await self.request("POST", "/v1/chat/completions", data, known)

    async def get(self, path: str, **headers: str) -> Exchange:
        return await self.request("GET", path, b"", {k.replace("_", "-"): value for k, value in headers.items()})

    async def chat(self, **fields: Any) -> Exchange:
        return await self.post({**BODY, **fields})

    async def claimed_post(self, body: bytes | dict[str, Any], **headers: str) -> tuple[Worker, Exchange]:
        """The first chat request of a test, and a worker that has claimed it."""
        worker = self.worker()
        exchange = await self.post(body, **headers)
        worker.claim(ID)
        return worker, exchange

    async def claimed_chat(self, **fields: Any) -> tuple[Worker, Exchange]:
        return await self.claimed_post({**BODY, **fields})

    async def claimed_choices(self, n: int, **fields: Any) -> tuple[Worker, Exchange]:
        """As `claimed_chat`, with every choice claimed."""
        worker, exchange = await self.claimed_chat(n=n, **fields)
        for number in range(1, n):
            worker.claim(f"{ID}.{number}")
        return worker, exchange

    async def complete(self, **fields: Any) -> Exchange:
        """A request of the legacy completions."""
        body = orjson.dumps({"model": MODEL, "prompt": "hi", **fields})
        return await self.request("POST", "/v1/completions", body, {"content-type": "application/json"})


def end_of(web: Web, request_id: str = ID) -> tuple[str, str]:
    """State and reason of a request that there is."""
    state = web.records.state(request_id)
    assert state is not None
    return state.state, state.reason
