"""The table of shared state: every Redis key, its type, its writer, its reader and its lifetime.

Owns the names. No other module, and no script, spells a key: Python calls the functions below, and the scripts see
the same templates as Lua constants (`lua_constants`). `{}` are literal braces: no id can look like another key.

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

Dramatiq's database (N+1), namespace `tfq`: `<ns>:<queue>` list, `<ns>:<queue>.msgs` hash, `<ns>:__acks__.<broker
id>.<queue>` set, `<ns>:__heartbeats__` zset, `<ns>:<queue>.XQ` dead letters, all of Dramatiq's own making.
"""

from __future__ import annotations

from tasks.protocol.contract import Priority
from tasks.protocol.priorities import PRIORITIES

REQUEST = "tf:{%s}:req"
OUT = "tf:{%s}:out"
READERS_OF = "tf:{%s}:readers"
IDEMPOTENCY = "tf:idempotency:%s"
STORED = "tf:stored:%s"
DELETED = "tf:{%s}:deleted"
DUE = "tf:due"
WAITING = "tf:waiting:%s:%s"
CLAIMS = "tf:claims:%s:%s"
CLAIMED_UNTIL = "tf:claimed_until:%s"
MODELS = "tf:models"
WORKERS = "tf:workers:%s"
LATELY = "tf:lately:%s"
WORKER = "tf:worker:%s"
HELD = "tf:worker:%s:held"
STEPS = "tf:worker:%s:steps"
REV = "tf:worker:%s:rev"
READERS = "tf:readers"
READER_OPEN = "tf:reader:%s:open"
CONTROL = "tf:control:%s"
EVENTS = "tf:events"
EVENTS_GENERATION = "tf:events:generation"
METRICS = "tf:metrics:%s"
MEASURED = "tf:metrics"
CRASHES = "tf:crashes"
BRIDGE = "tf:bridge"
WAKE = "tf:wake:%s"
MESSAGE_LIST = "%s:%s"
MESSAGES = "%s:%s.msgs"

QUEUE_NEW = "generate.%s"
QUEUE_CLASS = "generate.%s.%s"
QUEUE_AGAIN = "generate.%s.again"
QUEUE_CONTINUE = "generate.%s@%s"

QUEUE_NAMESPACE = "tfq"

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
is gone
from it is in the streams of the requests."""
STEPS_TTL_MS = 3_600_000
"""Of a log to which nothing is added."""
CONTROL_KEPT = 1_000
"""About so many wake-ups and notices wait for a reader; what it misses beyond them it finds within a second."""
CONTROL_TTL_MS = 86_400_000
"""A process that is killed leaves its control stream behind."""
CLAIMS_BUCKET_MS = 5_000
"""How many milliseconds of claims are counted in one key."""


def request(request_id: str) -> str:
    return REQUEST % request_id


def out(request_id: str) -> str:
    """The stream of one request: token entries and exactly one terminal entry."""
    return OUT % request_id


def readers_of(request_id: str) -> str:
    """The web processes that read a request."""
    return READERS_OF % request_id


def idempotency(key: str) -> str:
    return IDEMPOTENCY % key


def stored(owner: str) -> str:
    """The stored answers of one owner, the name of an API key; empty where there are none."""
    return STORED % owner


def waiting(model: str, priority: Priority = "default") -> str:
    """What is on offer and not claimed, by the time of the offer."""
    return WAITING % (model, priority)


def claims(model: str, bucket: int) -> str:
    """How many requests were claimed in the `bucket`-th CLAIMS_BUCKET_MS of the epoch."""
    return CLAIMS % (model, bucket)


def claimed_until(queue: str) -> str:
    return CLAIMED_UNTIL % queue


def workers(model: str) -> str:
    return WORKERS % model


def worker(worker_id: str) -> str:
    return WORKER % worker_id


def held(worker_id: str) -> str:
    return HELD % worker_id


def steps(worker_id: str) -> str:
    """The log of a worker: the tokens of its last engine steps, an entry for each step."""
    return STEPS % worker_id


def worker_rev(worker_id: str) -> str:
    """Another number whenever something that the worker holds has ended or was moved."""
    return REV % worker_id


def reader_open(reader_id: str) -> str:
    return READER_OPEN % reader_id


def control(reader_id: str) -> str:
    return CONTROL % reader_id


def metrics(process: str) -> str:
    """The packed numbers of one process."""
    return METRICS % process


def wake(queue: str) -> str:
    return WAKE % queue


def queue_new(model: str, priority: Priority = "default") -> str:
    """First offers of one class."""
    return QUEUE_NEW % model if priority == "default" else QUEUE_CLASS % (model, priority)


def queue_again(model: str) -> str:
    """Further offers of requests that have no token yet."""
    return QUEUE_AGAIN % model


def queue_continue(model: str, fingerprint: str) -> str:
    """Further offers of requests that have tokens: only workers of that fingerprint may continue them."""
    return QUEUE_CONTINUE % (model, fingerprint)


def worker_queues(model: str, fingerprint: str) -> tuple[str, ...]:
    """What a worker drains: unfinished streams, then requests that were let down, then new ones by class."""
    new = (queue_new(model, priority) for priority in PRIORITIES)
    return queue_continue(model, fingerprint), queue_again(model), *new


def worker_wake(worker_id: str) -> str:
    """A wake list of one worker's own, to end its waiting when it has to stop."""
    return WAKE % f"worker.{worker_id}"


def message_list(queue: str, namespace: str = QUEUE_NAMESPACE) -> str:
    """Dramatiq's list of the message ids waiting in `queue` (Dramatiq's database)."""
    return MESSAGE_LIST % (namespace, queue)


def messages(queue: str, namespace: str = QUEUE_NAMESPACE) -> str:
    """Dramatiq's hash message id -> message of `queue`."""
    return MESSAGES % (namespace, queue)


def message_acks(queue: str, broker_id: str, namespace: str = QUEUE_NAMESPACE) -> str:
    """Dramatiq's set of the message ids that `broker_id` fetched from `queue` and has not acknowledged."""
    return f"{namespace}:__acks__.{broker_id}.{queue}"


def message_heartbeats(namespace: str = QUEUE_NAMESPACE) -> str:
    """Dramatiq's zset broker id -> when it was last seen (ms)."""
    return f"{namespace}:__heartbeats__"


def lua_constants() -> str:
    """The templates and limits above as Lua locals, put before every script."""
    names = (
        "REQUEST OUT READERS_OF IDEMPOTENCY DELETED DUE WAITING CLAIMS CLAIMED_UNTIL MODELS WORKERS LATELY WORKER"
        " HELD STEPS REV READERS READER_OPEN CONTROL EVENTS WAKE MESSAGE_LIST MESSAGES QUEUE_AGAIN QUEUE_CONTINUE"
    )
    numbers = (
        "MAX_EVENTS",
        "MAX_TRIMMED",
        "LATELY_MS",
        "CLAIMS_BUCKET_MS",
        "MAX_WAKE_TOKENS",
        "WAKE_TOKENS_AGAIN",
        "WAKE_TTL_MS",
        "STEPS_KEPT",
        "STEPS_TTL_MS",
        "CONTROL_KEPT",
        "CONTROL_TTL_MS",
    )
    lines = [f'local {name} = "{globals()[name]}"' for name in names.split()]
    lines += [f"local {name} = {globals()[name]}" for name in numbers]
    return "\n".join([*lines, ""])
