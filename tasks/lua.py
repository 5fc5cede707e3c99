"""Calling the Lua scripts of `tasks/scripts/`: raw EVALSHA, loaded again when the server has forgotten them.

Owns the source texts and their hashes. Refuses to know what any script means: that is `tasks.record`. Every script is
safe to send twice, so a call whose reply was lost may simply be sent again, by redis-py or by the caller.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from redis import Redis
from redis.exceptions import NoScriptError

from tasks import keys

Argument = str | bytes | int
NAMES = (
    "submit",
    "enqueue",
    "forestall",
    "attach",
    "detach",
    "reader_leave",
    "claim",
    "append",
    "log",
    "release",
    "reoffer",
    "look",
    "close",
    "stored",
    "amend",
    "delete",
    "heartbeat",
    "leave",
    "peers",
    "fetch",
)


PARTS = {"append": ("prelude", "steps"), "log": ("steps",)}
"""What stands before the body of these scripts; before that of all others the prelude.

PERF: each call makes the functions of what stands before the body: the prelude's take 65 microseconds when a step of
an engine lies between two calls.
"""


@cache
def source(name: str) -> str:
    """The whole text of script `name`: key templates, shared parts, body."""
    folder = files("tasks") / "scripts"
    parts = (*PARTS.get(name, ("prelude",)), name)
    return keys.lua_constants() + "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts)


class Scripts:
    """The scripts over one client. Replies are raw: lists of bytes and ints, None for nil."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._sources = {name: source(name) for name in NAMES}
        self._hashes = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in self._sources.items()}

    def call(self, name: str, now_ms: int | None, *args: Argument) -> Any:
        """One script, one round trip. Raises redis.exceptions.RedisError."""
        time = "" if now_ms is None else now_ms
        try:
            return self._redis.evalsha(self._hashes[name], 0, time, *args)
        except NoScriptError:
            # The text itself, which is remembered again: between a load and a call it could be forgotten once more.
            return self._redis.eval(self._sources[name], 0, time, *args)
