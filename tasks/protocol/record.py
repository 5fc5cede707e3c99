"""The request record: the one truth that processes agree on, moved only by the scripts.

Owns the calls about requests. `tasks.protocol.moves` has what they take and answer, `tasks.protocol.leases` the calls
about processes, `tasks.protocol.keys` the table of what all of them touch. Refuses to know about the queue
(`tasks.protocol.submit`, `tasks.worker.consumer`) and about tokens' meaning. Every method may be called again with
the same arguments after an error whose outcome is unknown; `now_ms` is for tests, the default is Redis' clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import orjson
from redis import Redis
from redis.exceptions import ResponseError

from tasks.protocol import keys
from tasks.protocol.contract import (
    EndState,
    GenerationJob,
    Priority,
    decode_job,
    encode_job,
    encode_terminal,
    entry_id,
    pack_tokens,
    unpack_tokens,
)
from tasks.protocol.errors import FingerprintMismatch, IdempotencyConflict, NoWorker, QueueFull, Stale
from tasks.protocol.leases import Leases
from tasks.protocol.lua import Argument
from tasks.protocol.moves import (
    END_STATES,
    UNKNOWN,
    Append,
    Appended,
    AppendResult,
    Cancelled,
    Claimed,
    Failed,
    Idempotency,
    LoggedStep,
    Messages,
    Origin,
    Outlook,
    Published,
    RecordState,
    RefusalReason,
    Refused,
    Reoffer,
    State,
    Storing,
    Submitted,
    Terminal,
)
from tasks.protocol.priorities import PRIORITIES, up_to
from tasks.protocol.stored import StoredAnswers

__all__ = [
    "END_STATES",
    "UNKNOWN",
    "Append",
    "AppendResult",
    "Appended",
    "Cancelled",
    "Claimed",
    "Failed",
    "Idempotency",
    "LoggedStep",
    "Messages",
    "Origin",
    "Outlook",
    "Published",
    "RecordState",
    "RefusalReason",
    "Refused",
    "Reoffer",
    "RequestRecords",
    "State",
    "Storing",
    "Submitted",
    "Terminal",
    "retry_after_s",
]

LEASE_CHECK_MS = 5_000
"""How often `due` names a held request again, as a backstop for a lost entry in its worker's `held` set."""
READER_LEASE_MS = 4_700
"""How long a web process counts as alive that reads something and does not speak. Longer than one call whose reply
gets lost (`bridge.streams.reader`: 3.5 s) and the second between two renewals: otherwise everything that it reads
would be cancelled for it. Below the 5 s in which its death has to show."""
IDEMPOTENT_GRACE_MS = 10_000
"""How long a request with an idempotency key waits for the retry of a client that has lost its connection."""
FORESTALL_MS = 60_000
"""How late a submit may arrive that its sender has given up; it waits in buffers of the network."""
CLAIM_RATE_MS = 30_000
"""The time over which the rate of claims is measured."""
MAX_RETRY_AFTER_S = 120

_FACTS = (
    *("state", "attempt", "model", "worker", "next_index", "reason", "fingerprint", "cached"),
    *("submitted_ms", "offered_ms", "claimed_ms", "first_token_ms", "ended_ms"),
)
"""What `state` reads: not the job, nor the messages of what is stored, which may be large."""


class RequestRecords(Leases):
    """All that web, worker and watchdog may do to requests and leases. Raises redis.exceptions.RedisError."""

    def __init__(
        self,
        redis: Redis,
        *,
        stream_ttl_s: int = 600,
        active_ttl_s: int = 86_400,
        max_attempts: int = 3,
        offer_deadline_ms: int = 1_000,
        first_token_deadline_ms: int = 60_000,
        store_ttl_s: int = 30 * 86_400,
        store_max: int = 10_000,
    ) -> None:
        super().__init__(redis)
        self.stored = StoredAnswers(redis, self._scripts)
        self._store_ttl_ms = store_ttl_s * 1000
        self._store_max = store_max
        self._stream_ttl_ms = stream_ttl_s * 1000
        self._active_ttl_ms = active_ttl_s * 1000
        self._max_attempts = max_attempts
        self._offer_deadline_ms = offer_deadline_ms
        self._first_token_deadline_ms = first_token_deadline_ms
        self._poison = encode_terminal(
            "failed", "poison", f"generation failed {max_attempts} times without making progress"
        )
        self._no_worker = encode_terminal("failed", "no_worker", "no worker could take the request in time")
        self._deadline = encode_terminal("failed", "first_token_deadline", "the first token did not come in time")
        self._disconnect = encode_terminal("cancelled", "disconnect", "nobody reads this answer any more")

    # -- web

    def submit(
        self,
        jobs: Sequence[GenerationJob],
        *,
        reader: str | None,
        outlive_reader: bool = False,
        max_waiting: int,
        answer: bytes = b"",
        idempotency: Idempotency | None = None,
        origin: Origin = UNKNOWN,
        messages: Messages | None = None,
        storing: Storing | None = None,
        nonce: str | None = None,
        now_ms: int | None = None,
    ) -> Submitted:
        """Put all choices of one request on offer (attempt 1), or none; `jobs` are of one model and one class.

        A request whose id or idempotency key is known is joined instead: nothing is made, and `reader` reads it too.
        But a key is free for the same request again once its first one has failed or ended for want of readers.
        `answer` is kept with choice 0 for `answer()`; `origin` is for the catalog. `max_waiting` bounds the offers of
        this class and those above; `messages` are enqueued if the request is made; with `storing` its answer
        is found in `stored` once all of its choices have finished. Raises QueueFull, NoWorker, IdempotencyConflict.
        """
        first = jobs[0]
        above = up_to(first.priority)
        choices: list[Argument] = []
        items = [("", b"")] * len(jobs) if messages is None else messages.items
        for number, job in enumerate(jobs):
            queue = keys.queue_new(job.model, job.priority)
            said = _submitted_details(jobs, number, origin, idempotency is not None)
            choices += (job.request_id, job.model, job.priority, queue, encode_job(job), said, *items[number])
        reply = self._scripts.call(
            "submit",
            now_ms,
            nonce or uuid4().hex,
            reader or "",
            int(outlive_reader),
            max_waiting,
            self._offer_deadline_ms,
            self._active_ttl_ms,
            READER_LEASE_MS,
            answer,
            "" if idempotency is None else idempotency.key,
            "" if idempotency is None else idempotency.digest,
            0 if idempotency is None else IDEMPOTENT_GRACE_MS,
            " ".join(above),
            "" if messages is None else messages.place,
            "" if storing is None else keys.stored(storing.owner),
            self._store_ttl_ms,
            self._store_max,
            b"" if storing is None else storing.messages,
            *choices,
        )
        match reply[0]:
            case b"ok":
                return Submitted(reply[1].decode(), int(reply[2]), bool(reply[3]))
            case b"full":
                raise QueueFull(int(reply[1]))
            case b"conflict":
                raise IdempotencyConflict(reply[1].decode())
            case _:
                raise NoWorker(first.model)

    def forestall(self, request_ids: Sequence[str], now_ms: int | None = None) -> None:
        """Refuse a submit of these, given up before its reply came, if it has not arrived and still does.

        What is there already stays as it is: `close` or `detach` it afterwards.
        """
        self._scripts.call("forestall", now_ms, FORESTALL_MS, *request_ids)

    def answer(self, request_id: str) -> bytes | None:
        """What was submitted as `answer` with this choice 0; None when it is unknown, or its time is over."""
        raw: bytes | None = self._redis.hget(keys.request(request_id), "answer")
        return raw

    def attach(self, request_ids: Sequence[str], reader: str, now_ms: int | None = None) -> list[bool]:
        """Let `reader` read these requests too. For each: whether it is still going on."""
        reply = self._scripts.call("attach", now_ms, reader, READER_LEASE_MS, self._active_ttl_ms, *request_ids)
        return [bool(is_open) for is_open in reply]

    def detach(
        self, request_ids: Sequence[str], reader: str, grace_ms: int = 0, now_ms: int | None = None
    ) -> list[str]:
        """`reader` reads these requests no more. Returns those that ended with it, as cancelled, "disconnect".

        The last reader leaving ends a request that was not asked to outlive its readers: at once, or, with a grace
        (requests with an idempotency key always have one), when nobody has attached until then.
        """
        reply = self._scripts.call(
            "detach", now_ms, reader, grace_ms, self._disconnect, self._stream_ttl_ms, *request_ids
        )
        return [request_id.decode() for request_id in reply]

    def close(
        self, request_id: str, state: EndState, reason: str, message: str = "", now_ms: int | None = None
    ) -> bool:
        """End a request from outside. False when it has ended already or is unknown."""
        terminal = encode_terminal(state, reason, message)
        return bool(self._scripts.call("close", now_ms, request_id, state, reason, terminal, self._stream_ttl_ms))

    def state(self, request_id: str) -> RecordState | None:
        """None when there is no record (never was, or its time is over)."""
        raw: list[bytes | None] = self._redis.hmget(keys.request(request_id), _FACTS)
        facts = dict(zip(_FACTS, raw, strict=True))
        if facts["state"] is None:
            return None

        def text(name: str) -> str:
            return (facts[name] or b"").decode()

        def number(name: str) -> int:
            return int(facts[name] or 0)

        return RecordState(
            state=text("state"),  # type: ignore[arg-type]
            attempt=number("attempt"),
            model=text("model"),
            worker=text("worker"),
            next_index=number("next_index"),
            reason=text("reason"),
            fingerprint=text("fingerprint"),
            num_cached_tokens=number("cached"),
            submitted_ms=number("submitted_ms"),
            offered_ms=number("offered_ms"),
            claimed_ms=number("claimed_ms"),
            first_token_ms=number("first_token_ms"),
            ended_ms=number("ended_ms"),
        )

    def num_waiting(self, model: str) -> int:
        """Requests of `model` on offer and not claimed."""
        return self._num_waiting(model, PRIORITIES[-1])

    def retry_after_s(self, model: str, priority: Priority = "default", now_ms: int | None = None) -> int:
        """In how many seconds those who wait ahead of a newcomer will have been claimed, at the rate of late.

        From 1 to MAX_RETRY_AFTER_S. The rate is that of the last CLAIM_RATE_MS, or of as much of it as was busy.
        """
        now, width = self._now(now_ms), keys.CLAIMS_BUCKET_MS
        last = now // width
        buckets = range(last - CLAIM_RATE_MS // width, last + 1)
        counts = [int(count or 0) for count in self._redis.mget([keys.claims(model, bucket) for bucket in buckets])]
        return retry_after_s(self._num_waiting(model, priority), counts, now % width)

    def _num_waiting(self, model: str, priority: Priority) -> int:
        """Those of this class and of all above."""
        with self._redis.pipeline(transaction=False) as pipe:
            for each in up_to(priority):
                pipe.zcard(keys.waiting(model, each))
            return sum(pipe.execute())

    # -- worker

    def claim(
        self,
        request_id: str,
        attempt: int,
        worker: str,
        fingerprint: str,
        claim_id: str | None = None,
        now_ms: int | None = None,
    ) -> Claimed:
        """Take an assignment. Raises Stale, FingerprintMismatch, ContractError (a job this version cannot read).

        `claim_id` names this claim, so that the same claim can be sent again and another one is refused.
        """
        reply = self._scripts.call(
            "claim",
            now_ms,
            request_id,
            attempt,
            worker,
            fingerprint,
            claim_id or uuid4().hex,
            LEASE_CHECK_MS,
            self._active_ttl_ms,
        )
        match reply[0]:
            case b"ok":
                return Claimed(decode_job(reply[1]), unpack_tokens(reply[2]))
            case b"mismatch":
                raise FingerprintMismatch(reply[1].decode())
            case _:
                raise Stale(f"{request_id} attempt {attempt}: {reply[1].decode()}")

    def append_many(self, appends: Sequence[Append], now_ms: int | None = None) -> Sequence[AppendResult]:
        """Publish tokens into the streams of their requests, in one round trip; one answer for each, in order."""
        return self.publish(appends, WITHOUT_LOG, now_ms).results

    def publish(self, appends: Sequence[Append], step: LoggedStep, now_ms: int | None = None) -> Published:
        """The same with a log: also, or only, what goes there (`tasks.worker.step_log` decides). One round trip."""
        if step.rev and step.packed and not appends and self._add_to_log(step):
            return Published(step.rev, True, ())
        arguments = [argument for item in appends for argument in _append_arguments(item, step)]
        rev, is_undisturbed, *replies = self._scripts.call(
            "append",
            now_ms,
            self._active_ttl_ms,
            self._stream_ttl_ms,
            step.worker,
            step.rev,
            step.number,
            step.packed,
            *arguments,
        )
        results: list[AppendResult] = [
            Refused(reply[0].decode()) if isinstance(reply, list) else Appended(int(reply)) for reply in replies
        ]
        return Published(rev.decode(), bool(is_undisturbed), results)

    def _add_to_log(self, step: LoggedStep) -> bool:
        """A step of which everything goes into the log, as nearly every one. False: `append` has to look at it.

        PERF: the log itself refuses what has another `rev`: no script.
        """
        entry = f"{step.rev}-{step.number}"
        try:
            added = self._redis.execute_command(
                *("XADD", keys.steps(step.worker), "NOMKSTREAM", "MAXLEN", keys.STEPS_KEPT, entry, "s", step.packed)
            )
        except ResponseError as error:
            if "equal or smaller" not in str(error):
                raise
            return False
        return added is not None

    def release(self, request_id: str, attempt: int, worker: str, reason: str, now_ms: int | None = None) -> Outlook:
        """Give an assignment back for another attempt. None when it is not this worker's any more.

        Reason "engine_error" counts towards the attempt limit, like a lost worker; a planned release does not.
        """
        reply = self._scripts.call(
            "release", now_ms, request_id, attempt, worker, reason, int(reason == "engine_error"), *self._limits()
        )
        return _offered(request_id, reply)

    # -- watchdog

    def reoffer(
        self,
        request_id: str,
        attempt: int,
        reason: Literal["worker_lost", "message_lost"],
        now_ms: int | None = None,
    ) -> Outlook:
        """Put the next attempt on offer because the worker's lease is gone, or because the message is.

        None when that is not so: another attempt is active, the request has ended, or the lease is live.
        """
        return _offered(
            request_id, self._scripts.call("reoffer", now_ms, request_id, attempt, reason, *self._limits())
        )

    def look(self, request_id: str, queue_empty: bool, now_ms: int | None = None) -> Outlook:
        """Decide about a request that `due` names. None: nothing to do now, it will be due again if it lives.

        `queue_empty`: Dramatiq's list for the request's queue is empty, so an offer in it must be lost.
        """
        max_attempts, poison, offer_deadline_ms, active_ttl_ms, stream_ttl_ms = self._limits()
        reply = self._scripts.call(
            "look",
            now_ms,
            request_id,
            int(queue_empty),
            self._first_token_deadline_ms,
            LEASE_CHECK_MS,
            self._no_worker,
            self._deadline,
            max_attempts,
            poison,
            offer_deadline_ms,
            active_ttl_ms,
            stream_ttl_ms,
            self._disconnect,
        )
        return _offered(request_id, reply)

    def due(self, now_ms: int | None = None, limit: int = 100) -> list[str]:
        """The requests that somebody must `look` at, the longest overdue first."""
        raw: Any = self._redis.zrangebyscore(keys.DUE, "-inf", self._now(now_ms), start=0, num=limit)
        return [item.decode() for item in raw]

    def queue_of(self, request_id: str) -> str | None:
        """The queue in which the request was last offered."""
        raw: Any = self._redis.hget(keys.request(request_id), "queue")
        return None if raw is None else raw.decode()

    def _limits(self) -> tuple[Argument, ...]:
        return (
            self._max_attempts,
            self._poison,
            self._offer_deadline_ms,
            self._active_ttl_ms,
            self._stream_ttl_ms,
        )


def retry_after_s(num_waiting: int, num_claimed: Sequence[int], elapsed_ms: int) -> int:
    """`num_claimed` is of whole CLAIMS_BUCKET_MS, the last of them only `elapsed_ms` old. Idle time before the first
    claim does not count; without any claim, one in all that time is assumed."""
    claimed = [*num_claimed]
    while claimed[0] == 0 and any(claimed):
        del claimed[0]
    busy_s = max(1.0, ((len(claimed) - 1) * keys.CLAIMS_BUCKET_MS + elapsed_ms) / 1000)
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_waiting * busy_s / max(1, sum(claimed)))))


def _submitted_details(jobs: Sequence[GenerationJob], number: int, origin: Origin, is_idempotent: bool) -> bytes:
    """What the fact of a choice's submission tells the catalog; what is empty or no is left out."""
    job = jobs[number]
    told = {
        "prompt_tokens": len(job.prompt_token_ids),
        "max_tokens": job.sampling.max_tokens,
        "class": job.priority,
        "answer": jobs[0].request_id,
        "choices": len(jobs),
        "idempotent": int(is_idempotent),
        "stream": int(origin.is_streamed),
        "kind": origin.kind,
        "api_key": origin.api_key,
        "end_user": origin.end_user,
    }
    return orjson.dumps({name: value for name, value in told.items() if value})


WITHOUT_LOG = LoggedStep("", "", 0, b"", {})


def _append_arguments(item: Append, step: LoggedStep) -> Sequence[Argument]:
    tokens = pack_tokens(item.token_ids)
    slot = step.slots.get((item.request_id, item.attempt))
    packed_slot = b"" if slot is None else slot.to_bytes(4, "little")
    start = (item.request_id, f"{item.attempt}/{item.num_cached_tokens}", item.first_index, tokens, packed_slot)
    end = item.terminal
    if end is None and tokens and not item.logprobs:
        return (*start, entry_id(item.first_index, item.attempt), item.first_index + len(item.token_ids))
    terminal: tuple[Argument, ...] = ("", "", "")
    if end is not None:
        terminal = (end.state, end.reason, encode_terminal(end.state, end.reason, end.message))
    return (*start, "", *terminal, item.logprobs)


def _offered(request_id: str, reply: Any) -> Outlook:
    match reply:
        case None:
            return None
        case [b"offered", attempt, queue]:
            return Reoffer(request_id, int(attempt), queue.decode())
        case [b"cancelled", reason]:
            return Cancelled(request_id, reason.decode())
        case _:
            return Failed(request_id, reply[1].decode())
