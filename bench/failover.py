"""Figures of single faults: the wait when a worker dies, what clients that never read do to others, and a flood.

Owns these measurements. Refuses to choose the cell; every answer is compared with the undisturbed one all the same.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.faults.cell import FaultyCell
from tests.faults.client import HOST, Ask, Asking, Seen, ask, body_of, request_bytes
from tests.faults.driver import gap_after
from tests.faults.oracle import MAX_TOKENS, story
from tokenferry.errors import ForPeople

LONG_PROMPT = "and so on " * 150
MAX_CALM_TRIES = 20
GREEDY: tuple[tuple[str, Any], ...] = (("temperature", 0),)
SAMPLED: tuple[tuple[str, Any], ...] = (("temperature", 0.9), ("seed", 11), ("frequency_penalty", 0.4))


def streams_of(contents: Sequence[str], max_tokens: int) -> list[Ask]:
    """Four streams of four kinds."""
    greedy, sampled, several, stopped = contents
    return [
        Ask(greedy, max_tokens),
        Ask(sampled, max_tokens, fields=SAMPLED),
        Ask(several, max_tokens, num_choices=2, fields=SAMPLED),
        Ask(stopped, max_tokens, stop=("never there",)),
    ]


NUM_STREAMS = 4


@dataclass(slots=True)
class Gaps:
    """From the kill to the next token at the client, of every stream that the dead worker had."""

    what: str
    seconds: list[float] = field(default_factory=list)
    num_kills: int = 0
    num_wrong: int = 0
    """Answers with another text than the undisturbed ones, or that ended cleanly before it was complete."""
    failed: Counter[str] = field(default_factory=Counter)
    """Answers that ended with an error that the client was told, by its code: a promise broken, but no wrong text."""


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank; NaN of nothing."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else math.nan


async def measure_failover(
    cell: FaultyCell,
    what: str,
    num_kills: int,
    rng: random.Random,
    *,
    whole: bool = False,
    before_first_token: bool = False,
    max_tokens: int = MAX_TOKENS,
    fields: tuple[tuple[str, Any], ...] = (),
) -> Gaps:
    """Kill the engine process, or the `whole` worker, that answers, again and again."""
    gaps = Gaps(what)
    for number in range(num_kills):
        base = story(rng.randrange(1000))
        contents = [f"{base}{LONG_PROMPT if before_first_token else ''}{number}.{n}" for n in range(NUM_STREAMS)]
        asks = streams_of(contents, max_tokens)
        if fields:
            asks = [Ask(content, max_tokens, fields=fields) for content in contents]
        asking = [Asking(cell.port, one, model=cell.model) for one in asks]
        victim = await _moment(cell, asking[0], before_first_token, rng.randrange(2, max(3, max_tokens // 2)))
        found = await asyncio.to_thread(_holder, cell, victim)
        if found is None:
            await asyncio.gather(*(one.end() for one in asking))
            continue
        name, pid, held = found
        killed_s = time.monotonic()
        if whole:
            cell.kill(name)
        else:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        gaps.num_kills += 1
        done = [await one.end() for one in asking]
        for seen in done:
            if seen.request_id in held and (gap_s := gap_after(seen, killed_s)) is not None:
                gaps.seconds.append(gap_s)
        if not whole:  # a fresh supervisor, whose pause has not grown
            cell.kill(name)
        cell.replace(name)
        await asyncio.to_thread(cell.wait_complete, 180)
        # Undisturbed, and later: a prompt that is in the prefix cache has no time before its first token.
        calm = await asyncio.gather(*(_undisturbed(cell, one) for one in asks))
        for undisturbed, seen in zip(calm, done, strict=True):
            _judge(gaps, seen, undisturbed)
    return gaps


async def _undisturbed(cell: FaultyCell, wanted: Ask) -> Seen:
    """A complete answer. A busy machine may refuse one: when no worker had a processor for the length of a lease."""
    for _ in range(MAX_CALM_TRIES):
        seen = await ask(cell.port, wanted, model=cell.model)
        if seen.end == "done":
            return seen
        print(f"  undisturbed: {seen.end} {seen.status} {seen.error_code}, again", flush=True)
        await asyncio.sleep(0.5)
    raise ForPeople(f"not answered even without a fault: {seen}")


def _judge(gaps: Gaps, seen: Seen, undisturbed: Seen) -> None:
    if seen.end != "done":
        gaps.failed[f"{seen.end} {seen.error_code}".strip()] += 1
        print(f"  FAILED: {seen}", flush=True)
    is_beginning = all(undisturbed.texts.get(number, "").startswith(text) for number, text in seen.texts.items())
    if not is_beginning or (seen.end == "done" and seen.texts != undisturbed.texts):
        gaps.num_wrong += 1
        print(f"  WRONG: {seen}\n  undisturbed: {undisturbed}", flush=True)


async def _moment(cell: FaultyCell, asking: Asking, before_first_token: bool, num_events: int) -> str:
    """Wait for the moment of the kill; the id of the request whose worker is the victim."""
    if not before_first_token:
        return (await asking.events(num_events)).request_id
    while not (ids := await asyncio.to_thread(_claimed, cell)):  # noqa: ASYNC110 (we look on)
        await asyncio.sleep(0.002)
    return ids[0]


def _claimed(cell: FaultyCell) -> list[str]:
    held = [id_ for info in cell.workers() for id_, _ in cell.records.held(info.worker)]
    return [id_ for id_ in held if (state := cell.records.state(id_)) and state.state == "claimed"]


def _holder(cell: FaultyCell, request_id: str) -> tuple[str, int, set[str]] | None:
    """The process under which the engine runs that has this request, the engine's id, and all that it holds."""
    worker = cell.worker_of(request_id)
    for name in cell.worker_names:
        info = cell.engine_of(name)
        if info is not None and info.worker == worker:
            return name, info.pid, {id_ for id_, _ in cell.records.held(worker)}
    return None


async def measure_neighbours(cell: FaultyCell, num_others: int, read: bool) -> list[float]:
    """Inter-token times of four streams beside `num_others` long ones, which are read, or never."""
    deaf: list[socket.socket] = []
    readers = []
    for number in range(num_others):
        wanted = Ask(story(number), 8 * MAX_TOKENS)
        if read:
            readers.append(Asking(cell.port, wanted))
        else:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((HOST, cell.port))
            sock.sendall(request_bytes("POST", "/v1/chat/completions", body_of(wanted, cell.model)))
            deaf.append(sock)
    await asyncio.sleep(1)
    done: list[Seen] = []
    for _ in range(2):
        done += await asyncio.gather(*(ask(cell.port, Ask(story(number), MAX_TOKENS)) for number in range(4)))
    for sock in deaf:
        sock.close()
    await asyncio.gather(*(one.leave() for one in readers))
    await asyncio.to_thread(cell.wait_quiet)
    return [b - a for seen in done for a, b in pairwise(seen.arrivals_s)]


def memory_kb(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found.group(1)) if found else 0


def cpu_s(pid: int) -> float:
    """What a process has used of the processors."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure_refusals(cell: FaultyCell, num_waiting: int, num_asked: int) -> list[float]:
    """How long a client waits for its 429 that asks again and again while `num_waiting` requests fill the queue."""
    waiting: list[Asking] = []
    while (num_missing := num_waiting - cell.records.num_waiting(cell.model)) > 0:
        waiting += [Asking(cell.port, Ask(story(n), 8 * MAX_TOKENS)) for n in range(min(num_missing, 64))]
        await asyncio.sleep(0.3)
    refused: list[float] = []
    for _ in range(num_asked):
        seen = await ask(cell.port, Ask(story(1), 1, leave_after=1), limit_s=1.0)
        if seen.status == 429:
            refused.append(seen.answered_in_s)
    await asyncio.gather(*(one.leave() for one in waiting))
    await asyncio.to_thread(cell.wait_quiet)
    return refused


async def flood(cell: FaultyCell, num_requests: int) -> dict[str, float]:
    """Send so many requests at once; what became of them."""
    pid = cell.wait_pid_at_work("web")
    before_kb, before_cpu_s = memory_kb(pid), cpu_s(pid)
    began_s = time.monotonic()
    asking = [Asking(cell.port, Ask(story(number), 20), limit_s=120) for number in range(num_requests)]
    sent_s = time.monotonic() - began_s
    done = [await one.end() for one in asking]
    refused = [seen.answered_in_s for seen in done if seen.status == 429]
    # From the arrival of the head to the answer: without the client's own part, which shares the cores.
    inside = [int(seen.headers["openai-processing-ms"]) / 1000 for seen in done if seen.status == 429]
    finished = [seen.answered_in_s for seen in done if seen.end == "done"]
    return {
        "sent in s": sent_s,
        "finished": len(finished),
        "refused": len(refused),
        "other": num_requests - len(finished) - len(refused),
        "refused p50 s": percentile(refused, 0.5),
        "refused p99 s": percentile(refused, 0.99),
        "refused inside p50 s": percentile(inside, 0.5),
        "refused inside p99 s": percentile(inside, 0.99),
        "server cpu s": cpu_s(pid) - before_cpu_s,
        "finished max s": max(finished, default=math.nan),
        "memory kb": memory_kb(pid) - before_kb,
    }
