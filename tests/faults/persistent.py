"""Clients that come back: for the rest of a stream, with the same key, to stop, or for what was done meanwhile.

Owns these habits, as `Ask.habit` names them. Refuses to judge what comes of them, except that they notice when the
server says of a known answer that it does not exist (`unknown`), or makes a second one of one key (`doubled`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from tests.faults.client import Ask, Seen, ask, body_of, exchange, request_bytes

PATH = "/v1/chat/completions"
PAUSE_S = 0.15
FINAL = frozenset({"poison", "no_worker", "first_token_deadline", "completion_not_found"})
"""Errors after which coming back is of no use."""


async def ask_with_habit(ports: Sequence[int], web: int, wanted: Ask, rng: random.Random, *, limit_s: float) -> Seen:
    """One request of a client with that habit, at the web process `web` first and at any one later."""
    match wanted.habit:
        case "resume":
            return await _resume(ports, web, wanted, rng, limit_s)
        case "retry":
            return await _retry(ports, web, wanted, rng, limit_s)
        case "stop":
            return await _stop(ports, web, wanted, rng, limit_s)
        case "background":
            return await _background(ports, web, wanted, rng, limit_s)
        case _:
            return await ask(ports[web], wanted, web=web, limit_s=limit_s)


async def _resume(ports: Sequence[int], web: int, wanted: Ask, rng: random.Random, limit_s: float) -> Seen:
    """Leave, or be cut off, and read on from the last event, as often as it takes."""
    began_s = time.monotonic()
    seen = await ask(ports[web], replace(wanted, headers=(("x-disconnect", "continue"),)), web=web, limit_s=limit_s)
    seen.ask, request_id = replace(wanted, leave_after=None), seen.request_id
    while seen.last_id and _is_open(seen) and time.monotonic() - began_s < limit_s:
        await asyncio.sleep(PAUSE_S * rng.random())
        target = f"{PATH}/{request_id}?stream=true&starting_after={seen.last_id}"
        await exchange(rng.choice(ports), request_bytes("GET", target), seen, limit_s)
        seen.request_id = request_id
    return _over(seen, began_s)


async def _retry(ports: Sequence[int], web: int, wanted: Ask, rng: random.Random, limit_s: float) -> Seen:
    """Ask again with the same key, as the openai client does after an error.

    It has to be the same answer, unless that has failed, or was given up: then it is another one from there on.
    """
    began_s = time.monotonic()
    keyed = replace(wanted, headers=(("idempotency-key", f"key-{rng.getrandbits(64):x}"),), leave_after=None)
    seen = await ask(ports[web], replace(keyed, leave_after=wanted.leave_after), web=web, limit_s=limit_s)
    known = ""
    while True:
        if seen.status == 200:  # a refusal names an id, too: of an answer that there may never be
            is_replay = seen.headers.get("x-idempotent-replay") == "true"
            if is_replay and known not in ("", seen.request_id) and await _stands(ports, known, rng):
                seen.error_code = "doubled"
            known = seen.request_id
        if not _is_open(seen) or time.monotonic() - began_s >= min(limit_s, 8.0):
            break
        await asyncio.sleep(PAUSE_S * rng.random())
        seen = await ask(ports[web := rng.randrange(len(ports))], keyed, web=web, limit_s=limit_s)
    seen.ask = keyed
    return _over(seen, began_s)


async def _stands(ports: Sequence[int], request_id: str, rng: random.Random) -> bool:
    """Whether this answer has neither failed nor been given up, so that its key has to lead to it.

    Yes, too, when no web process says anything for ten seconds.
    """
    asked_s, looked = time.monotonic(), Seen(Ask("", 0), 0)
    while time.monotonic() - asked_s < 10.0:
        await exchange(rng.choice(ports), request_bytes("GET", f"{PATH}/{request_id}"), looked, limit_s=5.0)
        if looked.status in (200, 404):
            return looked.status == 200 and looked.end in ("done", "left")
        await asyncio.sleep(PAUSE_S)
    return True


async def _stop(ports: Sequence[int], web: int, wanted: Ask, rng: random.Random, limit_s: float) -> Seen:
    """Stop the answer on the way, from another connection."""
    seen = Seen(wanted, web)
    asking = asyncio.ensure_future(ask(ports[web], wanted, web=web, limit_s=limit_s, into=seen))
    for _ in range(rng.randrange(1, 200)):
        if asking.done():
            break
        await asyncio.sleep(0.005)
    if seen.request_id and not asking.done():
        other = Seen(wanted, web)
        stop = request_bytes("POST", f"{PATH}/{seen.request_id}/cancel")
        await exchange(rng.choice(ports), stop, other, limit_s)
    return await asking


async def _background(ports: Sequence[int], web: int, wanted: Ask, rng: random.Random, limit_s: float) -> Seen:
    """Ask, go away at once, and look later whether it is done."""
    began_s = time.monotonic()
    asked = replace(wanted, fields=(("background", True),), leave_after=None)
    seen = Seen(asked, web)
    request = request_bytes("POST", PATH, body_of(asked, "scripted"))
    await exchange(ports[web], request, seen, limit_s)
    request_id = seen.request_id if seen.end == "left" else ""
    while request_id and _is_open(seen) and time.monotonic() - began_s < limit_s:
        await asyncio.sleep(PAUSE_S)
        await exchange(rng.choice(ports), request_bytes("GET", f"{PATH}/{request_id}"), seen, limit_s)
        seen.request_id = request_id
    return _over(seen, began_s)


def _is_open(seen: Seen) -> bool:
    """Whether it may help to come back."""
    if seen.end in ("left", "cut", "unreached", "hung"):
        return True
    return seen.end in ("error", "refused") and seen.error_code not in FINAL


def _over(seen: Seen, began_s: float) -> Seen:
    seen.began_s = began_s
    return seen
