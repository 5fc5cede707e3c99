"""The Redis of the simulation: fakeredis with the real scripts, called and looked into past redis-py.

Owns the shortcuts that make thousands of events a second of it. Refuses to know what the scripts are about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fakeredis
from redis.exceptions import NoScriptError

from tasks.process.clients import connect_fake
from tasks.protocol import keys


class Compiled:
    """Lua's runtime, compiling each script once. PERF: fakeredis compiles, and collects garbage, with every call."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._functions: dict[Any, Callable[[], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def execute(self, script: Any) -> Any:
        if script == "collectgarbage()":
            return None
        if script not in self._functions:
            self._functions[script] = self._runtime.eval(b"function() " + script + b"\nend")
        return self._functions[script]()


class Server:
    """One fakeredis for any number of schedules. PERF: scripts do not go through redis-py: a third of the cost."""

    def __init__(self) -> None:
        server: Any = fakeredis.FakeServer()
        self.redis: Any = connect_fake(server, use="short")
        self.redis.eval("return 1", 0)
        server._lua_runtime = Compiled(server._lua_runtime)
        connection = self.redis.connection_pool.get_connection()
        connection.connect()
        self._socket = connection._sock
        self._lock = server.lock
        self.books = Books(server)

    def evalsha(self, sha: str, *args: Any) -> Any:
        encoded = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args[1:]]
        try:
            with self._lock:
                return self._socket.evalsha(sha.encode(), 0, *encoded)
        except Exception as error:
            if "NOSCRIPT" in str(getattr(error, "value", "")):
                raise NoScriptError("NOSCRIPT") from None
            raise AssertionError(f"a script failed: {getattr(error, 'value', error)}") from error


class Books:
    """What is in Redis, read without asking it. PERF: the invariants look at everything after every event."""

    def __init__(self, server: Any) -> None:
        self._database = server.dbs[0]

    def _value(self, key: str) -> Any:
        item = self._database.get(key.encode())
        return None if item is None else item.value

    def has(self, *names: str) -> bool:
        return any(name.encode() in self._database for name in names)

    def record(self, request_id: str) -> dict[str, str] | None:
        found = self._value(keys.request(request_id))
        if found is None:
            return None
        return {name.decode(): value.decode() for name, value in found.getall().items() if name != b"job"}

    def entries(self, request_id: str, num_known: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Those of a stream after the first `num_known`."""
        found = self._value(keys.out(request_id))
        if found is None:
            return []
        return [(entry, dict(zip(pairs[::2], pairs[1::2], strict=True))) for entry, pairs in [*found][num_known:]]

    def members(self, key: str) -> set[str]:
        found = self._value(key)
        return set() if found is None else {raw.decode() for raw in found}

    def score(self, key: str, member: str) -> float | None:
        found = self._value(key)
        return None if found is None else found.get(member.encode())

    def eternal(self) -> set[str]:
        return {key.decode() for key in self._database if self._database[key].expireat is None}

    def ttl_ms(self, key: str) -> float:
        return 1000 * float(self._database[key.encode()].expireat - self._database.time)
