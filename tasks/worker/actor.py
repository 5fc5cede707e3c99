"""The one actor: `generate(request_id, attempt)` takes an assignment, has it generated, and returns (the ack).

Owns what a worker does about each refusal and each outcome. Refuses to know about the engine: it hands the job to
the loop and sleeps. The actor is made by `make_generate`, inside the worker process; the web process never sees it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from uuid import uuid4

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from redis.exceptions import RedisError

from tasks.observe.metrics import Meter
from tasks.protocol import keys
from tasks.protocol.broker import ACTOR_NAME
from tasks.protocol.contract import ContractError, WorkerInfo
from tasks.protocol.errors import FingerprintMismatch, Stale
from tasks.protocol.record import Append, Claimed, Failed, Reoffer, RequestRecords, Terminal
from tasks.protocol.submit import Submitter
from tasks.worker.engine_loop import EngineLoop, Outcome
from tasks.worker.metrics import WorkerMetrics

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 0.5
TOO_LARGE_PAUSE_S = 0.25
"""Before what is too large for this worker is offered again: it may well be the first to see it."""

T = TypeVar("T")


class Generate:
    """The actor's function. Each call runs on an actor thread of its own."""

    def __init__(
        self,
        records: RequestRecords,
        submitter: Submitter,
        loop: EngineLoop,
        info: WorkerInfo,
        *,
        not_handed_over: Callable[[], None],
        stopping: threading.Event,
        metrics: WorkerMetrics | None = None,
    ) -> None:
        """`not_handed_over` is called when a message ends without reaching the loop (`Gate.seen`)."""
        self._records = records
        self._submitter = submitter
        self._loop = loop
        self._info = info
        self._not_handed_over = not_handed_over
        self._stopping = stopping
        self._metrics = metrics or WorkerMetrics(Meter(), info.model)

    def __call__(self, request_id: str, attempt: int) -> None:
        claimed = None
        try:
            claimed = self._claim(request_id, attempt)
        finally:
            if claimed is None:
                self._not_handed_over()
        if claimed is None:
            return
        self._metrics.claimed(attempt)
        outcome = self._loop.run(claimed.job, attempt, claimed.token_ids)
        if outcome == "too_large" and not self._fits_elsewhere(claimed):
            self._fail_too_large(claimed, attempt)
        elif outcome not in ("ended", "fenced"):
            self._release(request_id, attempt, outcome)

    def _claim(self, request_id: str, attempt: int) -> Claimed | None:
        info, claim_id = self._info, uuid4().hex
        try:
            return self._persist(
                lambda: self._records.claim(request_id, attempt, info.worker, info.fingerprint, claim_id)
            )
        except Stale as refusal:
            log.info("%s", refusal)
        except FingerprintMismatch as refusal:
            log.info("%s attempt=%d: left to another worker, %s", request_id, attempt, refusal)
            queue = keys.queue_continue(info.model, refusal.required)
            self._submitter.requeue(Reoffer(request_id, attempt, queue))
        except ContractError as error:
            log.error("%s attempt=%d: unreadable job, %s", request_id, attempt, error)
            message = str(error)
            if self._persist(lambda: self._records.close(request_id, "failed", "contract_error", message)):
                self._metrics.ended("failed", "contract_error")
        return None

    def _release(self, request_id: str, attempt: int, reason: Outcome) -> None:
        worker = self._info.worker
        match self._persist(lambda: self._records.release(request_id, attempt, worker, reason)):
            case Reoffer() as reoffer:
                log.info("%s attempt=%d: released, %s", request_id, attempt, reason)
                self._metrics.released(reason)
                if reason == "too_large":
                    self._stopping.wait(TOO_LARGE_PAUSE_S)
                self._submitter.requeue(reoffer)
            case Failed() as failed:
                log.error("%s attempt=%d: failed, %s", request_id, attempt, failed.reason)
                self._metrics.released(reason)
                self._metrics.ended("failed", failed.reason)
            case _:
                pass

    def _fits_elsewhere(self, claimed: Claimed) -> bool:
        """Whether a live worker that may continue this answer has room for it."""
        num_tokens = len(claimed.job.prompt_token_ids) + len(claimed.token_ids) + 1
        workers = self._persist(lambda: self._records.workers(self._info.model))
        return workers is None or any(
            info.fingerprint == self._info.fingerprint and num_tokens <= min(info.kv_cache_tokens, info.max_model_len)
            for info, _ in workers
        )

    def _fail_too_large(self, claimed: Claimed, attempt: int) -> None:
        request_id = claimed.job.request_id
        num_tokens = len(claimed.job.prompt_token_ids) + len(claimed.token_ids)
        message = f"no live worker has room for an answer that is {num_tokens} tokens long with its prompt"
        log.error("%s attempt=%d: failed, %s", request_id, attempt, message)
        end = Terminal("failed", "context_length_exceeded", message)
        append = Append(request_id, attempt, len(claimed.token_ids), (), terminal=end)
        for result in self._persist(lambda: self._records.append_many([append])) or ():
            self._metrics.settled(append, result)

    def _persist(self, call: Callable[[], T]) -> T | None:
        """Call until Redis answers. None when the worker stops first: the watchdog finds the request."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return call()
            except RedisError as error:
                if self._stopping.wait(pause_s):
                    log.warning("stopping without an answer from Redis: %s", error)
                    return None
                pause_s = min(2 * pause_s, MAX_PAUSE_S)


def make_generate(broker: RedisBroker, generate: Generate) -> Any:
    """Register the actor with `broker`."""

    def run(request_id: str, attempt: int) -> None:
        generate(request_id, attempt)

    return dramatiq.actor(broker=broker, actor_name=ACTOR_NAME, queue_name=ACTOR_NAME)(run)
