"""Which faults happen when, drawn from a seed: the same seed gives the same schedule and the same requests.

Owns the kinds of faults, how long each lasts, and which failures at a client each of them excuses. Refuses to know
how a fault is done.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.faults.client import Ask, Habit
from tests.faults.oracle import MAX_TOKENS, NUM_STORIES, Oracle, story

ENDS = (9, 33, 77)
"""Some prompts end by themselves after so many tokens."""


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What may be done to a cell."""

    name: str
    target: str
    """The line of the Procfile it strikes, "redis", or "link": the way of one process to Redis."""
    min_s: float = 0.0
    max_s: float = 0.0
    """How long it lasts, where that is up to us."""
    excuses: frozenset[str] = frozenset()
    """Error codes, and "cut" for a broken connection, that clients may see because of it."""
    weight: int = 1


_REDIS_AWAY = frozenset({"queue_unreachable", "no_worker"})
_WORKER_AWAY = frozenset({"no_worker", "poison"})
_WEB_AWAY = frozenset({"cut", "shutting_down", "disconnect"})

KINDS = (
    FaultKind("kill -9 of an engine process", "worker", excuses=_WORKER_AWAY, weight=4),
    FaultKind("kill -9 of a whole worker", "worker", 0.0, 1.0, excuses=_WORKER_AWAY, weight=3),
    FaultKind("SIGTERM of a worker, and another one", "worker", 0.0, 0.5, excuses=_WORKER_AWAY, weight=2),
    FaultKind("freeze of an engine process", "worker", 0.6, 2.5, excuses=_WORKER_AWAY, weight=3),
    FaultKind("kill -9 of a web process", "web", excuses=_WEB_AWAY),
    FaultKind("SIGTERM of a web process, and another one", "web", 0.0, 0.5, excuses=_WEB_AWAY),
    FaultKind("freeze of a web process", "web", 0.3, 1.5),
    FaultKind("kill -9 of the bridge", "bridge", weight=2),
    FaultKind("freeze of the bridge", "bridge", 0.3, 2.0),
    FaultKind("kill -9 of Redis, and a restart", "redis", 0.0, 1.0, excuses=_REDIS_AWAY | _WORKER_AWAY, weight=2),
    FaultKind("freeze of Redis", "redis", 0.3, 3.0, excuses=_REDIS_AWAY | _WORKER_AWAY | {"disconnect"}, weight=2),
    FaultKind("a stalled way to Redis", "link", 0.3, 2.0, excuses=_REDIS_AWAY | _WORKER_AWAY, weight=2),
    FaultKind("a cut way to Redis", "link", excuses=_REDIS_AWAY, weight=2),
    FaultKind("a lost reply of Redis, connection cut", "link", excuses=_REDIS_AWAY, weight=2),
    FaultKind("a lost reply of Redis, then silence", "link", excuses=_REDIS_AWAY | _WORKER_AWAY, weight=2),
)
BY_NAME = {kind.name: kind for kind in KINDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule."""

    at_s: float
    """After the beginning of the round."""
    kind: FaultKind
    target: int
    """Which of the targets, modulo their number."""
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:5.2f} s  {self.kind.name}, target {self.target}, {self.lasts_s:.2f} s"


def draw_faults(
    rng: random.Random, length_s: float, every_s: float, kinds: Sequence[FaultKind] = KINDS
) -> list[Fault]:
    """A round's faults, in order; the mean pause between two is `every_s`."""
    faults: list[Fault] = []
    at_s = 0.3 + rng.expovariate(1 / every_s)
    while at_s < length_s:
        [kind] = rng.choices(kinds, [kind.weight for kind in kinds])
        faults.append(Fault(at_s, kind, rng.randrange(1000), rng.uniform(kind.min_s, kind.max_s)))
        at_s += rng.expovariate(1 / every_s)
    return faults


def draw_ask(rng: random.Random, oracle: Oracle) -> Ask:
    """A request of the mixed load, and the client that it has."""
    ends_after = rng.choice(ENDS) if rng.random() < 0.2 else None
    content = story(rng.randrange(NUM_STORIES), ends_after)
    max_tokens = rng.randrange(1, MAX_TOKENS)
    is_streamed = rng.random() < 0.75
    stop: tuple[str, ...] = ()
    if rng.random() < 0.2:
        token_ids = oracle.token_ids(content)
        at = rng.randrange(len(token_ids) - 1)
        stop = (f"{token_ids[at]}><{token_ids[at + 1]}"[rng.randrange(2) :], "never there")
    behaviour = rng.random()
    leave_after = rng.choice((0, 1, rng.randrange(1, 60))) if behaviour < 0.2 else None
    if not is_streamed and leave_after:
        leave_after = 0
    pause_s = 0.02 if is_streamed and 0.2 <= behaviour < 0.25 else 0.0
    num_choices = 1 if rng.random() < 0.85 else rng.randrange(2, 4)
    habit: Habit = "plain"
    if 0.25 <= behaviour < 0.6:
        habit = rng.choice(("resume", "resume", "retry", "stop", "background"))
        if habit == "resume":
            is_streamed, leave_after = True, rng.choice((None, rng.randrange(1, 40)))
        elif habit == "background":
            is_streamed = False
    return Ask(content, max_tokens, stop, is_streamed, leave_after, pause_s, num_choices, habit)
