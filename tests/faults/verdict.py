"""Whether what a client saw, and what Redis holds about it, is what was promised.

Owns the promise: the expected text, or its beginning and then an error that the client can see; contiguous indices;
one end. Refuses to know which faults there were: the driver says which failures they excuse.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from redis import Redis

from tasks.protocol import keys
from tasks.protocol.contract import TerminalEvent, decode_entry
from tests.faults.client import Seen
from tests.faults.oracle import Answer, Oracle

Kind = Literal["lost", "repeated", "reordered", "hung", "end", "leftover"]
"""What a broken promise is counted as; "end": not exactly one end, or a wrong one."""

TERMINAL_STATES = (b"finished", b"cancelled", b"failed")


BROKEN_CODES: dict[str, Kind] = {"completion_not_found": "lost", "doubled": "repeated"}
"""What no fault explains: an accepted answer that nobody knows, and a second answer to one key."""


@dataclass(frozen=True, slots=True)
class Broken:
    """One broken promise."""

    kind: Kind
    request_id: str
    what: str


def judge_client(seen: Seen, oracle: Oracle, excused: frozenset[str]) -> Broken | None:
    """`excused`: the error codes (and "cut", a connection that broke) that the faults of the time explain."""
    ask = seen.ask
    expected = oracle.answer(ask.content, ask.max_tokens, ask.stop)
    if seen.error_code in BROKEN_CODES:
        return Broken(BROKEN_CODES[seen.error_code], seen.request_id, f"{seen.error_code}: {seen}")
    if ask.habit == "stop" and seen.error_code == "stopped":
        return None
    if seen.end in ("cut", "error", "refused") and ask.habit in ("resume", "background") and seen.last_id:
        return Broken("lost", seen.request_id, f"came back in vain: {seen.end} {seen.error_code}")
    if seen.end == "hung":
        return Broken("hung", seen.request_id, f"no end within its time, {len(seen.text)} characters came: {ask}")
    for text in seen.texts.values():
        if not expected.text.startswith(text):
            return Broken(_kind_of(expected.text, text), seen.request_id, f"{text!r}, not {expected.text!r}")
    match seen.end:
        case "done":
            for number in range(ask.num_choices):
                if (text := seen.texts.get(number, "")) != expected.text:
                    return Broken("lost", seen.request_id, f"ended cleanly after {text!r}, of {expected.text!r}")
                # One that comes back after the finish is told it once more.
                reasons = seen.finish_reasons.get(number, [])
                if ask.habit == "resume":
                    reasons = sorted(set(reasons))
                if reasons != [expected.finish_reason] or not seen.is_marked_done:
                    return Broken("end", seen.request_id, f"{seen.finish_reasons}, not {expected.finish_reason}")
        case "error" | "refused":
            if seen.error_code not in excused:
                return Broken(
                    "end",
                    seen.request_id,
                    f"{seen.end} {seen.status} {seen.error_code} for no reason: web {seen.web}, {ask}",
                )
        case "cut" | "unreached":
            if "cut" not in excused:
                return Broken("end", seen.request_id, "the connection broke for no reason")
        case _:
            pass
    fault = _index_fault(seen, expected)
    return Broken("reordered", seen.request_id, fault) if fault else None


def judge_record(redis: Redis, request_id: str, content: str, oracle: Oracle) -> Broken | None:
    """The stream of an accepted request: the oracle's tokens in order, one end.

    One without a record passes, and one that was given up before it arrived: it has no attempt, and no stream.
    """
    raw: Any = redis.xrange(keys.out(request_id))
    state, attempt = redis.hmget(keys.request(request_id), "state", "attempt")
    if state is None or (attempt == b"0" and not raw):
        return None
    if state not in TERMINAL_STATES:
        return Broken("end", request_id, f"is still {state.decode()}")
    tokens: list[int] = []
    num_ends = 0
    for entry, fields in raw:
        event = decode_entry(entry, fields)
        if event.index != len(tokens):
            return Broken("reordered", request_id, f"{event} at index {len(tokens)}")
        if num_ends:
            return Broken("end", request_id, f"{event} after the end")
        if isinstance(event, TerminalEvent):
            num_ends += 1
        else:
            tokens.extend(event.token_ids)
    known = oracle.token_ids(content)
    if tuple(tokens) != known[: len(tokens)]:
        return Broken("reordered", request_id, f"{tokens}, not {known[: len(tokens)]}")
    if num_ends != 1:
        return Broken("end", request_id, f"has {num_ends} ends")
    return None


def _index_fault(seen: Seen, answer: Answer) -> str:
    """The id of an event is the index of the last token whose text is in it or before it."""
    if seen.ask.stop:  # text may be held back then
        return ""
    num_texts = answer.text.count(">")
    for event_id, num_characters in seen.ids:
        for number, index in enumerate(map(int, event_id.split(","))):
            num_seen = seen.texts.get(number, "").count(">", 0, num_characters.get(number, 0))
            # Where the text is complete, the EOS token (which has no text) and the finish may be counted too.
            is_known_end = num_seen == num_texts and num_seen <= index + 1 <= len(answer.token_ids) + 1
            if index + 1 != num_seen and not is_known_end:
                return f"choice {number}: event {event_id} completes token {num_seen - 1}"
    return ""


def _kind_of(expected: str, text: str) -> Kind:
    wanted, got = _tokens(expected), _tokens(text)
    if len(got) > len(wanted) or any(a == b for a, b in pairwise(got)):
        return "repeated"
    return "lost" if set(got) <= set(wanted) and got == sorted(got, key=wanted.index) else "reordered"


def _tokens(text: str) -> Sequence[str]:
    return re.findall(r"\d+", text)
