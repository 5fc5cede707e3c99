"""Whether a chat request may enter the queue, and the job it becomes.

Owns the limits that the live workers set, and the translation of every refusal of the queue into what the client is
told. Blocking: called in a worker thread. Refuses to know about HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.exceptions import RedisError

from app.errors import context_length_exceeded, no_worker, queue_full, queue_unreachable
from app.openai_in import ChatCall
from decode.sampling import SamplingParams
from tasks.contract import GenerationJob, WorkerInfo, WorkerLoad
from tasks.errors import NoWorker, QueueFull

logger = logging.getLogger(__name__)

LIMITS_TTL_S = 1.0


class Records(Protocol):
    """`tasks.record.RequestRecords`, as far as it is used here."""

    def workers(self, model: str | None = None) -> list[tuple[WorkerInfo, WorkerLoad]]: ...
    def retry_after_s(self, model: str) -> int: ...


class Submits(Protocol):
    """`tasks.submit.Submitter`, as far as it is used here."""

    def submit(self, jobs: Sequence[GenerationJob], *, reader: str | None, max_waiting: int) -> object: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What every live worker of a model can do: a request that fits may be claimed by any of them."""

    max_tokens: int
    """Prompt and output together."""
    fingerprint: str | None
    """None while workers of different fingerprints serve the model: which one will answer is not known yet."""


class Admission:
    def __init__(
        self,
        records: Records,
        submitter: Submits,
        *,
        reader_id: str,
        max_waiting: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records = records
        self._submitter = submitter
        self._reader_id = reader_id
        self._max_waiting = max_waiting
        self._clock = clock
        self._limits: dict[str, tuple[float, Limits]] = {}

    def admit(
        self,
        request_id: str,
        call: ChatCall,
        prompt_token_ids: list[int],
        eos_token_ids: tuple[int, ...],
        seed: int,
        created_ms: int,
    ) -> Limits:
        """Puts the request on offer. Raises ApiError, or RedisError if it is not known whether it is on offer."""
        try:
            limits = self._limits_of(call.model)
        except RedisError as error:
            logger.warning("%s refused, Redis not reachable: %s", request_id, error)
            raise queue_unreachable() from error
        max_tokens = _fit(limits.max_tokens, len(prompt_token_ids), call.max_tokens)
        job = GenerationJob(
            request_id=request_id,
            model=call.model,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=call.temperature,
                top_p=call.top_p,
                top_k=call.top_k,
                min_p=call.min_p,
                seed=seed if call.seed is None else call.seed,
                stop_token_ids=eos_token_ids,
                ignore_eos=call.ignore_eos,
                min_tokens=call.min_tokens,
                presence_penalty=call.presence_penalty,
                frequency_penalty=call.frequency_penalty,
                logit_bias=call.logit_bias,
                num_logprobs=call.num_logprobs,
            ),
            created_ms=created_ms,
        )
        self._submit(job)
        return limits

    def _submit(self, job: GenerationJob) -> None:
        try:
            self._submitter.submit([job], reader=self._reader_id, max_waiting=self._max_waiting)
        except QueueFull as refusal:
            logger.info("%s refused, queue full: %s", job.request_id, refusal)
            raise queue_full(self._retry_after_s(job.model)) from refusal
        except NoWorker as refusal:
            self._limits.pop(job.model, None)
            raise no_worker(job.model) from refusal

    def _limits_of(self, model: str) -> Limits:
        now_s = self._clock()
        known = self._limits.get(model)
        if known is not None and now_s < known[0]:
            return known[1]
        workers = [info for info, _ in self._records.workers(model)]
        if not workers:
            raise no_worker(model)
        fingerprints = {info.fingerprint for info in workers}
        limits = Limits(
            max_tokens=min(min(info.max_model_len, info.kv_cache_tokens) for info in workers),
            fingerprint=fingerprints.pop() if len(fingerprints) == 1 else None,
        )
        self._limits[model] = (now_s + LIMITS_TTL_S, limits)
        return limits

    def _retry_after_s(self, model: str) -> int:
        """By the rate at which workers have been taking requests of late."""
        try:
            return self._records.retry_after_s(model)
        except RedisError:
            return 1


def _fit(limit: int, num_prompt_tokens: int, max_tokens: int | None) -> int:
    """How many output tokens the request may have. Raises ApiError."""
    if num_prompt_tokens >= limit or (max_tokens is not None and num_prompt_tokens + max_tokens > limit):
        raise context_length_exceeded(limit, num_prompt_tokens, max_tokens or 0)
    return limit - num_prompt_tokens if max_tokens is None else max_tokens
