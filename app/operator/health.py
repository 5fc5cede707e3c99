"""`GET /livez` (this process runs) and `GET /readyz` (a request would be accepted now)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from falcon import HTTP_503
from falcon.asgi import Request, Response
from redis.exceptions import RedisError

from app.answers.drain import OpenAnswers
from tasks.protocol.record import RequestRecords


class Live:
    async def on_get(self, req: Request, resp: Response) -> None:
        resp.media = {"status": "ok"}

    on_head = on_get


class Ready:
    """Ready means: not draining, Redis answers, and every model has a live worker."""

    def __init__(self, models: Sequence[str], records: RequestRecords, answers: OpenAnswers, pool: Executor) -> None:
        self._models = tuple(models)
        self._records = records
        self._answers = answers
        self._pool = pool

    async def on_get(self, req: Request, resp: Response) -> None:
        reason = "draining" if self._answers.is_draining else None
        if reason is None:
            reason = await asyncio.get_running_loop().run_in_executor(self._pool, self._look)
        if reason is None:
            resp.media = {"status": "ready"}
        else:
            resp.status = HTTP_503
            resp.set_header("retry-after", "1")
            resp.media = {"status": "unavailable", "reason": reason}

    on_head = on_get

    def _look(self) -> str | None:
        try:
            without = [model for model in self._models if not self._records.workers(model)]
        except RedisError:
            return "queue_unreachable"
        return f"no_worker: {', '.join(without)}" if without else None
