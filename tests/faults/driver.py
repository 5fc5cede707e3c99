"""The driver: many clients at a real cell, faults at moments drawn from a seed, and a look at everything afterwards.

Owns the rounds: the load, doing the faults and undoing them, and the check that nothing is left behind. Refuses to
judge a single exchange (`tests.faults.verdict`) and to choose faults (`tests.faults.schedule`). Runs on the main
thread: a process that another thread starts would end with that thread.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from redis.exceptions import RedisError

from tests.faults.cell import FaultyCell
from tests.faults.client import Seen
from tests.faults.oracle import Oracle
from tests.faults.persistent import ask_with_habit
from tests.faults.schedule import KINDS, Fault, FaultKind, draw_ask, draw_faults
from tests.faults.verdict import Broken, judge_client, judge_record
from tokenferry.errors import ForPeople

AFTERMATH_S = 5.0
"""For how long a fault that is over may still show: a call to Redis may wait for 3 s, and then comes back to a busy
machine."""
OUTAGE_S = 9.0
"""A Redis that was away for so long (it has to read its file, too) ends streams, as it should after 10 s."""
BACK_S = 60.0
QUIET_S = 45.0
HANG_S = 60.0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that happened, and since when it cannot show any more."""

    kind: FaultKind
    target: str
    from_s: float
    until_s: float

    @property
    def lasted_s(self) -> float:
        return self.until_s - AFTERMATH_S - self.from_s


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker that was killed or frozen, with the requests in its hands."""

    how: str
    at_s: float
    request_ids: frozenset[str]


@dataclass(slots=True)
class Report:
    """What happened so far."""

    seed: int
    num_rounds: int = 0
    began_s: float = field(default_factory=time.monotonic)
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    habits: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_checked_records: int = 0
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    """By the way a worker died: from its death to the next token at the client, for each stream it had."""
    step_gaps_s: list[float] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    broken_kinds: Counter[str] = field(default_factory=Counter)

    @property
    def num_requests(self) -> int:
        return self.ends.total()


class Driver:
    """`await driver.round(seconds)`, as often as wanted; `driver.report` afterwards."""

    def __init__(
        self,
        cell: FaultyCell,
        seed: int,
        *,
        num_clients: int = 16,
        every_s: float = 1.0,
        kinds: Sequence[FaultKind] = KINDS,
        say: Callable[[str], None] = print,
    ) -> None:
        self.report = Report(seed)
        self._cell = cell
        self._seed = seed
        self._num_clients = num_clients
        self._every_s = every_s
        self._kinds = kinds
        self._say = say
        self._oracle = Oracle()
        self._busy: set[str] = set()
        """Targets that a fault has in its hands."""
        self._seen: list[Seen] = []
        self._disturbances: list[Disturbance] = []
        self._kills: list[Kill] = []

    async def round(self, length_s: float) -> None:
        """Load and faults for so long, then everything ends, is looked at, and is whole again."""
        number = self.report.num_rounds
        rng = random.Random(f"{self._seed}/{number}")
        faults = draw_faults(rng, length_s, self._every_s, self._kinds)
        self._say(f"round {number} of seed {self._seed}: {len(faults)} faults\n  " + "\n  ".join(map(str, faults)))
        self._seen, self._disturbances, self._kills = [], [], []
        until_s = time.monotonic() + length_s
        clients = [
            asyncio.create_task(self._client(random.Random(f"{self._seed}/{number}/{client}"), until_s))
            for client in range(self._num_clients)
        ]
        await self._do_all(faults, time.monotonic())
        await asyncio.gather(*clients)
        await self._check()
        self.report.num_rounds += 1

    # -- clients

    async def _client(self, rng: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            web = rng.randrange(len(self._cell.ports))
            seen = await ask_with_habit(self._cell.ports, web, draw_ask(rng, self._oracle), rng, limit_s=HANG_S)
            self._seen.append(seen)
            if seen.end in ("refused", "cut", "unreached"):
                await asyncio.sleep(0.1)

    # -- faults

    async def _do_all(self, faults: Sequence[Fault], began_s: float) -> None:
        doing = []
        for fault in faults:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
            doing.append(asyncio.create_task(self._do(fault)))
        if doing:
            await asyncio.gather(*doing)

    def _targets(self, kind: FaultKind) -> list[str]:
        cell = self._cell
        match kind.target:
            case "worker":
                names = cell.worker_names
            case "web":
                names = cell.web_names
            case "link":
                names = [f"link of {name}" for name in cell.linked]
            case other:
                names = [other]
        return [name for name in names if name not in self._busy]

    async def _do(self, fault: Fault) -> None:
        targets = self._targets(fault.kind)
        if not targets:
            return
        target = targets[fault.target % len(targets)]
        self._busy.add(target)
        from_s = time.monotonic()
        try:
            await self._strike(fault, target)
            self.report.faults[fault.kind.name] += 1
        except RedisError as error:
            # Redis is away because of another fault, so we do not know whom to strike.
            self._say(f"  {fault.kind.name} left out: {error}")
        finally:
            self._busy.discard(target)
            self._disturbances.append(Disturbance(fault.kind, target, from_s, time.monotonic() + AFTERMATH_S))

    async def _strike(self, fault: Fault, target: str) -> None:
        match fault.kind.name:
            case "kill -9 of an engine process":
                await self._kill_engine(target)
            case "kill -9 of a whole worker":
                await self._note_kill(fault.kind.name, target)
                self._cell.kill(target)
                await self._replace(target, fault.lasts_s)
            case "freeze of an engine process":
                await self._freeze_engine(target, fault.lasts_s)
            case "kill -9 of a web process" | "kill -9 of the bridge":
                pid = self._cell.signal_at_work(target, signal.SIGKILL)
                await self._wait(lambda: self._cell.pid_at_work(target) not in (None, pid), target)
                await self._wait_ready(target)
            case "SIGTERM of a worker, and another one" | "SIGTERM of a web process, and another one":
                process = self._cell.process(target)
                self._cell.processes.remove(process)
                await asyncio.to_thread(process.end)
                await self._replace(target, fault.lasts_s)
            case "freeze of a web process" | "freeze of the bridge":
                await self._freeze(self._cell.pid_at_work(target), fault.lasts_s)
            case "kill -9 of Redis, and a restart":
                self._cell.valkey.kill()
                await asyncio.sleep(fault.lasts_s)
                self._cell.valkey.start()
                await asyncio.to_thread(self._cell.valkey.wait_until_ready)
            case "freeze of Redis":
                assert self._cell.valkey.process is not None
                await self._freeze(self._cell.valkey.process.pid, fault.lasts_s)
            case _:
                await self._strike_link(fault, target.removeprefix("link of "))

    async def _strike_link(self, fault: Fault, name: str) -> None:
        link = self._cell.link(name)
        match fault.kind.name:
            case "a stalled way to Redis":
                link.stall()
                try:
                    await asyncio.sleep(fault.lasts_s)
                finally:
                    link.flow()
            case "a cut way to Redis":
                link.cut()
            case "a lost reply of Redis, connection cut":
                link.lose_reply(b"", "cut")
            case "a lost reply of Redis, then silence":
                link.lose_reply(b"", "mute")
            case other:
                raise AssertionError(f"no such fault: {other}")

    async def _kill_engine(self, name: str) -> None:
        pid = await self._note_kill("kill -9 of an engine process", name)
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await self._wait(lambda: self._cell.pid_at_work(name) not in (None, pid), name)
        await self._wait_ready(name)

    async def _freeze_engine(self, name: str, lasts_s: float) -> None:
        pid = await self._note_kill("freeze of an engine process", name)
        await self._freeze(pid, lasts_s)
        await self._wait_ready(name)

    async def _note_kill(self, how: str, name: str) -> int | None:
        """Remember what the engine under `name` has in its hands. Its process id."""
        info = await asyncio.to_thread(self._cell.engine_of, name)
        if info is None:
            return self._cell.pid_at_work(name)
        held = await asyncio.to_thread(self._cell.records.held, info.worker)
        self._kills.append(Kill(how, time.monotonic(), frozenset(request_id for request_id, _ in held)))
        return info.pid

    async def _freeze(self, pid: int | None, lasts_s: float) -> None:
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(lasts_s)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def _replace(self, name: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._cell.replace(name)
        await self._wait_ready(name)

    async def _wait_ready(self, name: str) -> None:
        def is_ready() -> bool:
            with suppress(RedisError):
                match self._cell.command_of(name):
                    case "worker":
                        return self._cell.engine_of(name) is not None
                    case "web":
                        return self._cell.listens(name)
                    case _:
                        return True
            return False

        await self._wait(is_ready, name)

    async def _wait(self, condition: Callable[[], bool], name: str) -> None:
        deadline_s = time.monotonic() + BACK_S
        while not await asyncio.to_thread(condition):
            if time.monotonic() > deadline_s:
                raise ForPeople(f"{name} is not back after {BACK_S:.0f} s\n{self._cell.logs()}")
            await asyncio.sleep(0.05)

    # -- checks

    async def _check(self) -> None:
        cell, report = self._cell, self.report
        await asyncio.to_thread(cell.wait_complete)
        try:
            await asyncio.to_thread(cell.wait_quiet, QUIET_S)
        except ForPeople:
            self._note(Broken("leftover", "", f"left over: {await asyncio.to_thread(cell.leftovers)}"))
        for seen in self._seen:
            report.ends[seen.end] += 1
            report.num_tokens += sum(text.count(">") for text in seen.texts.values())
            report.habits[seen.ask.habit] += 1
            if seen.error_code:
                report.errors[f"{seen.error_code} ({'event' if seen.status == 200 else seen.status})"] += 1
            self._note(judge_client(seen, self._oracle, self._excuses(seen)))
            if seen.request_id:
                report.num_checked_records += 1
                for number in range(seen.ask.num_choices):
                    choice_id = f"{seen.request_id}.{number}" if number else seen.request_id
                    self._note(judge_record(cell.redis, choice_id, seen.ask.content, self._oracle))
        self._measure_gaps()

    def _excuses(self, seen: Seen) -> frozenset[str]:
        web_name = self._cell.web_names[seen.web]
        found: set[str] = set()
        for disturbance in self._disturbances:
            overlaps = disturbance.from_s <= seen.ended_s and seen.began_s <= disturbance.until_s
            if overlaps and (disturbance.kind.target != "web" or disturbance.target == web_name):
                found |= disturbance.kind.excuses
                if disturbance.kind.target == "redis" and disturbance.lasted_s >= OUTAGE_S:
                    found |= {"stream_lost", "disconnect"}
        return frozenset(found)

    def _measure_gaps(self) -> None:
        by_id = {seen.request_id: seen for seen in self._seen if seen.request_id}
        for kill in self._kills:
            for request_id in kill.request_ids:
                seen = by_id.get(request_id)
                if seen is not None and (gap_s := gap_after(seen, kill.at_s)) is not None:
                    self.report.gaps_s.setdefault(kill.how, []).append(gap_s)

    def _note(self, broken: Broken | None) -> None:
        if broken is not None:
            self.report.broken_kinds[broken.kind] += 1
            line = (
                f"seed {self._seed} round {self.report.num_rounds} {broken.kind}: {broken.request_id} {broken.what}"
            )
            self.report.broken.append(line)
            self._say(f"  BROKEN {line}")


def gap_after(seen: Seen, at_s: float, within_s: float = 10.0) -> float | None:
    """From `at_s` to the end of the longest silence around or after it. None if nothing came afterwards."""
    later = [moment for moment in seen.arrivals_s if moment > at_s]
    if not later or seen.ask.pause_s:
        return None
    earlier = [moment for moment in seen.arrivals_s if moment <= at_s]
    moments = [earlier[-1] if earlier else at_s, *(moment for moment in later if moment < at_s + within_s)]
    silences = [(b - a, b) for a, b in pairwise(moments)]
    return max(silences)[1] - at_s if silences else later[0] - at_s
