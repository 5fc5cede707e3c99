"""Dramatiq as we use it: a broker on its own database, no middleware, messages of (request id, attempt) in orjson.

Owns the message type and the broker. Refuses to know what a request is. Re-assignment, deadlines and metrics are
ours (`tasks.protocol.record`, `bridge`), so Dramatiq's middleware for them stays out; nothing here is global.
"""

from __future__ import annotations

from typing import Any

import orjson
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import DecodeError
from redis import Redis

from tasks.protocol import keys

ACTOR_NAME = "generate"
DEAD_MESSAGE_TTL_MS = 3_600_000
BROKER_TIMEOUT_MS = 60_000


class AssignmentMessage(Message[None]):
    """A Dramatiq message that says which assignment is on offer, nothing more."""

    def encode(self) -> bytes:
        return orjson.dumps(self.asdict())

    @classmethod
    def decode(cls, data: bytes) -> AssignmentMessage:
        """Raises DecodeError: not a message of this actor with a request id and an attempt."""
        try:
            fields = orjson.loads(data)
            request_id, attempt = fields["args"]
            if not isinstance(request_id, str) or type(attempt) is not int or fields["actor_name"] != ACTOR_NAME:
                raise ValueError("not an assignment")
            return cls(**{**fields, "args": (request_id, attempt)})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DecodeError(f"not an assignment message: {error}", data, error) from error  # type: ignore[no-untyped-call]


class AssignmentBroker(RedisBroker):
    """RedisBroker without its one global trick (probing the Lua stack by overflowing it)."""

    _max_unpack_size_val: Any = 1000


def build_broker(client: Redis) -> RedisBroker:
    """A broker over `client` (`connect(url, use="queue")`). Build it after a fork, one for each process."""
    return AssignmentBroker(  # type: ignore[no-untyped-call]
        client=client,
        middleware=[],
        namespace=keys.QUEUE_NAMESPACE,
        heartbeat_timeout=BROKER_TIMEOUT_MS,
        dead_message_ttl=DEAD_MESSAGE_TTL_MS,
    )


def assignment_message(queue: str, request_id: str, attempt: int) -> Message[Any]:
    return AssignmentMessage(
        queue_name=queue, actor_name=ACTOR_NAME, args=(request_id, attempt), kwargs={}, options={}
    )
