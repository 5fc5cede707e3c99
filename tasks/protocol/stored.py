"""Stored answers: what is kept of finished requests for longer than a stream, and the index in which it is found.

Owns the calls about them. The script that ends a request which was submitted with `Storing` puts it there. Refuses to
know what is in an answer. Every method may be called again after an error whose outcome is unknown.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from redis import Redis

from tasks.protocol import keys
from tasks.protocol.lua import Scripts

DELETED_MS = 600_000
"""How long the place of a deleted answer is known, to those who go through a list while they delete."""

Deletion = Literal["deleted", "open", "unknown"]
"""open: the request is not over, and nothing was deleted."""


class StoredAnswers:
    """Blocking. Raises redis.exceptions.RedisError."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis: Any = redis
        self._scripts = scripts

    def page(self, owner: str, after: str, *, newest_first: bool, count: int) -> list[tuple[str, bytes]] | None:
        """At most `count` ids of finished answers, by the time of their submit, with what was submitted as `answer`:
        empty if its time is over. They begin after the id `after`; None if its place is not known."""
        reply = self._scripts.call("stored", None, keys.stored(owner), after, int(newest_first), count)
        return None if reply is None else [(request_id.decode(), answer) for request_id, answer in reply]

    def messages(self, request_id: str) -> bytes | None:
        """What was submitted in `Storing`; None when it is unknown, or its time is over."""
        raw: bytes | None = self._redis.hget(keys.request(request_id), "input")
        return raw

    def amend(self, request_id: str, answer: bytes) -> bool:
        """Replace what was submitted as `answer`. False when there is no such record (any more)."""
        return bool(self._scripts.call("amend", None, request_id, answer))

    def delete(self, request_id: str, owner: str) -> Deletion:
        """Take away all that there is of an answer that is over. Whoever still reads it loses it."""
        reply = self._scripts.call("delete", None, request_id, keys.stored(owner), DELETED_MS).decode()
        assert reply in get_args(Deletion)
        return reply  # type: ignore[no-any-return]
