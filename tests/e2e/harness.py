"""What the end-to-end tests ask of a running cell, beyond what `tokenferry.cell.group` does for the demo too."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from openai import OpenAI, Stream
from openai.types.chat import ChatCompletionChunk

from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, decode_entry
from tokenferry.cell.group import HOST, Cell

STATES_OF_THE_END = {b"finished", b"cancelled", b"failed"}


@dataclass(slots=True)
class Streamed:
    """What a client saw of one streamed answer."""

    request_id: str = ""
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    longest_gap_s: float = 0.0


class TestedCell(Cell):
    """`with TestedCell(folder, num_workers=2) as cell: cell.client().chat...`"""

    __test__ = False

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "scripted",
        num_workers: int = 1,
        num_web: int = 1,
        environ: Mapping[str, str] | None = None,
        start_s: float = 60.0,
    ) -> None:
        environ = {"PREFLIGHT_FORCE": "1", **(environ or {})}
        super().__init__(
            folder, model=model, num_workers=num_workers, num_web=num_web, environ=environ, start_s=start_s
        )

    def __enter__(self) -> TestedCell:
        super().__enter__()
        return self

    def client(self, *, timeout_s: float = 60.0) -> OpenAI:
        """Never retries, so that a test sees what the server said."""
        return OpenAI(base_url=self.base_url, api_key="local", max_retries=0, timeout=timeout_s)

    @cached_property
    def shared_client(self) -> OpenAI:
        """One for all streams: a client takes long to make. Closed with the cell."""
        return self.client()

    def stop(self) -> None:
        if "shared_client" in self.__dict__:
            self.shared_client.close()
        super().stop()

    @contextmanager
    def open_stream(self, prompt: str, max_tokens: int, **options: Any) -> Iterator[Stream[ChatCompletionChunk]]:
        """A streamed answer; leaving the block closes the connection."""
        stream = self.shared_client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            max_completion_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        with stream:
            yield stream

    def stream(self, prompt: str, max_tokens: int, *, kill_after_events: int = 0, **options: Any) -> Streamed:
        """Read one streamed answer to its end; on the way, perhaps, SIGKILL the engine that has it."""
        seen = Streamed()
        num_events, last_s = 0, 0.0
        with self.open_stream(prompt, max_tokens, **options) as stream:
            for chunk in stream:
                seen.request_id = chunk.id
                for choice in chunk.choices:
                    if choice.finish_reason:
                        seen.finish_reasons.append(choice.finish_reason)
                    if choice.delta.content:
                        now_s, num_events = time.monotonic(), num_events + 1
                        seen.longest_gap_s = max(seen.longest_gap_s, now_s - last_s) if last_s else 0.0
                        last_s = now_s
                        seen.text += choice.delta.content
                        if num_events == kill_after_events:
                            self.kill_engine_of(chunk.id)
                if chunk.usage is not None:
                    seen.num_prompt_tokens = chunk.usage.prompt_tokens
                    seen.num_output_tokens = chunk.usage.completion_tokens
                    details = chunk.usage.prompt_tokens_details
                    seen.num_cached_tokens = (details.cached_tokens or 0) if details else 0
        return seen

    def get(self, path: str, web: int = 0) -> int:
        """The status of a GET, of the web process with that position."""
        connection = http.client.HTTPConnection(HOST, self.ports[web], timeout=10)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def worker_of(self, request_id: str) -> str:
        """The worker that has, or had, this request."""
        state = self.records.state(request_id)
        assert state is not None, f"{request_id} has no record"
        return state.worker

    def attempt_of(self, request_id: str) -> int:
        state = self.records.state(request_id)
        assert state is not None, f"{request_id} has no record"
        return state.attempt

    def kill_engine_of(self, request_id: str) -> None:
        """SIGKILL the engine process that has this request, unless another kill was faster."""
        worker = self.worker_of(request_id)
        for info in self.workers():
            if info.worker == worker:
                with suppress(ProcessLookupError):
                    os.kill(info.pid, signal.SIGKILL)

    def pid_at_work(self, name: str) -> int | None:
        """The process that does the work of `name`: the child of its supervisor. None between two of them."""
        supervisor = self.process(name).popen.pid
        try:
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def wait_pid_at_work(self, name: str, other_than: int | None = None) -> int:
        self.wait_until(lambda: self.pid_at_work(name) not in (None, other_than), f"{name} works")
        pid = self.pid_at_work(name)
        assert pid is not None
        return pid

    def wait_quiet(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing is left of any request: no slot, no block, no held entry, no reader, no open record."""
        self.wait_until(lambda: not self.leftovers(), "nothing is left over", timeout_s)

    def leftovers(self) -> dict[str, object]:
        """What live requests take up, by name; empty when there are none."""
        loads = [load for _, load in self.records.workers()]
        found: dict[str, object] = {
            "running": sum(load.num_running + load.num_waiting for load in loads),
            "blocks": sum(load.num_blocks - load.num_free_blocks for load in loads),
            "held": sum(int(self.redis.scard(key)) for key in self.redis.scan_iter(keys.held("*"))),
            "waiting": self.records.num_waiting(self.model),
            "read": sum(int(self.redis.scard(key)) for key in self.redis.scan_iter(keys.reader_open("*"))),
            "due": int(self.redis.zcard(keys.DUE)),
            "open records": [
                key
                for key in self.redis.scan_iter("tf:{*}:req")
                if self.redis.hget(key, "state") not in STATES_OF_THE_END
            ],
        }
        return {what: amount for what, amount in found.items() if amount}

    def stream_faults(self) -> list[str]:
        """Streams without a time to live, with a gap, or without exactly one terminal entry at the end."""
        faults = []
        for key in self.redis.scan_iter("tf:{*}:out"):
            raw: Any = self.redis.xrange(key)
            if not raw:
                faults.append(f"{key!r}: empty")
                continue
            *tokens, last = [decode_entry(entry, fields) for entry, fields in raw]
            index = 0
            for event in tokens:
                if isinstance(event, TerminalEvent) or event.index != index:
                    faults.append(f"{key!r}: {event} at index {index}")
                    break
                index += len(event.token_ids)
            if not isinstance(last, TerminalEvent) or last.index != index:
                faults.append(f"{key!r}: ends with {last} after {index} tokens")
            if self.redis.pttl(key) <= 0:
                faults.append(f"{key!r}: never expires")
        return faults
