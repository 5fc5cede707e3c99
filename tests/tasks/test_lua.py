"""Calling scripts on a server that forgets them at any moment."""

from __future__ import annotations

from typing import Any

from tasks.lua import Scripts
from tests.conftest import RedisServer


def test_a_server_that_forgets_scripts_again_and_again_still_runs_them(redis_server: RedisServer) -> None:
    redis: Any = redis_server.connect()

    class Forgetting:
        """Every call finds a server that has just forgotten everything."""

        def evalsha(self, *args: Any) -> Any:
            redis.script_flush()
            return redis.evalsha(*args)

        def __getattr__(self, name: str) -> Any:
            return getattr(redis, name)

    scripts = Scripts(Forgetting())  # type: ignore[arg-type]
    assert scripts.call("leave", 1, "w1", "m") == 1
    assert scripts.call("peers", 1, "w1", "m") == -1
