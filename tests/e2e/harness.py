"""What the end-to-end tests ask of a running cell, beyond what `tokenferry.cell` does for the demo too."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from openai import OpenAI

from tasks import keys
from tasks.contract import WorkerInfo
from tokenferry.cell import Cell


class TestedCell(Cell):
    """`with TestedCell(folder, num_workers=2) as cell: cell.client().chat...`"""

    __test__ = False

    def __init__(
        self, folder: Path, *, model: str = "scripted", num_workers: int = 1, environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            folder, model=model, num_workers=num_workers, environ={"PREFLIGHT_FORCE": "1", **(environ or {})}
        )

    def __enter__(self) -> TestedCell:
        super().__enter__()
        return self

    def client(self, *, timeout_s: float = 60.0) -> OpenAI:
        """Never retries, so that a test sees what the server said."""
        return OpenAI(base_url=self.base_url, api_key="local", max_retries=0, timeout=timeout_s)

    def holder_of(self, request_id: str) -> WorkerInfo:
        """The live worker that has this request."""
        state = self.records.state(request_id)
        assert state is not None, f"{request_id} has no record"
        return next(info for info in self.workers() if info.worker == state.worker)

    def kill_engine_of(self, request_id: str) -> WorkerInfo:
        """SIGKILL the engine process that has this request."""
        holder = self.holder_of(request_id)
        os.kill(holder.pid, signal.SIGKILL)
        return holder

    def num_held(self) -> int:
        """Requests that live workers hold."""
        return sum(len(self.records.held(info.worker)) for info in self.workers())

    def num_busy_blocks(self) -> int:
        """KV blocks that are in use in live workers, as they say themselves."""
        return sum(load.num_blocks - load.num_free_blocks for _, load in self.records.workers())

    def num_running(self) -> int:
        """Sequences that live workers run or keep waiting."""
        return sum(load.num_running + load.num_waiting for _, load in self.records.workers())

    def num_waiting(self) -> int:
        return self.records.num_waiting(self.model)

    def num_read(self) -> int:
        """Requests that web processes say they read."""
        pattern = keys.reader_open("*")
        return sum(int(self.redis.scard(key)) for key in self.redis.scan_iter(pattern))
