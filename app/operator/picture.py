"""What the dashboard shows: the live picture, and what the last minutes add to it.

Owns the memory between two looks: the token rate, the times to the first token, how requests ended, what went wrong.
All of it is made again from the facts that Redis still has, so a page that is opened late does not begin empty.
Refuses to know HTTP, and who watches. Texts of prompts and answers are never read.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from bridge.catalog.facts import Fact, MalformedFact, parse_fact
from tasks.observe.live import Entry, LiveCell, LiveRequest, LiveWorker, Overview, Queue
from tasks.process.crashes import told
from tasks.protocol.moves import END_STATES, RecordState

log = logging.getLogger(__name__)

WINDOW_S = 240
"""How far back the plots go."""
MAX_FIRST_TOKENS = 400
"""Dots in the plot of times to the first token."""
MAX_ENDED = 20
MAX_FAILURES = 30
MAX_INCIDENTS = 30
MAX_REMEMBERED = 20_000
"""Requests whose submission or tokens are kept in mind."""
FIRST_FACTS = 5_000
MAX_NEW_FACTS = 10
"""Pieces of `tasks.observe.live.FACTS_AT_ONCE` in one look; if there are more, the look goes on with the latest."""
RATE_KEPT = 0.6
"""Of a request's rate, how much the next look keeps: shown figures should not jump."""

_SHOWN_OF_REQUEST = ("request_id", "state", "worker", "attempt", "num_tokens", "max_tokens", "submitted_ms")
_SHOWN_DETAILS = ("reason", "message", "next_index", "cached", "waited_ms", "prompt_tokens", "max_tokens", "class")
"""What a timeline says; who asked is not among it."""


@dataclass(slots=True)
class _Progress:
    """What is known of a request's tokens since it was last looked at."""

    num_tokens: int
    at_ms: int
    tokens_per_s: float = 0.0


@dataclass(slots=True)
class _Begun:
    submitted_ms: int = 0
    first_token_ms: int = 0
    worker: str = ""


class Seconds:
    """Amounts by the second of the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._amounts: dict[int, float] = {}

    def spread(self, amount: float, from_ms: int, to_ms: int) -> None:
        """`amount` came evenly between the two times."""
        from_ms = max(min(from_ms, to_ms), to_ms - WINDOW_S * 1000)
        if from_ms // 1000 == to_ms // 1000:
            self._add(to_ms // 1000, amount)
            return
        for second in range(from_ms // 1000, to_ms // 1000 + 1):
            inside_ms = min(to_ms, second * 1000 + 1000) - max(from_ms, second * 1000)
            self._add(second, amount * inside_ms / (to_ms - from_ms))

    def last(self, now_ms: int) -> list[float]:
        """One amount a second, the latest whole second last."""
        end = now_ms // 1000
        self._forget_before(end - WINDOW_S)
        return [round(self._amounts.get(second, 0.0), 1) for second in range(end - WINDOW_S, end)]

    def total(self, now_ms: int) -> int:
        """All of it, also that of this second."""
        self._forget_before(now_ms // 1000 - WINDOW_S)
        return round(sum(self._amounts.values()))

    def _forget_before(self, first: int) -> None:
        self._amounts = {second: amount for second, amount in self._amounts.items() if second >= first}

    def _add(self, second: int, amount: float) -> None:
        self._amounts[second] = self._amounts.get(second, 0.0) + amount


class Picture:
    """Use from one thread at a time. Each `look` raises redis.exceptions.RedisError."""

    def __init__(self, live: LiveCell) -> None:
        self._live = live
        self._last_fact: bytes | None = None
        self._progress: OrderedDict[str, _Progress] = OrderedDict()
        self._begun: OrderedDict[str, _Begun] = OrderedDict()
        self._tokens = Seconds()
        self._first_tokens: deque[tuple[int, int]] = deque(maxlen=MAX_FIRST_TOKENS)
        self._ends = {state: Seconds() for state in END_STATES}
        self._ended: deque[dict[str, Any]] = deque(maxlen=MAX_ENDED)
        self._failures: deque[dict[str, Any]] = deque(maxlen=MAX_FAILURES)
        self._incidents: deque[dict[str, Any]] = deque(maxlen=MAX_INCIDENTS)

    def look(self, now_ms: int | None = None) -> dict[str, Any]:
        """The whole picture, as JSON takes it. `now_ms` is for tests."""
        overview = self._live.look(now_ms=now_ms)
        # After the requests: what ended in between has its last tokens counted by its end, and none twice.
        for fact in facts_of(self._new_facts()):
            self._take(fact)
        requests = [self._request(request, overview.at_ms) for request in overview.requests]
        self._forget()
        return self._whole(overview, requests)

    def _new_facts(self) -> Iterable[Entry]:
        found: list[Entry] = []
        if self._last_fact is not None:
            for _ in range(MAX_NEW_FACTS):
                found += (new := self._live.facts_after(found[-1][0] if found else self._last_fact))
                if not new:
                    break
            else:
                # NOTE: the plots have a hole then; they are a picture, the catalog is the record.
                self._last_fact = None
        if self._last_fact is None:
            found = self._live.last_facts(FIRST_FACTS)
        self._last_fact = found[-1][0] if found else self._last_fact or b"0-0"
        return found

    def _take(self, fact: Fact) -> None:
        match fact.kind:
            case "submitted":
                self._of(fact.request_id).submitted_ms = fact.at_ms
            case "claimed":
                self._of(fact.request_id).worker = fact.worker
            case "first_token":
                begun = self._of(fact.request_id)
                begun.first_token_ms = fact.at_ms
                if begun.submitted_ms:
                    self._first_tokens.append((fact.at_ms, fact.at_ms - begun.submitted_ms))
            case "lost" | "released":
                self._incidents.append(
                    {**_about(fact), "kind": fact.kind, "num_tokens": _number(fact.details, "next_index")}
                )
            case "worker_joined" | "worker_left":
                self._incidents.append({**_about(fact), "kind": fact.kind})
            case "ended":
                self._end(fact)

    def _end(self, fact: Fact) -> None:
        begun = self._begun.pop(fact.request_id, _Begun())
        seen = self._progress.pop(fact.request_id, None)
        num_tokens = _number(fact.details, "next_index")
        if seen is not None:
            self._tokens.spread(max(0, num_tokens - seen.num_tokens), seen.at_ms, fact.at_ms)
        elif num_tokens:
            self._tokens.spread(num_tokens, begun.first_token_ms or fact.at_ms, fact.at_ms)
        state = str(fact.details.get("state", ""))
        if state in self._ends:
            self._ends[state].spread(1, fact.at_ms, fact.at_ms)
        ended = {
            **_about(fact),
            "state": state,
            "worker": fact.worker or begun.worker,
            "num_tokens": num_tokens,
            "num_cached_tokens": _number(fact.details, "cached"),
            "submitted_ms": begun.submitted_ms,
            "first_token_ms": begun.first_token_ms,
            "message": str(fact.details.get("message", ""))[:300],
        }
        self._ended.append(ended)
        if state == "failed":
            self._failures.append({**ended, "kind": "failed"})

    def _request(self, request: LiveRequest, now_ms: int) -> dict[str, Any]:
        seen = self._progress.get(request.request_id)
        if seen is None:
            seen = _Progress(0, request.first_token_ms or now_ms)
            self._progress[request.request_id] = seen
        num_new, elapsed_ms = max(0, request.num_tokens - seen.num_tokens), now_ms - seen.at_ms
        if elapsed_ms > 0:
            rate = num_new * 1000 / elapsed_ms
            kept = RATE_KEPT if seen.tokens_per_s else 0.0
            seen.tokens_per_s = kept * seen.tokens_per_s + (1 - kept) * rate
        if num_new:
            self._tokens.spread(num_new, seen.at_ms, now_ms)
        seen.num_tokens, seen.at_ms = max(request.num_tokens, seen.num_tokens), now_ms
        shown = {name: getattr(request, name) for name in _SHOWN_OF_REQUEST}
        return {**shown, "tokens_per_s": round(seen.tokens_per_s, 1)}

    def _whole(self, overview: Overview, requests: list[dict[str, Any]]) -> dict[str, Any]:
        now_ms = overview.at_ms
        since_ms = now_ms - WINDOW_S * 1000
        late = [taken_ms for at_ms, taken_ms in self._first_tokens if at_ms >= now_ms - 60_000]
        return {
            "at_ms": now_ms,
            "window_s": WINDOW_S,
            "workers": [_worker(worker) for worker in overview.workers],
            "num_strange_workers": overview.num_strange_workers,
            "crashes": [told(crashes, now_ms) for crashes in overview.crashes],
            "queues": [_queue(queue) for queue in overview.queues],
            "num_running": overview.num_running,
            "requests": requests,
            "ended": list(self._ended)[::-1],
            "num_ended": {state: self._ends[state].total(now_ms) for state in sorted(END_STATES)},
            "tokens": self._tokens.last(now_ms),
            "first_tokens": [(at_ms, taken_ms) for at_ms, taken_ms in self._first_tokens if at_ms >= since_ms],
            "first_token_median_ms": median(late) if late else None,
            "lately": sorted([*self._failures, *self._incidents], key=lambda one: -int(one["at_ms"])),
        }

    def _forget(self) -> None:
        for memory in (self._progress, self._begun):
            while len(memory) > MAX_REMEMBERED:
                memory.popitem(last=False)

    def _of(self, request_id: str) -> _Begun:
        return self._begun.setdefault(request_id, _Begun())


def facts_of(entries: Iterable[Entry]) -> list[Fact]:
    """Entries that are not facts are left out: the recorder says what is wrong with them."""
    facts = []
    for entry_id, fields in entries:
        try:
            facts.append(parse_fact(fields))
        except MalformedFact as error:
            log.debug("entry %s of the events stream is not shown: %s", entry_id.decode(), error)
    return facts


def timeline(request_id: str, state: RecordState | None, facts: list[Fact]) -> dict[str, Any]:
    """The life of one request, as JSON takes it."""
    return {
        "id": request_id,
        "record": None if state is None else asdict(state),
        "is_complete": bool(facts) and facts[0].kind == "submitted",
        "facts": [
            {
                **_about(fact),
                "kind": fact.kind,
                "attempt": fact.attempt,
                "details": {name: fact.details[name] for name in _SHOWN_DETAILS if name in fact.details},
                "state": fact.details.get("state", ""),
            }
            for fact in facts
        ],
    }


def _about(fact: Fact) -> dict[str, Any]:
    return {
        "at_ms": fact.at_ms,
        "request_id": fact.request_id,
        "worker": fact.worker,
        "model": fact.model,
        "reason": str(fact.details.get("reason", ""))[:100],
    }


def _worker(worker: LiveWorker) -> dict[str, Any]:
    return {**asdict(worker.info), **asdict(worker.load), "is_live": worker.is_live, "num_held": worker.num_held}


def _queue(queue: Queue) -> dict[str, Any]:
    return asdict(queue)


def _number(details: Mapping[str, Any], name: str) -> int:
    value = details.get(name)
    return int(value) if isinstance(value, int | float) else 0
