"""What a worker measures: its attempts, their times and tokens.

Owns when each number of a worker grows. Refuses to know about Redis and the engine. Each method says from which of
the worker's threads it is called; the cells that change with every step have one thread each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tasks.observe.metrics import (
    ACCEPTED_TOKENS,
    ATTEMPTS,
    DECODE_TIME,
    DRAFT_TOKENS,
    FAILOVERS,
    FENCED,
    GENERATION_TOKENS,
    ITL,
    PREEMPTIONS,
    PREFILL_TIME,
    PREFIX_HITS,
    PREFIX_QUERIES,
    PROMPT_TOKENS,
    QUEUE_TIME,
    RECONNECTS,
    RELEASES,
    REQUEST_SUCCESS,
    Meter,
    count_end,
)
from tasks.process.tracing import OFF, Tracer, Value
from tasks.protocol.contract import GenerationJob
from tasks.protocol.moves import Append, Appended, AppendResult, Refused


@dataclass(slots=True)
class AttemptTimes:
    """When an assignment got how far, in monotonic seconds; None: not yet."""

    handed_over_s: float
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


class WorkerMetrics:
    def __init__(
        self,
        meter: Meter,
        model: str,
        *,
        tracer: Tracer = OFF,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the time of day."""
        self._meter = meter
        self._model = model
        self._tracer = tracer
        self._clock = clock
        self._monotonic = monotonic
        self._generated = meter.counter(GENERATION_TOKENS, model)
        self._prompt_tokens = meter.counter(PROMPT_TOKENS, model)
        self._queries = meter.counter(PREFIX_QUERIES, model)
        self._hits = meter.counter(PREFIX_HITS, model)
        self._between = meter.histogram(ITL, model)
        self._queue = meter.histogram(QUEUE_TIME, model)
        self._prefill = meter.histogram(PREFILL_TIME, model)
        self._decode = meter.histogram(DECODE_TIME, model)
        for metric in (ATTEMPTS, FAILOVERS):
            meter.counter(metric, model)
        for reason in ("stop", "length", "abort"):
            meter.counter(REQUEST_SUCCESS, model, reason)
        meter.counter(RECONNECTS)

    # Called by actor threads.

    def claimed(self, attempt: int) -> None:
        self._meter.count(ATTEMPTS, self._model)
        if attempt > 1:
            self._meter.count(FAILOVERS, self._model)

    def released(self, reason: str) -> None:
        self._meter.count(RELEASES, self._model, reason)

    def ended(self, state: str, reason: str) -> None:
        """By this worker, otherwise than by an append of the engine loop."""
        count_end(self._meter, self._model, state, reason)

    # Called by the publisher's thread.

    def settled(self, item: Append, result: AppendResult) -> None:
        match result:
            case Appended():
                self._generated.value += len(item.token_ids)
                if item.terminal is not None:
                    count_end(self._meter, self._model, item.terminal.state, item.terminal.reason)
            case Refused(reason):
                self._meter.count(FENCED, self._model, reason)

    # Called by the engine's thread.

    def computed(
        self, job: GenerationJob, attempt: int, first_index: int, num_cached: int, times: AttemptTimes, now_s: float
    ) -> None:
        """The first output of an attempt; `first_index` is that of its first token."""
        if times.admitted_s is None:
            times.admitted_s = now_s
        times.first_token_s = now_s
        num_prompt_tokens = len(job.prompt_token_ids)
        self._queries.value += num_prompt_tokens + first_index
        self._hits.value += num_cached
        self._prefill.observe(now_s - times.admitted_s)
        if first_index == 0:
            self._prompt_tokens.value += num_prompt_tokens
        if attempt == 1:
            self._queue.observe(max(0.0, self._epoch_s(times.admitted_s) - job.created_ms / 1000))

    def continued(self, since_s: float, now_s: float, num_tokens: int) -> None:
        """So many tokens have come now, each of which has the one before it since `since_s`."""
        self._between.observe(now_s - since_s, num_tokens)

    def finished(self, times: AttemptTimes) -> None:
        """The last token of an answer has been computed."""
        if times.first_token_s is not None and times.last_token_s is not None:
            self._decode.observe(times.last_token_s - times.first_token_s)

    def preempted_so_far(self, value: Callable[[], int]) -> None:
        """Whom to ask for the number of preemptions."""
        self._meter.ask(PREEMPTIONS, self._model, value=value)

    def drafted_so_far(self, drafted: Callable[[], int], accepted: Callable[[], int]) -> None:
        """Whom to ask for the number of tokens that were drafted, and that were right."""
        self._meter.ask(DRAFT_TOKENS, self._model, value=drafted)
        self._meter.ask(ACCEPTED_TOKENS, self._model, value=accepted)

    # Called by any thread.

    def reconnected(self) -> None:
        self._meter.count(RECONNECTS)

    def over(self, job: GenerationJob, attempt: int, outcome: str, times: AttemptTimes) -> None:
        """An assignment has left the worker: its spans are known now."""
        if not (self._tracer.is_on and job.traceparent):
            return
        about: dict[str, Value] = {
            "gen_ai.request.model": self._model,
            "tokenferry.request_id": job.request_id,
            "tokenferry.attempt": attempt,
            "tokenferry.worker": self._meter.process,
        }
        end_s = self._epoch_s(self._monotonic())
        handed_over_s = self._epoch_s(times.handed_over_s)
        start_s = job.created_ms / 1000 if attempt == 1 else handed_over_s
        admitted_s = end_s if times.admitted_s is None else self._epoch_s(times.admitted_s)
        self._tracer.record("queue", job.traceparent, min(start_s, admitted_s), admitted_s, about)
        if times.admitted_s is None:
            return
        first_token_s = end_s if times.first_token_s is None else self._epoch_s(times.first_token_s)
        self._tracer.record("prefill", job.traceparent, admitted_s, first_token_s, about)
        if times.first_token_s is not None:
            about = {**about, "tokenferry.outcome": outcome}
            self._tracer.record("decode", job.traceparent, first_token_s, end_s, about)

    def _epoch_s(self, monotonic_s: float) -> float:
        return self._clock() - (self._monotonic() - monotonic_s)
