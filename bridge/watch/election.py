"""Which bridge process is the active one: a lease in Redis that one holds and the others wait for.

Owns the lease, and when to believe in it. Refuses to know what the active one does: its work is fenced by itself
(scripts by the attempt, the catalog by the lock on its file), so two that believe in it for a moment do no harm.
"""

from __future__ import annotations

from collections.abc import Callable

from redis import Redis

from tasks.protocol import keys

LEASE_MS = 800
RENEW_MS = 200
"""A standby asks as often as the active one renews: it takes over at most LEASE_MS + RENEW_MS after a death."""

_HOLD = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

_LET_GO = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
return 1
"""


class Election:
    """One candidate. `tick` from one thread; `is_active` from any."""

    def __init__(
        self,
        redis: Redis,
        bridge_id: str,
        *,
        lease_ms: int = LEASE_MS,
        renew_ms: int = RENEW_MS,
        monotonic_ms: Callable[[], float],
    ) -> None:
        """`monotonic_ms` is a clock that never steps: how long a lease is believed in does not depend on the date."""
        self._redis = redis
        self._bridge_id = bridge_id
        self._lease_ms = lease_ms
        self._renew_ms = renew_ms
        self._monotonic_ms = monotonic_ms
        self._believed_until_ms = float("-inf")
        self._next_ms = float("-inf")

    @property
    def is_active(self) -> bool:
        return self._monotonic_ms() < self._believed_until_ms

    def tick(self) -> None:
        """Takes or renews the lease when it is time to. Raises RedisError: the lease then runs out by itself."""
        asked_ms = self._monotonic_ms()
        if asked_ms < self._next_ms:
            return
        self._next_ms = asked_ms + self._renew_ms
        # Counted from before the question: Redis' own expiry is never earlier than ours.
        if self._redis.eval(_HOLD, 1, keys.BRIDGE, self._bridge_id, str(self._lease_ms)):
            self._believed_until_ms = asked_ms + self._lease_ms
        else:
            self._believed_until_ms = float("-inf")

    def leave(self) -> None:
        """Lets a standby take over at once. Raises RedisError."""
        self._believed_until_ms = float("-inf")
        self._redis.eval(_LET_GO, 1, keys.BRIDGE, self._bridge_id)
