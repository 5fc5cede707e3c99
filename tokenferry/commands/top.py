"""`tokenferry top`: the live picture of a cell in a terminal, once a second.

Owns how it looks, and the rates, which take two looks. Refuses to know where it comes from (`tasks.observe.live`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from redis.exceptions import RedisError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tasks.observe.live import LiveRequest, LiveWorker, Overview
from tasks.process.crashes import told
from tokenferry.errors import ForPeople
from tokenferry.shown import bar, print_json, spelled_duration

EVERY_S = 1.0
MAX_SHOWN = 30
MAX_CRASHES = 3
WIDE = 120
"""Columns of a terminal that has room for everything."""
MIN_ID = 13

Look = Callable[[], Overview]


def tokens_per_s(before: Overview | None, now: Overview) -> dict[str, float]:
    """Output tokens a second by request, of those that are in both looks; empty without a look before."""
    if before is None or now.at_ms <= before.at_ms:
        return {}
    known = {request.request_id: request.num_tokens for request in before.requests}
    seconds = (now.at_ms - before.at_ms) / 1000
    return {
        request.request_id: (request.num_tokens - known[request.request_id]) / seconds
        for request in now.requests
        if request.request_id in known
    }


def as_record(now: Overview, before: Overview | None = None) -> dict[str, Any]:
    """The picture for programs."""
    rates = tokens_per_s(before, now)
    return {
        "at_ms": now.at_ms,
        "num_running": now.num_running,
        "num_waiting": sum(queue.num_waiting for queue in now.queues),
        "tokens_per_s": round(sum(rates.values()), 1) if before is not None else None,
        "workers": [
            {**asdict(one.info), **asdict(one.load), "is_live": one.is_live, "num_held": one.num_held}
            for one in now.workers
        ],
        "queues": [asdict(queue) for queue in now.queues],
        "requests": [asdict(request) for request in now.requests],
        "crashes": [asdict(crashes) for crashes in now.crashes],
    }


def picture(now: Overview, before: Overview | None = None, width: int = WIDE) -> RenderableType:
    """The screen. On a narrow one, less matters more."""
    rates = tokens_per_s(before, now)
    parts: list[RenderableType] = [_head(now, before, rates), Text(), _workers(now, width >= WIDE)]
    if any(queue.num_waiting for queue in now.queues):
        parts += [Text(), _queues(now)]
    if now.requests:
        parts += [Text(), _requests(now, rates, width)]
        if (num_more := now.num_running + _num_waiting(now) - min(len(now.requests), MAX_SHOWN)) > 0:
            parts.append(Text(f"and {num_more} more", style="dim"))
    return Group(*parts)


def _num_waiting(now: Overview) -> int:
    return sum(queue.num_waiting for queue in now.queues)


def _head(now: Overview, before: Overview | None, rates: Mapping[str, float]) -> Text:
    num_live = sum(worker.is_live for worker in now.workers)
    clock = time.strftime("%H:%M:%S", time.localtime(now.at_ms / 1000))
    rate = f", {sum(rates.values()):,.0f} tokens/s" if before is not None else ""
    text = f"tokenferry  {clock}  {num_live} workers, {now.num_running} running, {_num_waiting(now)} waiting{rate}"
    head = Text(text, style="bold")
    if num_live == 0:
        head.append("\nno worker is live: requests are refused until one is (`tokenferry doctor` says more)", "red")
    if now.num_strange_workers:
        head.append(f"\n{now.num_strange_workers} workers of another version are not shown", "yellow")
    for crashes in now.crashes[:MAX_CRASHES]:
        head.append(f"\n{told(crashes, now.at_ms)}", "yellow")
    return head


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in columns:
        if name:
            table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left", no_wrap=True)
    return table


def _workers(now: Overview, is_wide: bool) -> Table:
    waiting = ">waiting" if is_wide else ""
    table = _table("worker", "device", "model", ">running", waiting, "KV cache", ">last step")
    for worker in now.workers:
        load = worker.load
        share = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        table.add_row(
            worker.info.worker,
            worker.info.device,
            f"{worker.info.model} ({worker.info.variant})" if is_wide else worker.info.model,
            f"{load.num_running}/{worker.info.max_num_seqs}",
            *([str(load.num_waiting)] if is_wide else []),
            f"{_bar(share, is_wide)}{share:4.0%}",
            _last_step(now, worker),
            style="" if worker.is_live else "red",
        )
    return table


def _last_step(now: Overview, worker: LiveWorker) -> str:
    if not worker.is_live:
        return "lease is over"
    if not worker.load.last_step_ms:
        return "none yet"
    return spelled_duration(max(0, now.at_ms - worker.load.last_step_ms))


def _queues(now: Overview) -> Table:
    table = _table("queue", "class", ">waiting", ">oldest")
    for queue in now.queues:
        if queue.num_waiting:
            oldest = spelled_duration(max(0, now.at_ms - queue.oldest_ms))
            table.add_row(queue.model, queue.priority, str(queue.num_waiting), oldest)
    return table


def _requests(now: Overview, rates: Mapping[str, float], width: int) -> Table:
    is_wide = width >= WIDE
    more = (">attempt", ">prompt") if is_wide else ("", "")
    table = _table("request", "state", "worker", more[0], ">age", more[1], "output", ">tokens/s")
    room = 1000 if is_wide else max(MIN_ID, width - 66)  # the other columns are no wider
    for request in now.requests[:MAX_SHOWN]:
        rate = rates.get(request.request_id)
        table.add_row(
            _cut(request.request_id, room),
            request.state,
            request.worker,
            *([str(request.attempt)] if is_wide else []),
            spelled_duration(max(0, now.at_ms - request.submitted_ms)),
            *([_prompt(request)] if is_wide else []),
            _progress(request, is_wide),
            "" if rate is None or request.state != "streaming" else f"{rate:.0f}",
        )
    return table


def _prompt(request: LiveRequest) -> str:
    return "" if request.num_prompt_tokens is None else str(request.num_prompt_tokens)


def _progress(request: LiveRequest, is_wide: bool) -> str:
    if not request.max_tokens:
        return f"{request.num_tokens}"
    return f"{_bar(request.num_tokens / request.max_tokens, is_wide)}{request.num_tokens}/{request.max_tokens}"


def _bar(share: float, is_wide: bool) -> str:
    return f"▕{bar(share, 16 if is_wide else 8)}▏"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def show_top(
    look: Look,
    *,
    once: bool,
    as_json: bool,
    console: Console | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """The command: until Ctrl-C, or one look. Where the output is no terminal, every picture follows the last."""
    console = console or Console()
    try:
        if once:
            print_json(as_record(look())) if as_json else console.print(picture(look(), width=console.width))
        elif as_json:
            _go_on(look, wait, lambda now, before: print_json(as_record(now, before), is_line=True))
        elif not console.is_terminal:
            _go_on(look, wait, lambda now, before: console.print(picture(now, before, console.width)))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                _go_on(look, wait, lambda now, before: live.update(picture(now, before, console.width), refresh=True))
    except KeyboardInterrupt:
        return 0
    except RedisError as error:
        raise ForPeople(f"Redis does not answer ({error}): `tokenferry doctor` says what to do") from error
    return 0


def _go_on(look: Look, wait: Callable[[float], None], show: Callable[[Overview, Overview | None], None]) -> None:
    before: Overview | None = None
    while True:
        now = look()
        show(now, before)
        sys.stdout.flush()
        before = now
        wait(EVERY_S)
