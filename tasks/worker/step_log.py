"""What of an engine step goes where: into the worker's log, or into the streams of the requests themselves.

Owns which assignments are known to be held, their slots, and the tokens that only the log has so far. Refuses to
talk to Redis: `plan` says what to send, `take` is told what came of it.

The log has one entry a step for all sequences (`tasks.protocol.keys.steps`), which costs Redis a tenth of an entry
for each. What must not wait goes into the request's own stream at once: first tokens, ends, log probabilities, and
everything as soon as anything that the worker holds was ended or moved by somebody else (`rev` has changed); the rest
after FLUSH_AFTER steps. Whoever ends or moves a request first takes from the log what is only there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tasks.protocol.contract import pack_step
from tasks.protocol.moves import Append, Appended, AppendResult, LoggedStep, Published, Refused

FLUSH_AFTER = 16
"""Steps after which tokens are in the stream of their request, too. Far below `keys.STEPS_KEPT`.

PERF: all sequences in the same step, so that of sixteen steps fifteen need nothing but the log.
"""

Key = tuple[str, int]
"""(request id, attempt)."""


@dataclass(slots=True)
class _Known:
    """An assignment that has a slot, and what only the log has of it."""

    slot: int
    next_index: int
    """Of the next token that its own stream gets."""
    token_ids: list[int] = field(default_factory=list)
    turn: int = 0
    """Of the last flush: they are counted, and each comes once in a turn."""
    is_held: bool = True
    """It was ours when `rev` was the last."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One call, which may be sent again as it is."""

    appends: Sequence[Append]
    step: LoggedStep
    logged: Sequence[Append]
    """Those whose tokens, if they have any, go into the log."""
    batch: Sequence[Append]


class StepLog:
    """Of one worker; for one thread. `plan` and `take` alternate."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._rev = ""
        self._number = 0
        self._num_slots = 0
        self._known: dict[Key, _Known] = {}

    def plan(self, batch: Sequence[Append]) -> Plan:
        """At most one append for each assignment."""
        own: list[Append] = []
        logged: list[Append] = []
        flushed: list[Append] = []
        for item in batch:
            known = self._can_be_logged(item)
            if known is None:
                own.append(self.unlogged(item))
            elif known.turn == self._turn(self._number + 1):
                logged.append(item)
            else:
                own.append(self.unlogged(item))
                flushed.append(item)
        return self._plan(batch, own, logged, flushed)

    def plan_unlogged(self, plan: Plan) -> Plan:
        """After a disturbance: what was to be logged, each to be judged by itself."""
        return self._plan(plan.logged, [self.unlogged(item) for item in plan.logged], ())

    def take(self, plan: Plan, published: Published) -> list[tuple[Append, AppendResult]]:
        """What became of the appends of the batch. Those in `plan.logged` are missing after a disturbance."""
        if not published.is_undisturbed:
            for known in self._known.values():
                known.is_held = False
        self._rev = published.rev
        settled: list[tuple[Append, AppendResult]] = []
        given = {_key(item): item for item in plan.batch}
        for item, result in zip(plan.appends, published.results, strict=True):
            self._note(item, result, plan.step.slots.get(_key(item)))
            settled.append((given[_key(item)], result))
        if published.is_undisturbed:
            settled += [(item, self._log(item)) for item in plan.logged]
        return settled

    def forget(self, key: Key) -> None:
        """The assignment is over for this worker."""
        self._known.pop(key, None)

    def unlogged(self, item: Append) -> Append:
        """The same with all tokens that its own stream does not have."""
        known = self._known.get(_key(item))
        if known is None or not known.token_ids or not _follows(item, known):
            return item
        return replace(item, first_index=known.next_index, token_ids=(*known.token_ids, *item.token_ids))

    def _plan(
        self,
        batch: Sequence[Append],
        own: Sequence[Append],
        logged: Sequence[Append],
        flushed: Sequence[Append] = (),
    ) -> Plan:
        """The tokens of `flushed` are in the log as well: whoever follows it is not held up by a flush."""
        self._number += 1
        slots: dict[Key, int] = {}
        for item in own:
            if item.token_ids and item.terminal is None and _key(item) not in self._known:
                self._num_slots += 1
                slots[_key(item)] = self._num_slots
        tokens = [
            (self._known[_key(item)].slot, item.first_index + number, token_id)
            for item in (*logged, *flushed)
            for number, token_id in enumerate(item.token_ids)
        ]
        step = LoggedStep(self._worker, self._rev, self._number, pack_step(tokens), slots)
        return Plan(own, step, logged, batch)

    def _can_be_logged(self, item: Append) -> _Known | None:
        known = self._known.get(_key(item))
        if known is None or not known.is_held or item.terminal is not None or item.logprobs:
            return None
        return known if _follows(item, known) else None

    @staticmethod
    def _turn(number: int) -> int:
        return (number - 1) // FLUSH_AFTER

    def _log(self, item: Append) -> Appended:
        known = self._known[_key(item)]
        known.token_ids += item.token_ids
        return Appended(known.next_index + len(known.token_ids))

    def _note(self, item: Append, result: AppendResult, slot: int | None) -> None:
        key, turn = _key(item), self._turn(self._number)
        if isinstance(result, Refused) or item.terminal is not None:
            self._known.pop(key, None)
        elif (known := self._known.get(key)) is not None:
            known.next_index, known.token_ids, known.turn, known.is_held = result.next_index, [], turn, True
        elif slot is not None:
            self._known[key] = _Known(slot, result.next_index, turn=turn)


def _follows(item: Append, known: _Known) -> bool:
    """False where something between was given up: Redis has it, or says that there is a gap."""
    return item.first_index == known.next_index + len(known.token_ids)


def _key(item: Append) -> Key:
    return item.request_id, item.attempt
