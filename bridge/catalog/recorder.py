"""The recorder: moves lifecycle facts from the events stream into the catalog, each exactly once, whatever is killed.

Owns how far it has read, and the upkeep of the catalog (snapshot, retention). Refuses to know what a fact means
(`bridge.catalog.facts`) and how rows are kept (`bridge.catalog.catalog`).

A batch's rows and the id of its last entry are committed together; only then, with the next `_take`, does the stream
lose those entries. Killed before the commit: the batch is read again. Killed after it: reading goes on behind it.

Stream ids mean something within one life of the stream only (FLUSHALL, an emptied Redis, a restored copy whose clock
is behind). So the stream carries a mark, and the catalog remembers it: another mark, or none, is another stream, to
be read from its beginning. A stream that has gone back behind what was recorded is read again from its beginning
too: upserts make that harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

from redis import Redis

from bridge.catalog.catalog import Catalog, Position
from bridge.catalog.facts import KINDS, Fact, MalformedFact, fold, parse_fact
from tasks.protocol import keys

log = logging.getLogger(__name__)

MAX_ROWS = 1000
"""Facts in a batch at most. PERF: a batch has a fixed cost in DuckDB of about 10 ms; in batches of 500 a fact costs
52 us of CPU, of 1000 30 us, of 2000 no less."""
MAX_FINAL_BATCHES = 20
"""How many batches a recorder that must end still takes; what is left stays in the stream."""
DAY_MS = 86_400_000
FORGET_EVERY_MS = 60_000
MAX_MB = 1024
SNAPSHOT_SHARE = 20
"""Of the recorder's time, at most one part in this many goes into snapshots, however large the catalog is."""

# Gives the entries that are recorded back, but for the last of them: these stay for people who look, unless as many
# are waiting to be recorded. KEYS events, generation; ARGV generation, last recorded id (ms, sequence), the id that
# follows it, how many may stay.
_GIVE_BACK = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 'other'
end
local last_ms, last_seq = 0, 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  local info = redis.call('XINFO', 'STREAM', KEYS[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      local ms, seq = info[i + 1]:match('^(%d+)-(%d+)$')
      last_ms, last_seq = tonumber(ms), tonumber(seq)
    end
  end
end
local recorded_ms, recorded_seq = tonumber(ARGV[2]), tonumber(ARGV[3])
if last_ms < recorded_ms or (last_ms == recorded_ms and last_seq < recorded_seq) then
  return 'behind'
end
if last_ms == recorded_ms and last_seq == recorded_seq then
  redis.call('XTRIM', KEYS[1], 'MAXLEN', ARGV[5])
elseif redis.call('XLEN', KEYS[1]) > 2 * tonumber(ARGV[5]) then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[4])
end
return 'ok'
"""

_Entries = list[tuple[bytes, dict[bytes, bytes]]]


class Recorder:
    """Use from one thread. `tick` raises RedisError, CatalogError; after either, call it again: nothing is lost."""

    def __init__(
        self,
        redis: Redis,
        catalog: Catalog,
        *,
        max_rows: int = MAX_ROWS,
        snapshot_every_ms: int = 2_000,
        keep_days: int = 30,
        max_mb: int = MAX_MB,
        keep_facts: int = 0,
        clock_ms: Callable[[], int],
    ) -> None:
        """`redis` is a short client of the main database. `clock_ms` gives epoch milliseconds.

        `keep_facts`: how many recorded facts stay in the stream.
        """
        self._redis = redis
        self._catalog = catalog
        self._max_rows = max_rows
        self._snapshot_every_ms = snapshot_every_ms
        self._keep_ms = keep_days * DAY_MS
        self._max_bytes = max_mb * 1_000_000
        self._keep_facts = keep_facts
        self._clock_ms = clock_ms
        self._next_snapshot_ms = 0
        self._next_forget_ms = 0
        self._strange_kinds: set[str] = set()

    def tick(self) -> bool:
        """Records at most one batch, then does what upkeep is due. True when more facts are probably waiting."""
        is_full = self.record_batch()
        now_ms = self._clock_ms()
        if now_ms >= self._next_forget_ms:
            self._catalog.forget_before(now_ms - self._keep_ms)
            if num_gone := self._catalog.shrink_to(self._max_bytes):
                log.info("the catalog had grown beyond its bound: forgot the %d requests that ended first", num_gone)
            self._next_forget_ms = now_ms + FORGET_EVERY_MS
        if self._catalog.is_snapshot_due and now_ms >= self._next_snapshot_ms:
            self._catalog.snapshot()
            taken_ms = self._clock_ms() - now_ms
            self._next_snapshot_ms = now_ms + max(self._snapshot_every_ms, SNAPSHOT_SHARE * taken_ms)
        return is_full

    def record_batch(self) -> bool:
        """Records at most `max_rows` facts. True when the batch was full."""
        position = self._catalog.position
        answer, entries = self._take(position)
        match answer:
            case b"ok":
                if entries:
                    self._record(entries, position)
                return len(entries) == self._max_rows
            case b"behind":
                log.warning("the events stream is behind %s, which is recorded: reading it again", position.last_id)
                self._catalog.record({}, replace(position, last_id="0-0"))
                return True
            case _:
                self._adopt(position)
                return True

    def finish(self) -> None:
        """Records what is there and leaves a fresh snapshot, before the catalog is closed."""
        for _ in range(MAX_FINAL_BATCHES):
            if not self.record_batch():
                break
        if self._catalog.is_snapshot_due:
            self._catalog.snapshot()

    def _take(self, position: Position) -> tuple[bytes, _Entries]:
        """Gives back what is recorded, and takes what follows if the answer is ok; in one round trip."""
        ms, _, seq = position.last_id.partition("-")
        following = f"{ms}-{int(seq) + 1}"
        # SAFETY: one transaction, so that a stream which was emptied and begun anew in between is neither trimmed nor
        # read by the ids of the one before. PERF: the entries do not pass through Lua, which would hold Redis up.
        with self._redis.pipeline(transaction=True) as pipe:
            names = (keys.EVENTS, keys.EVENTS_GENERATION)
            pipe.eval(_GIVE_BACK, 2, *names, position.generation, ms, seq, following, self._keep_facts)
            pipe.xrange(keys.EVENTS, min=following, count=self._max_rows)
            answer, entries = pipe.execute()
        return answer, entries

    def _adopt(self, position: Position) -> None:
        """The stream is not the one that was recorded until now: mark it, and read it from its beginning."""
        # The catalog learns the mark first. Killed in between: the stream has no such mark, and is adopted again.
        generation = uuid4().hex
        log.info("the events stream is new to this catalog, reading it from its beginning")
        self._catalog.record({}, replace(position, generation=generation, last_id="0-0"))
        self._redis.set(keys.EVENTS_GENERATION, generation)

    def _record(self, entries: _Entries, position: Position) -> None:
        facts: list[Fact] = []
        for entry_id, fields in entries:
            try:
                fact = parse_fact(fields)
            except MalformedFact as error:
                log.warning("skipped entry %s of the events stream: %s", entry_id.decode(), error)
                continue
            if fact.kind in KINDS:
                facts.append(fact)
            elif fact.kind not in self._strange_kinds:
                self._strange_kinds.add(fact.kind)
                log.warning("skipped facts of a kind that this version does not know: %r", fact.kind)
        after = replace(
            position,
            last_id=entries[-1][0].decode(),
            num_recorded=position.num_recorded + len(facts),
            num_skipped=position.num_skipped + len(entries) - len(facts),
        )
        self._catalog.record(fold(facts), after)
