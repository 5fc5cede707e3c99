"""The table of shared state: every Redis key, its type, its writer, its reader and its lifetime.

Owns the names. No other module, and no script, spells a key: Python calls a `Key` with what it is about, and scripts
see the same templates as Lua constants (`lua_constants`). `{}` are literal braces: no id can look like another key.

Main database (N):

| key                      | type   | written by                 | read by               | lifetime                |
|--------------------------|--------|----------------------------|-----------------------|-------------------------|
| tf:{<id>}:req            | hash   | submit, claim, append, ... | the scripts, `state`  | 24 h; stream TTL at end |
| tf:{<id>}:out            | stream | append, close, look, ...   | bridge reader, claim  | 24 h; stream TTL at end |
| tf:{<id>}:readers        | set    | submit, attach, detach     | detach, ends          | 24 h; gone at end       |
| tf:idempotency:<key>     | hash   | submit                     | submit                | 24 h; stream TTL at end |
| tf:stored:<owner>        | zset   | ends, delete               | stored                | STORE_DAYS after last   |
| tf:{<id>}:deleted        | string | delete                     | stored, delete        | 10 min                  |
| tf:due                   | zset   | the scripts                | watchdog              | members leave at end    |
| tf:waiting:<model>:<cls> | zset   | submit, release, reoffer   | submit, `retry_after` | 24 h; members leave     |
| tf:claims:<model>:<n>    | string | claim                      | `retry_after_s`       | 60 s, one each 5 s      |
| tf:claimed_until:<queue> | string | claim                      | look                  | 24 h after last claim   |
| tf:models                | set    | heartbeat                  | watchdog, catalog     | 7 days after last beat  |
| tf:workers:<model>       | zset   | heartbeat, leave           | submit, look, bridge  | 24 h; members leave     |
| tf:lately:<model>        | string | leave, by the watchdog     | submit                | LATELY_MS               |
| tf:worker:<wid>          | hash   | heartbeat                  | web, catalog, demo    | lease + 60 s            |
| tf:worker:<wid>:held     | set    | claim, release, ends       | watchdog, peers       | 24 h; members leave     |
| tf:worker:<wid>:steps    | stream | worker, append, ends       | bridge reader, ends   | STEPS_TTL_MS, KEPT      |
| tf:worker:<wid>:rev      | string | append, ends, re-offers    | append                | STEPS_TTL_MS            |
| tf:readers               | zset   | reader_heartbeat, attach   | watchdog              | 24 h; members leave     |
| tf:reader:<rid>:open     | set    | submit, attach, ends       | watchdog              | 24 h; members leave     |
| tf:control:<rid>         | stream | reader, ends, re-offers    | the reader itself     | 24 h, CONTROL_KEPT      |
| tf:events                | stream | the scripts                | recorder, dashboard   | last KEPT_EVENTS stay   |
| tf:events:generation     | string | recorder                   | recorder              | for ever, one           |
| tf:metrics:<process>     | string | every process              | web, for a scrape     | 60 s after the last     |
| tf:metrics               | set    | every process              | web, for a scrape     | 60 s after the last     |
| tf:crashes               | stream | supervisors, engines       | top, doctor, web      | 24 h after last, KEPT   |
| tf:bridge                | string | the active bridge          | standby bridges       | its lease               |
| tf:wake:<queue>          | list   | submit, enqueue, `wake`    | idle consumers        | 60 s, MAX_WAKE_TOKENS   |

A submit whose reply did not come is forestalled: if it has not arrived, the record of a request that is over takes
its place for FORESTALL_MS.

A finished answer that was to be stored is kept for STORE_DAYS after its end, not for the stream TTL, and is in the
index of its owner by the time of its submit. An index holds STORE_MAX: what leaves it for a newer one lives for the
stream TTL at most.

The end of a request with several choices is the end of the last of them: until then all of its keys stay.

"Live" worker means: its member of `tf:workers:<model>` has a lease expiry in the future. The hash beside it is only
the description. `tf:claimed_until:<queue>` is the latest offer time claimed from that queue: queues are first in,
first out, so an older offer that nobody claimed has lost its message, a younger one is still queued.

Dramatiq's database (N+1): `tfq:<queue>` list, `tfq:<queue>.msgs` hash, `tfq:__acks__.<broker id>.<queue>` set,
`tfq:__heartbeats__` zset, `tfq:<queue>.XQ` dead letters, all of Dramatiq's own making.
"""

from __future__ import annotations

import re

from tasks.protocol.contract import Priority
from tasks.protocol.priorities import PRIORITIES


class Key(str):
    """A template. Called with what it is about, it gives the name: `request("a")` is `tf:{a}:req`."""

    def __call__(self, *parts: str | int) -> str:
        return self % parts


request = Key("tf:{%s}:req")
out = Key("tf:{%s}:out")
"""The stream of one request: token entries and exactly one terminal entry."""
readers_of = Key("tf:{%s}:readers")
"""The web processes that read a request."""
deleted = Key("tf:{%s}:deleted")
idempotency = Key("tf:idempotency:%s")
stored = Key("tf:stored:%s")
"""The stored answers of one owner, the name of an API key; empty where there are none."""
waiting = Key("tf:waiting:%s:%s")
"""Of a model and a priority: what is on offer and not claimed, by the time of the offer."""
claims = Key("tf:claims:%s:%s")
"""How many requests of a model were claimed in the n-th CLAIMS_BUCKET_MS of the epoch."""
claimed_until = Key("tf:claimed_until:%s")
workers = Key("tf:workers:%s")
lately = Key("tf:lately:%s")
worker = Key("tf:worker:%s")
held = Key("tf:worker:%s:held")
steps = Key("tf:worker:%s:steps")
"""The log of a worker: the tokens of its last engine steps, an entry for each step."""
worker_rev = Key("tf:worker:%s:rev")
"""Another number whenever something that the worker holds has ended or was moved."""
reader_open = Key("tf:reader:%s:open")
control = Key("tf:control:%s")
metrics = Key("tf:metrics:%s")
"""The packed numbers of one process."""
wake = Key("tf:wake:%s")
worker_wake = Key(wake("worker.%s"))
"""A wake list of one worker's own, to end its waiting when it has to stop."""

DUE = "tf:due"
MODELS = "tf:models"
READERS = "tf:readers"
EVENTS = "tf:events"
EVENTS_GENERATION = "tf:events:generation"
MEASURED = "tf:metrics"
CRASHES = "tf:crashes"
BRIDGE = "tf:bridge"

QUEUE_NAMESPACE = "tfq"
message_list = Key("tfq:%s")
"""Dramatiq's list of the message ids waiting in a queue."""
messages = Key("tfq:%s.msgs")
"""Dramatiq's hash message id -> message of a queue."""
message_acks = Key("tfq:__acks__.%s.%s")
"""Of a broker and a queue: Dramatiq's set of the message ids that were fetched and not acknowledged."""
MESSAGE_HEARTBEATS = "tfq:__heartbeats__"
"""Dramatiq's zset broker id -> when it was last seen (ms)."""

queue_again = Key("generate.%s.again")
"""Further offers of requests that have no token yet."""
queue_continue = Key("generate.%s@%s")
"""Of a model and a fingerprint: further offers of requests that have tokens, which no other worker may continue."""

MAX_EVENTS = 1_000_000
"""A safety net only: the recorder trims `tf:events` as it reads. Without any recorder the oldest facts go first."""
KEPT_EVENTS = 10_000
"""How many facts the recorder leaves in `tf:events` after it has recorded them: for the dashboard, and for people."""
MAX_WAKE_TOKENS = 64
WAKE_TOKENS_AGAIN = 4
"""For a further attempt: one of those who wait may be the frozen worker that let the request down."""
WAKE_TTL_MS = 60_000
MAX_TRIMMED = 100
"""How many answers leave an index for one that comes: one, unless its bound was lowered or some have expired."""
LATELY_MS = 5_000
"""How long after the lease of the last worker has lapsed a model still takes requests: all may have been held up for
the length of a lease. One that has left, or whose supervisor saw it die, does not count."""
STEPS_KEPT = 64
"""How many steps the log of a worker has: more than `tasks.worker.step_log` lets pass without a flush, so that what
is gone from it is in the streams of the requests."""
STEPS_TTL_MS = 3_600_000
"""Of a log to which nothing is added."""
CONTROL_KEPT = 1_000
"""About so many wake-ups and notices wait for a reader; what it misses beyond them it finds within a second."""
CONTROL_TTL_MS = 86_400_000
"""A process that is killed leaves its control stream behind."""
CLAIMS_BUCKET_MS = 5_000
"""How many milliseconds of claims are counted in one key."""


def queue_new(model: str, priority: Priority = "default") -> str:
    """First offers of one class."""
    return f"generate.{model}" if priority == "default" else f"generate.{model}.{priority}"


def worker_queues(model: str, fingerprint: str) -> tuple[str, ...]:
    """What a worker drains: unfinished streams, then requests that were let down, then new ones by class."""
    new = (queue_new(model, priority) for priority in PRIORITIES)
    return queue_continue(model, fingerprint), queue_again(model), *new


def lua_constants(text: str) -> str:
    """Those names and limits above that `text` uses, in capitals, as Lua locals to put before it."""
    known = {name.upper(): value for name, value in globals().items() if isinstance(value, Key) or name.isupper()}
    used = sorted(known.keys() & set(re.findall(r"[A-Z_]+", text)))
    lines = (f'"{known[name]}"' if isinstance(known[name], str) else str(known[name]) for name in used)
    return "".join(f"local {name} = {value}\n" for name, value in zip(used, lines, strict=True))
