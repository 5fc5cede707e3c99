"""A whole cell under logical time: the real scripts on fakeredis, everything around them as plain state machines.

Owns the schedule (one random generator, so a seed replays it), the faults, and the invariants that are checked after
each event. Workers, web processes and clients call `RequestRecords` as `tasks.worker.engine_loop`,
`tasks.worker.publish`, `tasks.worker.actor` and `app` do, most workers through the real log of steps; the watchdog is
the real one. Faults: workers and web processes crash, freeze and thaw, calls get lost before or after they took
effect, calls come much later, a worker gives up a step that it cannot publish, messages are dropped, doubled,
delayed, reordered, Redis forgets its scripts or loses all data. `python -m tests.tasks.simulation SEED` prints a
schedule.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from redis import Redis
from redis.exceptions import ConnectionError, RedisError, ResponseError

from bridge.watch.watchdog import Watchdog
from decode.engine.sampling import SamplingParams
from tasks.protocol import keys
from tasks.protocol.contract import (
    GenerationJob,
    TerminalEvent,
    TokenEvent,
    WorkerInfo,
    WorkerLoad,
    decode_entry,
    unpack_source,
    unpack_step,
)
from tasks.protocol.errors import FingerprintMismatch, NoWorker, QueueFull, Stale
from tasks.protocol.priorities import PRIORITIES
from tasks.protocol.record import (
    Append,
    Appended,
    AppendResult,
    Claimed,
    Failed,
    Idempotency,
    Refused,
    Reoffer,
    RequestRecords,
    Terminal,
)
from tasks.protocol.submit import Submitter
from tasks.worker.step_log import Plan, StepLog
from tests.tasks.simulated_redis import Server

MODEL = "m"
START_MS = 1_700_000_000_000
LEASE_MS = 1_000
READER_LEASE_MS = 3_000
STREAM_TTL_S = 600
MAX_WAITING = 9
MAX_ATTEMPTS = 3
MAX_ROUNDS = 100
END_STATES = {"finished", "cancelled", "failed"}
FIRST_TOKEN_DEADLINE_MS = 10**7
"""No schedule lasts that long: nothing may wait for it."""


class Broken(AssertionError):
    """An invariant does not hold; the message has the seed and the last events."""


def token(request_id: str, index: int) -> int:
    return (hash_of(request_id) * 31 + index * 7) % 50_000


def length(request_id: str) -> int:
    return 1 + hash_of(request_id) % 13


def is_poison(request_id: str) -> bool:
    """Whether a worker that begins it dies of it."""
    return hash_of(request_id) % 15 == 0


def hash_of(text: str) -> int:
    return sum((n + 1) * byte for n, byte in enumerate(text.encode()))


class Link:
    """One process's way to Redis: it may be cut, and it may lose a call or its reply."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.is_cut = False

    def evalsha(self, sha: str, num_keys: int, *args: Any) -> Any:
        server = self._simulation.server
        self._simulation.touch(args)
        return self._call(
            lambda: server.evalsha(sha, num_keys, *args),
            lambda: server.evalsha(sha, num_keys, self._simulation.now_ms, *args[1:]),
            args,
        )

    def execute_command(self, *args: Any) -> Any:
        def call() -> Any:
            return self._simulation.server.redis.execute_command(*args)

        return self._call(call, call, args)

    def _call(self, call: Callable[[], Any], call_late: Callable[[], Any], args: Sequence[Any]) -> Any:
        simulation = self._simulation
        lost = simulation.loss()
        if self.is_cut or lost == "call":
            if simulation.chance(0.5):
                simulation.late.append((call_late, args))  # it is in a buffer, and arrives after all
            raise ConnectionError("the call got lost")
        reply = call()
        if simulation.chance(0.08):
            simulation.late.append((call_late, args))
        if lost == "reply":
            raise ConnectionError("the reply got lost")
        return reply

    def script_load(self, text: str) -> None:
        self._simulation.server.redis.script_load(text)

    def __getattr__(self, name: str) -> Any:
        if self.is_cut:
            raise ConnectionError("the call got lost")
        return getattr(self._simulation.server.redis, name)


@dataclass
class Work:
    """One assignment in a worker: what it has computed, and how much of that is published."""

    request_id: str
    attempt: int
    tokens: list[int]
    num_published: int
    """With a log: how much of that is planned."""
    release_reason: str = ""
    is_ending: bool = False


@dataclass
class Worker:
    name: str
    link: Link
    records: RequestRecords
    fingerprint: str
    log: StepLog | None = None
    plan: Plan | None = None
    """What was sent and not answered: the same is sent again, as `tasks.worker.publish` does."""
    is_frozen: bool = False
    beat_ms: int = 0
    works: list[Work] = field(default_factory=list)
    claims: list[tuple[str, int, str]] = field(default_factory=list)
    """Claims whose answer did not come: (request id, attempt, claim id), sent again until it does."""

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(self.name, 1, "h", "cpu", MODEL, self.fingerprint, "fp32", 99, 4, 99, START_MS)


@dataclass
class Web:
    name: str
    link: Link
    records: RequestRecords
    is_frozen: bool = False
    reading: set[str] = field(default_factory=set)
    todo: list[Callable[[], object]] = field(default_factory=list)
    """Calls that Redis has not taken yet, sent again until it does."""


@dataclass
class Ask:
    """One request of a client."""

    ids: list[str]
    outlives: bool
    key: str
    digest: str
    nonce: str


@dataclass
class Read:
    """What has been read of a stream: nothing of it may ever change."""

    num_entries: int = 0
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    fingerprint: str = ""
    end: TerminalEvent | None = None
    source: tuple[str, int] = ("", 0)
    """The log that a reader follows: (worker, slot)."""
    num_own: int = 0
    num_visible: int = 0
    """How many tokens a reader may have had, from its own stream and then from the log."""


class Queue:
    """Stands in for Dramatiq: delivers at least once, late, out of order, or not at all."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.messages: dict[str, list[tuple[str, int]]] = {}
        self.delayed: list[tuple[str, str, int]] = []

    def put(self, queue: str, request_id: str, attempt: int) -> None:
        simulation = self._simulation
        for _ in range(2 if simulation.chance(0.1) else 1):
            if simulation.chance(0.08):
                continue
            if simulation.chance(0.1):
                self.delayed.append((queue, request_id, attempt))
                continue
            if simulation.chance(0.15):
                queue = keys.queue_again(MODEL)  # where workers of every fingerprint take it
            messages = self.messages.setdefault(queue, [])
            place = simulation.random.randrange(len(messages) + 1) if simulation.chance(0.1) else len(messages)
            messages.insert(place, (request_id, attempt))

    def requeue(self, reoffer: Reoffer) -> None:
        self.put(reoffer.queue, reoffer.request_id, reoffer.attempt)

    def take(self, queues: Sequence[str]) -> tuple[str, int] | None:
        for queue in queues:
            if self.messages.get(queue):
                return self.messages[queue].pop(0)
        return None

    def is_empty(self, queue: str) -> bool:
        return not self.messages.get(queue)

    def deliver_delayed(self) -> None:
        if self.delayed:
            queue, request_id, attempt = self.delayed.pop(self._simulation.random.randrange(len(self.delayed)))
            self.messages.setdefault(queue, []).append((request_id, attempt))


class Simulation:
    def __init__(self, server: Server, seed: int, num_events: int = 70) -> None:
        server.redis.flushall()
        server.redis.script_flush()
        self.server = server
        self.books = server.books
        self.seed = seed
        self.num_events = num_events
        self.random = random.Random(seed)
        self.now_ms = START_MS
        self.is_healed = False
        self.trace: list[str] = []
        self.seen: set[str] = set()
        self.late: list[tuple[Callable[[], Any], Sequence[Any]]] = []
        self.queue = Queue(self)
        self.num_names = 0
        self.asks: list[Ask] = []
        self.unknown: list[Ask] = []
        """Asks whose client does not know whether they were accepted."""
        self.accepted: dict[str, Ask] = {}
        self.asked: dict[str, Ask] = {}
        self.lost: set[str] = set()
        self.owners: dict[str, str] = {}
        self.given_up: set[str] = set()
        self.touched: set[str] = set()
        self.read: dict[str, Read] = {}
        self.victims: dict[str, int] = {}
        self.worker_names: set[str] = set()
        self.web_names: set[str] = set()
        self.workers = [self.new_worker() for _ in range(3)]
        self.webs = [self.new_web() for _ in range(2)]
        self.is_model_known = False
        self.watchdog_link = Link(self)
        self.watchdog = Watchdog(
            cast(Redis, self.watchdog_link),
            self.new_records(self.watchdog_link),
            cast(Submitter, self.queue),
            is_queue_empty=self.queue.is_empty,
        )
        for worker in self.workers:
            self.beat(worker)

    # -- chance

    def chance(self, probability: float) -> bool:
        return not self.is_healed and self.random.random() < probability

    def loss(self) -> str:
        if self.is_healed or self.random.random() > 0.06:
            return ""
        return self.random.choice(("call", "reply"))

    def name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}{self.num_names}"

    def touch(self, args: Sequence[Any]) -> None:
        self.touched.update(arg for arg in args if isinstance(arg, str) and arg in self.accepted)

    # -- processes

    def new_records(self, link: Link) -> RequestRecords:
        return RequestRecords(
            cast(Redis, link),
            stream_ttl_s=STREAM_TTL_S,
            offer_deadline_ms=1000,
            first_token_deadline_ms=FIRST_TOKEN_DEADLINE_MS,
        )

    def new_worker(self) -> Worker:
        link = Link(self)
        name = self.name("w")
        self.worker_names.add(name)
        fingerprint = "fp2" if self.chance(0.25) else "fp1"
        log = None if self.chance(0.2) else StepLog(name)
        return Worker(name, link, self.new_records(link), fingerprint, log)

    def new_web(self) -> Web:
        link = Link(self)
        name = self.name("web")
        self.web_names.add(name)
        return Web(name, link, self.new_records(link))

    # -- what workers do

    def beat(self, worker: Worker) -> None:
        worker.beat_ms = self.now_ms
        try:
            worker.records.heartbeat(worker.info, WorkerLoad(), LEASE_MS, self.now_ms)
        except RedisError:
            self.seen.add("missed heartbeat")

    def take(self, worker: Worker) -> None:
        if worker.claims:
            request_id, attempt, claim_id = worker.claims.pop(0)
        elif len(worker.works) < 4 and (message := self.queue.take(keys.worker_queues(MODEL, worker.fingerprint))):
            request_id, attempt = message
            claim_id = self.name("claim")
        else:
            return
        try:
            claimed = worker.records.claim(
                request_id, attempt, worker.name, worker.fingerprint, claim_id, now_ms=self.now_ms
            )
        except RedisError:
            worker.claims.append((request_id, attempt, claim_id))
        except Stale:
            self.seen.add("stale message")
        except FingerprintMismatch as refusal:
            self.seen.add("another fingerprint")
            self.queue.put(keys.queue_continue(MODEL, refusal.required), request_id, attempt)
        else:
            self.start(worker, attempt, claimed)

    def start(self, worker: Worker, attempt: int, claimed: Claimed) -> None:
        request_id = claimed.job.request_id
        if claimed.token_ids:
            self.seen.add("continued")
        worker.works.append(Work(request_id, attempt, list(claimed.token_ids), len(claimed.token_ids)))

    def step(self, worker: Worker) -> None:
        for work in worker.works:
            if is_poison(work.request_id):
                self.victims[work.request_id] = self.victims.get(work.request_id, 0) + 1
                num_victims = self.victims[work.request_id]
                self.check(num_victims <= MAX_ATTEMPTS, f"{work.request_id} has taken {num_victims} workers down")
                self.crash(worker)
                return
        if worker.log is None:
            self.step_unlogged(worker)
        else:
            self.step_logged(worker, worker.log)
        self.release_due(worker)

    def compute(self, work: Work) -> Terminal | None:
        total = length(work.request_id)
        num_new = self.random.randrange(3) if not self.is_healed else 4
        for index in range(len(work.tokens), min(total, len(work.tokens) + num_new)):
            work.tokens.append(token(work.request_id, index))
        return Terminal("finished", "stop") if len(work.tokens) >= total else None

    def step_unlogged(self, worker: Worker) -> None:
        """Whatever is sent again may overlap with what is there."""
        appends: list[Append] = []
        for work in worker.works:
            end = self.compute(work)
            first = work.num_published if self.random.random() < 0.8 else max(0, work.num_published - 2)
            appends.append(Append(work.request_id, work.attempt, first, tuple(work.tokens[first:]), 0, end))
        if not appends:
            return
        try:
            results = worker.records.append_many(appends, self.now_ms)
        except RedisError:
            self.seen.add("append without an answer")
            if self.random.random() < 0.5:  # and the worker goes on as if it had come
                for work in worker.works:
                    work.num_published = len(work.tokens)
            return
        for item, result in zip(appends, results, strict=True):
            self.settle(worker, item, result)

    def step_logged(self, worker: Worker, log: StepLog) -> None:
        """As `tasks.worker.publish` does: what has no answer is sent again, until the worker stops waiting for it."""
        if worker.plan is not None and self.chance(0.1):
            self.seen.add("step given up")
            worker.plan = None
        if worker.plan is not None:
            self.seen.add("step sent again")
        else:
            batch: list[Append] = []
            for work in worker.works:
                end = None if work.is_ending else self.compute(work)
                if work.is_ending:  # nothing is generated any more, and a step that was given up does not come back
                    work.release_reason = "drain"
                    continue
                first, work.num_published = work.num_published, len(work.tokens)
                work.is_ending = end is not None
                batch.append(Append(work.request_id, work.attempt, first, tuple(work.tokens[first:]), 0, end))
            if not batch:
                return
            worker.plan = log.plan(batch)
        while worker.plan is not None:
            plan = worker.plan
            self.touched.update(item.request_id for item in plan.batch if item.request_id in self.accepted)
            try:
                published = worker.records.publish(plan.appends, plan.step, self.now_ms)
            except RedisError:
                self.seen.add("append without an answer")
                return
            worker.plan = None
            for item, result in log.take(plan, published):
                self.settle(worker, item, result)
            if published.is_undisturbed:
                self.seen.add("logged" if plan.step.packed else "nothing to log")
                self.seen.add("flushed" if any(len(item.token_ids) > 4 for item in plan.appends) else "not flushed")
            elif plan.logged:
                self.seen.add("disturbed")
                worker.plan = log.plan_unlogged(plan)

    def settle(self, worker: Worker, item: Append, result: AppendResult) -> None:
        key = (item.request_id, item.attempt)
        work = next((work for work in worker.works if (work.request_id, work.attempt) == key), None)
        if isinstance(result, Appended):
            record = self.books.record(item.request_id) or {}
            is_right = (record.get("worker"), record.get("attempt")) == (worker.name, str(item.attempt))
            self.check(is_right, f"{worker.name} wrote {item}: {record}")
        if work is None:
            return
        match result:
            case Appended(next_index):
                if worker.log is None:
                    work.num_published = next_index
                if item.terminal is not None:
                    worker.works.remove(work)
            case Refused("gap"):
                self.seen.add("gap")
                work.release_reason = "gap"
            case Refused(reason):
                self.seen.add(f"refused {reason}")
                worker.works.remove(work)

    def release_due(self, worker: Worker) -> None:
        for work in [work for work in worker.works if work.release_reason]:
            try:
                outcome = worker.records.release(
                    work.request_id, work.attempt, worker.name, work.release_reason, self.now_ms
                )
            except RedisError:
                continue
            worker.works.remove(work)
            if worker.log is not None:
                worker.log.forget((work.request_id, work.attempt))
            if isinstance(outcome, Reoffer):
                self.seen.add(f"released {work.release_reason}")
                self.queue.requeue(outcome)

    def drain(self, worker: Worker) -> None:
        for work in worker.works:
            work.release_reason = work.release_reason or self.random.choice(("drain", "engine_error"))
        self.release_due(worker)

    def crash(self, worker: Worker) -> None:
        """Its supervisor starts another, and may or may not get its word through."""
        self.seen.add("crashed holding" if worker.works else "crashed idle")
        another = self.new_worker()
        if self.is_healed:  # a worker of each fingerprint stays, whatever a poisonous request does to it
            another.fingerprint = worker.fingerprint
        self.workers[self.workers.index(worker)] = another
        if self.chance(0.5):
            self.server.redis.zadd(keys.workers(MODEL), {worker.name: 0}, xx=True)

    # -- what web processes and their clients do

    def submit(self, web: Web, ask: Ask | None = None) -> None:
        ask = ask or self.new_ask()
        jobs = [
            GenerationJob(request_id, MODEL, (1, 2), SamplingParams(max_tokens=99), START_MS, self.priority_of(ask))
            for request_id in ask.ids
        ]
        for request_id in ask.ids:
            self.accepted.setdefault(request_id, ask)
            self.asked[request_id] = ask
        idempotency = Idempotency(ask.key, ask.digest) if ask.key else None
        try:
            submitted = web.records.submit(
                jobs,
                reader=web.name,
                outlive_reader=ask.outlives,
                max_waiting=MAX_WAITING,
                answer=b"spec",
                idempotency=idempotency,
                nonce=ask.nonce,
                now_ms=self.now_ms,
            )
        except RedisError:
            self.unsure(web, ask)
            return
        except (QueueFull, NoWorker) as refusal:
            self.seen.add(type(refusal).__name__)
            for request_id in ask.ids:
                self.check(self.is_unknown(request_id), f"{request_id} was refused and is there")
                del self.accepted[request_id]
            return
        if submitted.request_id != ask.ids[0]:
            self.seen.add("joined")
            for request_id in ask.ids:
                self.check(self.is_unknown(request_id), f"{request_id} joined another and is there")
                del self.accepted[request_id]
        if ask.key:
            self.own(ask.key, submitted.request_id)
        family = self.accepted[submitted.request_id]
        web.reading |= set(family.ids)
        if submitted.created:
            for job in jobs:
                self.queue.put(keys.queue_new(MODEL, job.priority), job.request_id, 1)
            self.seen.add("several choices" if len(jobs) > 1 else "one choice")

    def own(self, key: str, request_id: str) -> None:
        """A key leads to one request, until that has failed or nobody has come back to it."""
        owner = self.owners.get(key)
        if owner is not None and owner != request_id:
            self.seen.add("generated anew")
            self.check(self.was_let_down(owner), f"{key} led to {owner} and to {request_id}")
        self.owners[key] = request_id

    def was_let_down(self, request_id: str) -> bool:
        states = [self.books.record(choice) or {} for choice in self.asked[request_id].ids]
        return any(
            state.get("state") == "failed" or (state.get("state"), state.get("reason")) == ("cancelled", "disconnect")
            for state in states
        )

    def unsure(self, web: Web, ask: Ask) -> None:
        """A client with a key asks again, after a while; for one without, the web process ends what may be there."""
        self.seen.add("submit without an answer")
        if ask.key:
            self.unknown.append(ask)
        self.later(web, lambda: self.give_up(web, ask))

    def give_up(self, web: Web, ask: Ask) -> None:
        """As `app.answers.closing.Closer` does."""
        web.records.forestall(ask.ids, self.now_ms)
        if ask.key:
            if unread := [request_id for request_id in ask.ids if request_id not in web.reading]:
                web.records.detach(unread, web.name, now_ms=self.now_ms)
            return
        for request_id in ask.ids:
            web.records.close(request_id, "cancelled", "not_accepted", now_ms=self.now_ms)
        self.given_up.update(ask.ids)

    def new_ask(self) -> Ask:
        old = self.random.choice(self.asks) if self.asks and self.chance(0.3) else None
        request_id = self.name("r")
        num_choices = self.random.choice((1, 1, 1, 2, 3))
        key = old.key if old else (f"key-{request_id}" if self.random.random() < 0.3 else "")
        ask = Ask(
            [request_id, *(f"{request_id}.{n}" for n in range(1, num_choices))],
            self.random.random() < 0.25,
            key,
            "digest",
            self.name("n"),
        )
        self.asks.append(ask)
        return ask

    def priority_of(self, ask: Ask) -> Any:
        return PRIORITIES[hash_of(ask.ids[0]) % len(PRIORITIES)]

    def retry(self, web: Web) -> None:
        """The client of a submit without an answer comes again, as another request with the same key."""
        if self.unknown:
            ask = self.unknown.pop(0)
            self.submit(web, self.again(ask))

    def again(self, ask: Ask) -> Ask:
        first = self.name("again")
        ids = [first + request_id.removeprefix(ask.ids[0]) for request_id in ask.ids]
        return Ask(ids, ask.outlives, ask.key, ask.digest, self.name("n"))

    def later(self, web: Web, call: Callable[[], object]) -> None:
        web.todo.append(call)
        self.do_todo(web)

    def do_todo(self, web: Web) -> None:
        todo, web.todo = web.todo, []
        for call in todo:
            try:
                call()
            except RedisError:
                web.todo.append(call)

    def some_family(self) -> list[str]:
        return self.random.choice(sorted(self.accepted.values(), key=lambda ask: ask.ids)).ids

    def leave(self, web: Web) -> None:
        """A client of this web process disconnects."""
        reading = sorted(web.reading)
        if not reading:
            return
        ids = [request_id for request_id in self.accepted[self.random.choice(reading)].ids if request_id in reading]
        web.reading -= set(ids)
        grace_ms = self.random.choice((0, 0, 2_000))
        self.later(web, lambda: web.records.detach(ids, web.name, grace_ms, now_ms=self.now_ms))

    def resume(self, web: Web) -> None:
        if not self.accepted:
            return
        ids = self.some_family()
        try:
            web.records.attach(ids, web.name, self.now_ms)
        except RedisError:
            self.later(web, lambda: web.records.detach(ids, web.name, now_ms=self.now_ms))
            return
        web.reading |= set(ids)

    def stop(self, web: Web) -> None:
        if not self.accepted:
            return
        request_id = self.random.choice(self.some_family())
        was_over = self.is_over(request_id)
        try:
            closed = web.records.close(request_id, "cancelled", "stopped", now_ms=self.now_ms)
        except RedisError:
            return
        self.check(closed != was_over, f"{request_id} was over: {was_over}, and could be closed: {closed}")

    def beat_web(self, web: Web) -> None:
        try:
            if not web.records.reader_heartbeat(web.name, READER_LEASE_MS, self.now_ms) and web.reading:
                self.seen.add("reader was forgotten")
                web.records.attach(sorted(web.reading), web.name, self.now_ms)
        except RedisError:
            pass
        self.do_todo(web)

    def crash_web(self, web: Web) -> None:
        self.seen.add("web crashed")
        self.webs[self.webs.index(web)] = self.new_web()

    # -- what happens to Redis

    def flush_scripts(self) -> None:
        self.server.redis.script_flush()

    def lose_data(self) -> None:
        self.seen.add("lost data")
        self.server.redis.flushall()
        self.lost |= set(self.accepted)
        self.read.clear()
        self.accepted.clear()
        self.late.clear()
        self.unknown.clear()
        self.owners.clear()
        self.given_up.clear()
        self.asks.clear()
        self.asked.clear()
        for web in self.webs:
            web.reading.clear()

    def call_again(self) -> None:
        """A call that took effect long ago arrives a second time, with the time of now."""
        if self.late:
            call, args = self.late.pop(self.random.randrange(len(self.late)))
            self.touch(args)
            try:
                call()
                self.seen.add("called again")
            except ResponseError:  # no such script, or a step that comes too late
                pass
            self.accept_late()

    def accept_late(self) -> None:
        """What was refused when it was asked for, and accepted when the same call came again, has to end as well."""
        for request_id, ask in self.asked.items():
            if request_id not in self.accepted and not self.is_unknown(request_id):
                self.seen.add("accepted late")
                self.accepted[request_id] = ask
                if ask.key:
                    self.own(ask.key, ask.ids[0])

    def watch(self) -> None:
        try:
            done = self.watchdog.tick(self.now_ms)
        except RedisError:
            self.seen.add("watchdog failed")
            return
        for outcome in done.failed:
            assert isinstance(outcome, Failed)
            self.seen.add(outcome.reason)
        if done.cancelled:
            self.seen.add("nobody read")
        if self.is_model_known:  # to the watchdog, since the tick before
            self.check_nothing_is_held_by_the_dead()
        self.is_model_known = MODEL in self.books.members(keys.MODELS)

    # -- the schedule

    def run(self) -> None:
        for _ in range(self.num_events):
            self.event()
        self.heal()

    def event(self) -> None:
        self.now_ms += self.random.choice((0, 1, 5, 20, 60, 200))
        worker, web = self.random.choice(self.workers), self.random.choice(self.webs)
        roll = self.random.random()
        for each in self.workers:
            if not each.is_frozen and self.now_ms >= each.beat_ms + 400:
                self.beat(each)
        if roll < 0.10:
            self.fault(worker, web)
        elif roll < 0.56:
            if not worker.is_frozen:
                self.work(worker)
        elif roll < 0.66:
            self.happen("watch", "", self.watch)
        elif roll < 0.72:
            self.happen("call again", "", self.call_again)
        elif roll < 0.74:
            self.happen("deliver", "", self.queue.deliver_delayed)
        elif not web.is_frozen:
            action = self.random.choice(
                (self.submit, self.submit, self.submit, self.leave, self.resume, self.stop, self.retry, self.beat_web)
            )
            self.happen(action.__name__, web.name, lambda: action(web))

    def work(self, worker: Worker) -> None:
        can_take = len(worker.works) < 4 and any(self.queue.messages.values())
        if worker.claims or (can_take and self.random.random() < 0.5):
            action = self.take
        elif worker.works:
            action = self.drain if self.random.random() < 0.1 else self.step
        else:
            return
        self.happen(action.__name__, worker.name, lambda: action(worker))

    def fault(self, worker: Worker, web: Web) -> None:
        kind = self.random.randrange(40)
        if kind < 8:
            self.happen("crash", worker.name, lambda: self.crash(worker))
        elif kind < 16:
            self.happen("freeze or thaw", worker.name, lambda: setattr(worker, "is_frozen", not worker.is_frozen))
        elif kind < 24:
            self.happen("cut or mend", worker.name, lambda: setattr(worker.link, "is_cut", not worker.link.is_cut))
        elif kind < 28:
            self.happen("crash", web.name, lambda: self.crash_web(web))
        elif kind < 32:
            self.happen("freeze or thaw", web.name, lambda: setattr(web, "is_frozen", not web.is_frozen))
        elif kind < 35:
            self.happen("cut or mend", web.name, lambda: setattr(web.link, "is_cut", not web.link.is_cut))
        elif kind < 37:
            self.happen("flush scripts", "", self.flush_scripts)
        elif kind < 39:
            self.happen("pause", "", lambda: setattr(self, "now_ms", self.now_ms + 4_000))
        elif self.random.random() < 0.5:
            self.happen("lose data", "", self.lose_data)

    def happen(self, what: str, who: str, call: Callable[[], object]) -> None:
        self.trace.append(f"{self.now_ms - START_MS:6d} {who or '-':6s} {what}")
        self.touched.clear()
        call()
        for request_id in sorted(self.touched):
            if request_id in self.accepted:
                self.check_request(request_id)
        if len(self.trace) % 20 == 0:
            self.check_everything()

    def heal(self) -> None:
        """From now on nothing goes wrong; in bounded time every accepted request has to be over."""
        self.is_healed = True
        self.watchdog_link.is_cut = False
        for process in (*self.workers, *self.webs):
            process.link.is_cut = process.is_frozen = False
        while self.unknown:
            self.happen("retry", self.webs[0].name, lambda: self.retry(self.webs[0]))
        for fingerprint in ("fp1", "fp2"):
            self.workers.append(self.new_worker())
            self.workers[-1].fingerprint = fingerprint
        self.rounds()
        for ask in [self.asked[owner] for owner in self.owners.values() if self.was_let_down(owner)]:
            self.happen("repeat", self.webs[0].name, lambda ask=ask: self.submit(self.webs[0], self.again(ask)))
        self.rounds()
        for worker in self.workers:
            self.happen("step", worker.name, lambda worker=worker: self.step(worker))
        self.check_the_end()

    def rounds(self) -> None:
        for _ in range(MAX_ROUNDS):
            self.round()
            if all(self.is_over(request_id) for request_id in self.accepted):
                break

    def round(self) -> None:
        self.now_ms += 200
        for worker in self.workers:
            self.beat(worker)
            for _ in range(4):
                if worker.claims or any(self.queue.messages.values()):
                    self.happen("take", worker.name, lambda worker=worker: self.take(worker))
            if worker.works:
                self.happen("step", worker.name, lambda worker=worker: self.step(worker))
        for web in self.webs:
            self.happen("beat_web", web.name, lambda web=web: self.beat_web(web))
        self.happen("watch", "", self.watch)

    # -- what must be true

    def check(self, is_true: bool, message: str) -> None:
        if not is_true:
            last = "\n".join(self.trace[-25:])
            raise Broken(f"seed {self.seed}, after event {len(self.trace)}: {message}\n{last}")

    def is_unknown(self, request_id: str) -> bool:
        return not self.books.has(keys.request(request_id), keys.out(request_id), keys.readers_of(request_id))

    def is_over(self, request_id: str) -> bool:
        state = self.books.record(request_id)
        return state is None or state["state"] in END_STATES

    def check_request(self, request_id: str) -> None:
        state = self.books.record(request_id)
        if state is None:
            self.check(self.is_unknown(request_id), f"{request_id} has no record but a stream or readers")
            return
        if state["attempt"] == "0":
            self.seen.add("forestalled")
            self.check(state["reason"] == "not_accepted", f"{request_id} has no attempt: {state}")
            self.check(
                not self.books.has(keys.out(request_id), keys.readers_of(request_id)), f"{request_id}: {state}"
            )
            return
        read = self.check_stream(request_id)
        self.check(int(state["next_index"]) == len(read.tokens), f"{request_id} counts {state['next_index']} tokens")
        self.check_visible(request_id, state, read)
        if read.tokens:
            read.fingerprint = read.fingerprint or state["fingerprint"]
            self.check(state["fingerprint"] == read.fingerprint, f"{request_id} changed from {read.fingerprint}")
        fences = ("", f"{state['attempt']}/{state['cached']}")
        is_streaming = (state["state"], state["losses"]) == ("streaming", "0")
        self.check(state.get("fence", "") == fences[is_streaming], f"{request_id} has another fence: {state}")
        is_over = state["state"] in END_STATES
        self.check(is_over == (read.end is not None), f"{request_id} is {state['state']}, its stream: {read.end}")
        if read.end is not None:
            self.check_end(request_id, state, read.tokens, read.end)
        self.check_books(request_id, state, is_over)

    def check_stream(self, request_id: str) -> Read:
        read = self.read.setdefault(request_id, Read())
        for entry, fields in self.books.entries(request_id, read.num_entries):
            event = decode_entry(entry, fields)
            read.num_entries += 1
            self.check(read.end is None, f"{request_id}: {event} after the end")
            self.check(event.index == len(read.tokens), f"{request_id}: {event} where {len(read.tokens)} should be")
            self.check(event.attempt >= read.attempt, f"{request_id}: {event} after attempt {read.attempt}")
            read.attempt = event.attempt
            if (source := fields.get(b"s")) is not None:
                read.source = unpack_source(source)
            match event:
                case TokenEvent():
                    expected = tuple(token(request_id, event.index + n) for n in range(len(event.token_ids)))
                    self.check(event.token_ids == expected, f"{request_id}: {event}, not {expected}")
                    read.tokens += event.token_ids
                case TerminalEvent():
                    read.end = event
        return read

    def check_visible(self, request_id: str, state: dict[str, str], read: Read) -> None:
        """Whoever follows the log of the last source has seen what comes after its own stream: that stays."""
        worker, slot = read.source
        if state.get("slot"):
            self.check((state["worker"], state["slot"].encode()) == (worker, slot.to_bytes(4, "little")), str(state))
        num_visible = len(read.tokens)
        for number, index, token_id in self.logged_tokens(worker):
            if number == slot:
                self.check(token_id == token(request_id, index), f"{request_id} has {token_id} at {index} in a log")
                num_visible += index == num_visible
        self.check(
            num_visible >= read.num_visible, f"{request_id} had {read.num_visible} tokens, now {num_visible}: {state}"
        )
        if read.end is not None or state["state"] == "offered":
            self.check(num_visible == len(read.tokens), f"{request_id} has a token in a log of late: {state}")
        if read.num_visible > read.num_own and not state.get("slot"):
            self.seen.add("taken from the log")
        read.num_visible, read.num_own = num_visible, len(read.tokens)

    def logged_tokens(self, worker: str) -> list[tuple[int, int, int]]:
        log = self.books._value(keys.steps(worker)) or ()
        return [each for _, pairs in [*log] for each in unpack_step(pairs[1])]

    def check_end(self, request_id: str, state: dict[str, str], tokens: list[int], end: TerminalEvent) -> None:
        self.check((state["state"], state["reason"]) == (end.state, end.reason), f"{request_id}: {state} and {end}")
        if end.state == "finished":
            self.check(len(tokens) == length(request_id), f"{request_id} has finished after {len(tokens)} tokens")
        if end.state == "failed":
            self.check(end.reason == "poison", f"{request_id} failed: {end.reason}")
        self.check("job" not in state, f"{request_id} keeps its job")
        if end.reason == "disconnect":
            self.check(state["outlives"] == "0", f"{request_id} was to outlive its readers")

    def check_books(self, request_id: str, state: dict[str, str], is_over: bool) -> None:
        books = self.books
        holders = {name for name in self.worker_names if request_id in books.members(keys.held(name))}
        is_held = state["state"] in ("claimed", "streaming")
        self.check(
            holders == ({state["worker"]} if is_held else set()), f"{request_id} is held by {holders}: {state}"
        )
        for name in holders:
            self.check(books.score(keys.workers(MODEL), name) is not None, f"{request_id}: nobody watches {name}")
        waits = [each for each in PRIORITIES if books.score(keys.waiting(MODEL, each), request_id) is not None]
        is_offered = state["state"] == "offered"
        self.check(waits == ([state["class"]] if is_offered else []), f"{request_id} waits in {waits}: {state}")
        self.check((books.score(keys.DUE, request_id) is None) == is_over, f"{request_id} due or not: {state}")
        readers = books.members(keys.readers_of(request_id))
        opened = {name for name in self.web_names if request_id in books.members(keys.reader_open(name))}
        self.check(readers == opened, f"{request_id} is read by {readers}, open in {opened}")
        for name in readers:
            self.check(books.score(keys.READERS, name) is not None, f"{request_id}: nobody watches {name}")
        if is_over:
            self.check(not readers, f"{request_id} is over and read by {readers}")
        elif state["outlives"] == "0":
            self.check(bool(readers) != ("unread_ms" in state), f"{request_id}: {readers}, {state}")

    def check_nothing_is_held_by_the_dead(self) -> None:
        """Once the watchdog has been there."""
        for name in self.worker_names:
            lease = self.books.score(keys.workers(MODEL), name)
            if lease is None or lease <= self.now_ms:
                held = self.books.members(keys.held(name))
                self.check(not held, f"{name} is dead and holds {held}")
        for request_id in self.accepted:
            state = self.books.record(request_id) or {}
            unread_ms = int(state.get("unread_ms", self.now_ms + 1))
            self.check(unread_ms > self.now_ms, f"{request_id} goes on and nobody has come back to it: {state}")
        for name in self.web_names:
            lease = self.books.score(keys.READERS, name)
            if lease is None or lease <= self.now_ms:
                self.check(not self.books.members(keys.reader_open(name)), f"{name} is dead and reads")

    def check_everything(self) -> None:
        for request_id in self.accepted:
            self.check_request(request_id)
        for request_id in self.lost:
            is_forestalled = (self.books.record(request_id) or {}).get("attempt") == "0"
            self.check(is_forestalled or self.is_unknown(request_id), f"{request_id} was lost and has come back")
        for request_id in self.given_up:
            self.check(self.is_over(request_id), f"{request_id} was given up and goes on")

    def check_the_end(self) -> None:
        self.check_everything()
        for request_id, ask in self.accepted.items():
            self.check(self.is_over(request_id), f"{request_id} has no end: {self.books.record(request_id)}")
            if not self.is_unknown(request_id):
                ttl_ms = self.books.ttl_ms(keys.request(request_id))
                self.check(0 < ttl_ms <= STREAM_TTL_S * 1000, f"{request_id} of {ask.ids} is kept for {ttl_ms} ms")
        self.check(not any(worker.works for worker in self.workers), "a worker still works")
        left = [keys.DUE, *(keys.waiting(MODEL, each) for each in PRIORITIES)]
        left += [keys.held(name) for name in self.worker_names] + [keys.reader_open(name) for name in self.web_names]
        for key in left:
            self.check(not self.books.has(key), f"{key} is left behind: {self.books.members(key)}")
        eternal = self.books.eternal()
        self.check(eternal <= {keys.EVENTS}, f"kept for ever: {eternal}")


def main() -> None:
    simulation = Simulation(Server(), int(sys.argv[1]))
    try:
        simulation.run()
    finally:
        print("\n".join(simulation.trace))
        print(sorted(simulation.seen))


if __name__ == "__main__":
    main()
