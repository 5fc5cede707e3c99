"""What a reader may have seen of a request: its own stream, and after it what only the log of its worker has."""

from __future__ import annotations

from typing import Any

from redis import Redis

from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, decode_entry, unpack_step


def visible_tokens(redis: Redis, request_id: str) -> list[int]:
    """From index 0, without a gap."""
    tokens: list[int] = []
    # The log first: what is flushed in between is in the own stream then.
    raw: Any = redis.hmget(keys.request(request_id), "worker", "slot")
    worker, slot = (value or b"" for value in raw)
    log: Any = redis.xrange(keys.steps(worker.decode())) if slot else []
    own: Any = redis.xrange(keys.out(request_id))
    for entry, fields in own:
        event = decode_entry(entry, fields)
        if not isinstance(event, TerminalEvent):
            assert event.index == len(tokens), f"{event} at {len(tokens)}"
            tokens += event.token_ids
    for _, fields in log:
        for number, index, token_id in unpack_step(fields[b"s"]):
            if number == int.from_bytes(slot, "little") and index == len(tokens):
                tokens.append(token_id)
    return tokens


def has_ended(redis: Redis, request_id: str) -> bool:
    last: Any = redis.xrevrange(keys.out(request_id), count=1)
    return bool(last) and b"e" in last[0][1]
