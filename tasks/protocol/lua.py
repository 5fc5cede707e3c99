"""Calling the Lua scripts of `tasks/protocol/scripts/`: raw EVALSHA, loaded again when the server has forgotten them.

Owns the source texts and their hashes. Refuses to know what any script means: that is `tasks.protocol.record`. Every
script is safe to send twice, so a call whose reply was lost may simply be sent again, by redis-py or by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

from tasks.protocol import keys

Argument = str | bytes | int
_RECORDS = ("clock", "records")
_ENDS = (*_RECORDS, "events", "readers", "ends")
_OFFERS = (*_ENDS, "offers")
PARTS: Mapping[str, tuple[str, ...]] = {
    "submit": (*_RECORDS, "events", "readers", "queue"),
    "enqueue": ("queue",),
    "forestall": ("clock",),
    "attach": (*_RECORDS, "readers"),
    "detach": _ENDS,
    "reader_leave": ("clock",),
    "claim": (*_RECORDS, "events"),
    "append": (*_ENDS, "steps"),
    "release": _OFFERS,
    "reoffer": _OFFERS,
    "look": _OFFERS,
    "close": _ENDS,
    "stored": ("clock",),
    "amend": (),
    "delete": _RECORDS,
    "heartbeat": ("clock", "events"),
    "leave": (*_RECORDS, "events"),
    "peers": ("clock",),
    "fetch": ("clock",),
}
"""The scripts, and what of `tasks/protocol/scripts/parts/` stands before the body of each, in this order.

PERF: each call makes the functions of what stands before the body: those of all parts take 65 microseconds when a
step of an engine lies between two calls.
"""


@cache
def source(name: str) -> str:
    """The whole text of script `name`: key templates, shared parts, body."""
    folder = files("tasks.protocol") / "scripts"
    paths = (*(folder / "parts" / f"{part}.lua" for part in PARTS[name]), folder / f"{name}.lua")
    text = "".join(path.read_text(encoding="utf-8") for path in paths)
    return keys.lua_constants(text) + text


class Scripts:
    """The scripts over one client. Replies are raw: lists of bytes and ints, None for nil."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._sources = {name: source(name) for name in PARTS}
        self._hashes = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._sources.items()}

    def call(self, name: str, now_ms: int | None, *args: Argument) -> Any:
        """One script, one round trip. Raises redis.exceptions.RedisError."""
        time = "" if now_ms is None else now_ms
        try:
            return self._redis.evalsha(self._hashes[name], 0, time, *args)
        except NoScriptError:
            # The text itself, which is remembered again: between a load and a call it could be forgotten once more.
            return self._redis.eval(self._sources[name], 0, time, *args)
