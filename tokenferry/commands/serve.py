"""`tokenferry serve`: everything on this machine, from a name to a line that can be pasted.

Owns the order at start: settings, model, preflight, port, processes, readiness. How the processes are kept running
and ended is in `tokenferry.cell.served`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType

from rich.console import Console
from rich.table import Table

from decode.native.build import COMPILERS
from tasks.process.logs import PROCESS_NAME, log_to_stderr
from tokenferry.cell.plan import Plan, is_ready, make_plan, require_free_port
from tokenferry.cell.served import Served


def serve(environ: Mapping[str, str], *, num_web: int = 1) -> int:
    """Run the whole group until SIGINT or SIGTERM. Returns the exit status."""
    console = Console()
    plan = make_plan(environ)
    for number in range(num_web):
        require_free_port(plan.web.host, plan.web.port + number)
    print_plan(plan, console)
    log_to_stderr(plan.web.log_level, plan.web.log_format, {PROCESS_NAME: "serve"})
    served = Served(plan, environ, num_web, sys.stdout)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()
        served.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    threading.Thread(target=_announce, args=(plan, stopping, console), daemon=True).start()
    status = served.run()
    stopping.set()
    return status


def _announce(plan: Plan, stopping: threading.Event, console: Console) -> None:
    """Say where it serves, as soon as it does."""
    started_s = time.monotonic()
    while not is_ready(plan.web.host, plan.web.port):
        if stopping.wait(0.2):
            return
    with contextlib.suppress(OSError):  # nobody reads any more
        print_ready(plan.origin, plan.model, time.monotonic() - started_s, console)


def print_plan(plan: Plan, console: Console) -> None:
    """The start-up summary: what runs where, with what, and how big."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    worker = plan.worker
    table.add_row("model", plan.model + (f"  ({plan.checkpoint})" if plan.checkpoint else "  (no weights)"))
    if plan.checkpoint:
        table.add_row("variant", variant_and_why(worker.variant, worker.device))
    capacity = f"{worker.kv_cache_tokens:,} tokens a worker (KV_CACHE_TOKENS)"
    table.add_row("KV cache", f"{capacity}, {worker.max_num_seqs} sequences at once (MAX_NUM_SEQS)")
    table.add_row("workers", f"{plan.num_workers}, about {plan.memory_mb:,} MB each")
    where = f"embedded Valkey, data in {plan.data_dir}" if plan.own_redis else "from REDIS_URL"
    table.add_row("Redis", where)
    table.add_row("address", f"{plan.origin}/v1")
    console.print(table, highlight=False)


def variant_and_why(variant: str, device: str) -> str:
    """What `auto` comes to, by the rule of `decode.factory`; whether the native code compiles is seen in the log."""
    if variant != "auto":
        return f"{variant} on {device} (VARIANT)"
    if device != "cpu":
        return f"bf16 on {device} (auto: native code is for processors)"
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    if compiler is None:
        return "bf16 on cpu (auto: there is no C++ compiler for q4, which is several times faster)"
    return f"q4 on cpu (auto: {compiler} is here to compile it)"


def print_ready(origin: str, model: str, seconds: float, console: Console) -> None:
    """The address, and a request to paste into a shell."""
    message = {"role": "user", "content": "Why is the sea salt?"}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 100})
    curl = f"curl {origin}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"
    console.print(f"\nServing at {origin}/v1 after {seconds:.1f} s. Try:\n\n  {curl}\n", soft_wrap=True, markup=False)


def serve_one_process(environ: Mapping[str, str]) -> int:
    """Web, worker and bridge in this process, over an in-memory Redis; until SIGINT or SIGTERM."""
    from tokenferry.cell.one_process import open_server

    console = Console()
    plan = make_plan(environ)
    require_free_port(plan.web.host, plan.web.port)
    print_plan(plan, console)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.set())
    started_s = time.monotonic()
    with open_server(environ=environ, host=plan.web.host, port=plan.web.port) as server:
        print_ready(server.origin, plan.model, time.monotonic() - started_s, console)
        stop.wait()
    return 0
