"""`tokenferry demo`: the product without a model. Two scripted workers behind one HTTP listener, shown live.

Owns the story: who is there, which worker answers, what a second identical prompt saves, and what a client sees when
a worker is killed in the middle of an answer. Refuses to know how any of it works: it is an `openai` client, and it
looks at the request's record for the worker. No weights, no torch.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI
from openai.types.chat import ChatCompletionChunk
from rich.console import Console
from rich.table import Table

from tokenferry.cell.group import Cell
from tokenferry.cell.valkey import MAX_SOCKET_PATH
from tokenferry.errors import ForPeople

MODEL = "scripted"
NUM_WORKERS = 2
NUM_TOKENS = 24
KILL_AFTER_TOKENS = 8
PROMPT = "Two workers share a queue, and neither may lose a word of this."


@dataclass(slots=True)
class Answer:
    """What a client saw of one streamed answer, and which workers had it."""

    text: str
    workers: list[str]
    """In order; the last one finished it."""
    num_cached_tokens: int
    longest_gap_s: float


def run(folder: Path | None = None, console: Console | None = None) -> int:
    """The command. `folder` keeps the logs and the data; by default they are gone at the end."""
    console = console or Console()
    if folder is not None:
        return _show(folder, console)
    with tempfile.TemporaryDirectory(prefix="tokenferry-", dir=_short_temporary_dir()) as temporary:
        return _show(Path(temporary), console)


def _show(folder: Path, console: Console) -> int:
    started_s = time.monotonic()
    with Cell(folder, model=MODEL, num_workers=NUM_WORKERS, environ={"SCRIPTED_STEP_MS": "10"}) as cell:
        print_status(cell, console, time.monotonic() - started_s)
        client = OpenAI(base_url=cell.base_url, api_key="local", max_retries=0, timeout=30)
        first = tell(cell, client, console, "The first time")
        # Two workers: of three identical prompts, one has to meet a worker that has seen it before.
        repeats = [tell(cell, client, console, "The same again") for _ in range(NUM_WORKERS)]
        console.print("\nNow the worker is killed in the middle of its answer:", style="bold")
        moved = tell(cell, client, console, "With a kill -9", kill=True)
    return judge(first, repeats, moved, console)


def print_status(cell: Cell, console: Console, seconds: float) -> None:
    table = Table(
        "worker", "process", "model", "fingerprint", "device", box=None, header_style="bold", pad_edge=False
    )
    for info in sorted(cell.workers(), key=lambda info: info.worker):
        table.add_row(info.worker, str(info.pid), info.model, info.fingerprint, info.device)
    console.print(
        f"{cell.base_url} is ready after {seconds:.1f} s, with {cell.num_workers} workers:", highlight=False
    )
    console.print(table, highlight=False)


def tell(cell: Cell, client: OpenAI, console: Console, title: str, *, kill: bool = False) -> Answer:
    """Stream one answer to the console."""
    console.print(f"\n{title}: {PROMPT}", style="dim", highlight=False)
    answer = ask(cell, client, console, kill=kill)
    console.print(
        f"\nworker {' -> '.join(answer.workers)}, {answer.num_cached_tokens} cached tokens, "
        f"longest pause {answer.longest_gap_s * 1000:.0f} ms",
        highlight=False,
    )
    return answer


def ask(cell: Cell, client: OpenAI, console: Console, *, kill: bool) -> Answer:
    answer = Answer("", [], 0, 0.0)
    request_id = ""
    last_s = time.monotonic()
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        request_id = chunk.id
        if text := text_of(chunk):
            now_s = time.monotonic()
            answer.longest_gap_s = max(answer.longest_gap_s, now_s - last_s) if answer.text else 0.0
            last_s = now_s
            answer.text += text
            console.out(text, end="", highlight=False)
            if kill and not answer.workers and answer.text.count("<") >= KILL_AFTER_TOKENS:
                answer.workers.append(kill_worker_of(cell, request_id))
                console.out(" [killed] ", end="", highlight=False)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            answer.num_cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
    answer.workers.append(worker_of(cell, request_id))
    return answer


def text_of(chunk: ChatCompletionChunk) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def worker_of(cell: Cell, request_id: str) -> str:
    """Which worker has, or had, this request."""
    state = cell.records.state(request_id)
    return state.worker if state is not None else ""


def kill_worker_of(cell: Cell, request_id: str) -> str:
    """SIGKILL, in mid-sentence. Returns the worker's id."""
    worker = worker_of(cell, request_id)
    for info in cell.workers():
        if info.worker == worker:
            os.kill(info.pid, signal.SIGKILL)
    return worker


def judge(first: Answer, repeats: list[Answer], moved: Answer, console: Console) -> int:
    """Say whether everything was as promised. Returns the exit status."""
    checks = {
        "the same prompt gave the same text every time": all(repeat.text == first.text for repeat in repeats),
        "a worker that knew the prompt restored it from its cache": any(
            repeat.num_cached_tokens for repeat in repeats
        ),
        "a killed worker changed not one token": moved.text == first.text and len(moved.workers) == 2,
        "another worker went on": len(set(moved.workers)) == 2,
    }
    console.print()
    for what, passed in checks.items():
        console.print(f"{'yes' if passed else 'NO '}  {what}", style="green" if passed else "red", highlight=False)
    return 0 if all(checks.values()) else 1


def _short_temporary_dir() -> str | None:
    """A place for temporary folders whose path leaves room for a socket; None: the default has room."""
    if len(tempfile.gettempdir()) < MAX_SOCKET_PATH - 50:
        return None
    if not os.path.isdir("/tmp"):
        raise ForPeople(f"TMPDIR {tempfile.gettempdir()} is too long a path for a Unix socket: choose a shorter one")
    return "/tmp"
