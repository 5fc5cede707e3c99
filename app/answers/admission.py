"""Whether a request may enter the queue, and the jobs it becomes: one for each choice, all or none.

Owns the limits that the live workers set, and the translation of every refusal of the queue into what the client is
told. Blocking: called in a worker thread. Refuses to know about HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from redis.exceptions import RedisError

from app.contract.generation import GenerationCall
from app.errors import (
    context_length_exceeded,
    idempotency_conflict,
    no_worker,
    queue_full,
    queue_unreachable,
    unavailable,
)
from app.render.spec import AnswerSpec, SpecError, decode_spec
from decode.engine.sampling import GOLDEN_GAMMA, SamplingParams, split_mix
from tasks.protocol.contract import GenerationJob, Priority
from tasks.protocol.errors import IdempotencyConflict, NoWorker, QueueFull
from tasks.protocol.record import Idempotency, Origin, RequestRecords, Storing, Submitted
from tasks.protocol.submit import Submitter

log = logging.getLogger(__name__)

LIMITS_TTL_S = 1.0
FULL_TTL_S = 0.05
"""For how long a queue that was full is taken to be full without asking: in a flood, a refusal then costs no round
trip, and what was accepted does not wait behind thousands of refusals."""

_TIER = b'"service_tier"'
PRIORITIES: Mapping[str, Priority] = {"priority": "priority", "flex": "flex"}
"""Service tiers that are not the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One checked request, ready for the queue."""

    spec: AnswerSpec
    """Without the fingerprint, which depends on who is at work."""
    call: GenerationCall
    prompts: Sequence[Sequence[int]]
    eos_token_ids: tuple[int, ...]
    seed: int
    """For a call without one."""
    created_ms: int
    grammar: str = ""
    """What the output has to follow (`SamplingParams.grammar`)."""
    is_read: bool = True
    """Whether this process reads the answer from the start."""
    outlives_reader: bool = False
    idempotency: Idempotency | None = None
    messages: bytes = b""
    """What is kept with an answer that is to be stored."""
    traceparent: str = ""
    """The span that the workers' spans belong to."""


@dataclass(frozen=True, slots=True)
class Admitted:
    spec: AnswerSpec
    is_joined: bool
    """The same request was there already; `spec` is that of its answer."""


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
        records: RequestRecords,
        submitter: Submitter,
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
        self._full: dict[tuple[str, str], tuple[float, int]] = {}
        """Model and class of priority -> until when its queue is taken to be full, and what a client is told then."""
        self.num_under_way = 0
        """How many calls of `admit` wait for a thread, or are in one; counted by the caller.

        They wait as those in the queue do: no more than its bound, and their memory is bounded.
        """

    def check_room_unread(self, body: bytes, models: Collection[str]) -> None:
        """Raises ApiError if there is no room, whichever of `models` is asked for in `body`. Does not block.

        A flood is refused here, before anything is read or rendered.
        """
        if _TIER in body:  # it may go to another queue
            return
        self._check_under_way()
        now_s = self._clock()
        known = [self._full.get((model, "default"), (0.0, 0)) for model in models]
        if known and all(now_s < until_s for until_s, _ in known):
            raise queue_full(min(retry_after_s for _, retry_after_s in known))

    def check_room(self, ask: Ask) -> None:
        """Raises ApiError if the queue was full a moment ago. Does not block."""
        if ask.idempotency is None:  # one with a key may have been accepted before
            self._check_under_way()
            self._check_full(ask)

    def _check_under_way(self) -> None:
        if self.num_under_way >= self._max_waiting:
            raise queue_full(1)

    def _check_full(self, ask: Ask) -> None:
        known = self._full.get(_queue_of(ask))
        if known is not None and self._clock() < known[0]:
            raise queue_full(known[1])

    def admit(self, ask: Ask) -> Admitted:
        """Puts the request on offer. Raises ApiError, or RedisError if it is not known whether it is on offer."""
        if ask.idempotency is None:
            self._check_full(ask)
        try:
            limits = self._limits_of(ask.spec.model)
        except RedisError as error:
            log.warning("%s refused, Redis not reachable: %s", ask.spec.request_id, error)
            raise queue_unreachable() from error
        spec = replace(ask.spec, system_fingerprint=limits.fingerprint)
        submitted = self._submit(ask, spec, jobs_of(ask, limits.max_tokens))
        if submitted.created or submitted.request_id == spec.request_id:
            return Admitted(spec, is_joined=False)
        return Admitted(self._known_spec(submitted.request_id), is_joined=True)

    def _submit(self, ask: Ask, spec: AnswerSpec, jobs: Sequence[GenerationJob]) -> Submitted:
        try:
            return self._submitter.submit(
                jobs,
                reader=self._reader_id if ask.is_read else None,
                outlive_reader=ask.outlives_reader,
                max_waiting=self._max_waiting,
                answer=spec.encode(),
                idempotency=ask.idempotency,
                origin=Origin(spec.owner, ask.call.end_user, spec.kind, spec.stream),
                storing=Storing(spec.owner, ask.messages) if spec.store else None,
            )
        except QueueFull as refusal:
            log.info("%s refused, queue full: %s", spec.request_id, refusal)
            retry_after_s = self._retry_after_s(jobs[0])
            if len(jobs) == 1:  # where several find no room, there may be room for one
                self._full[_queue_of(ask)] = (self._clock() + FULL_TTL_S, retry_after_s)
            raise queue_full(retry_after_s) from refusal
        except NoWorker as refusal:
            if (known := self._limits.get(spec.model)) is not None:
                self._limits[spec.model] = (float("-inf"), known[1])
            raise no_worker(spec.model) from refusal
        except IdempotencyConflict as refusal:
            raise idempotency_conflict() from refusal

    def _known_spec(self, request_id: str) -> AnswerSpec:
        data = self._records.answer(request_id)
        if data is None:
            raise unavailable("stream_lost", "The first answer to this request is not kept any more. Please retry.")
        try:
            return decode_spec(data)
        except SpecError as error:
            log.error("%s cannot be joined: %s", request_id, error)
            raise unavailable(
                "stream_lost", "The first answer to this request cannot be read. Please retry."
            ) from error

    def _limits_of(self, model: str) -> Limits:
        now_s = self._clock()
        known = self._limits.get(model)
        if known is not None and now_s < known[0]:
            return known[1]
        workers = [info for info, _ in self._records.workers(model)]
        if not workers and known is not None:
            return known[1]  # all leases may just have lapsed, or it is a repetition: the submit tells
        if not workers:
            raise no_worker(model)
        fingerprints = {info.fingerprint for info in workers}
        limits = Limits(
            max_tokens=min(min(info.max_model_len, info.kv_cache_tokens) for info in workers),
            fingerprint=fingerprints.pop() if len(fingerprints) == 1 else None,
        )
        self._limits[model] = (now_s + LIMITS_TTL_S, limits)
        return limits

    def _retry_after_s(self, job: GenerationJob) -> int:
        """By the rate at which workers have been taking requests of late."""
        try:
            return self._records.retry_after_s(job.model, job.priority)
        except RedisError:
            return 1


def _queue_of(ask: Ask) -> tuple[str, str]:
    return ask.spec.model, PRIORITIES.get(ask.call.service_tier, "default")


def jobs_of(ask: Ask, limit: int) -> list[GenerationJob]:
    """One for each choice; `limit` is of prompt and output together. Raises ApiError."""
    call, spec = ask.call, ask.spec
    sampling = SamplingParams(
        max_tokens=0,
        temperature=call.temperature,
        top_p=call.top_p,
        top_k=call.top_k,
        min_p=call.min_p,
        stop_token_ids=ask.eos_token_ids,
        ignore_eos=call.ignore_eos,
        min_tokens=call.min_tokens,
        presence_penalty=call.presence_penalty,
        frequency_penalty=call.frequency_penalty,
        logit_bias=call.logit_bias,
        num_logprobs=call.num_logprobs,
        grammar=ask.grammar,
    )
    seed = ask.seed if call.seed is None else call.seed
    prompts = [tuple(prompt) for prompt in ask.prompts]
    param = "messages" if spec.kind == "chat" else "prompt"
    max_tokens = [_fit(limit, len(prompt), call.max_tokens, param) for prompt in prompts]
    return [
        GenerationJob(
            request_id=choice_id,
            model=spec.model,
            prompt_token_ids=prompts[number // spec.n],
            sampling=replace(sampling, max_tokens=max_tokens[number // spec.n], seed=choice_seed(seed, number)),
            created_ms=ask.created_ms,
            priority=PRIORITIES.get(call.service_tier, "default"),
            traceparent=ask.traceparent,
        )
        for number, choice_id in enumerate(spec.choice_ids)
    ]


def choice_seed(seed: int, number: int) -> int:
    """The first choice has the request's seed; the others have seeds that look unrelated, always the same ones."""
    return split_mix(seed + (number - 1) * GOLDEN_GAMMA) >> 1 if number else seed


def _fit(limit: int, num_prompt_tokens: int, max_tokens: int | None, param: str) -> int:
    """How many output tokens the request may have. Raises ApiError."""
    if num_prompt_tokens >= limit or (max_tokens is not None and num_prompt_tokens + max_tokens > limit):
        raise context_length_exceeded(limit, num_prompt_tokens, max_tokens or 0, param)
    return limit - num_prompt_tokens if max_tokens is None else max_tokens
