"""How cost grows: against concurrent sequences, against context, and against workers.

    python -m bench.parts.growth            tables on the terminal, about four minutes
    python -m bench.parts.growth --write    and bench/growth.svg

- concurrency: the engine alone with the default model natively, a prompt of 64 tokens for each sequence; tokens a
  second of decode steps, all sequences together
- context: one sequence after prompts of growing length; milliseconds of a decode step, and prompt tokens a second
- workers: a whole cell with the scripted engine, whose steps sleep, so that the cores do not decide; the same number
  of streams for each worker, tokens a second at the client

Owns the three sweeps and what counts as a cliff. Refuses to know how a step is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.overhead import body_of, cell
from bench.parts.plot import Panel, svg
from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.names import DEFAULT_MODEL, resolve
from decode.engine.engine import Engine
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence as EngineSequence
from decode.factory import load_engine
from tasks.process.settings import Settings
from tokenferry.load import drive, encode_request

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = (128, 256, 512, 1024, 2048, 4096)
WORKERS = (1, 2, 3, 4)
PROMPT_TOKENS = 64
NUM_STEPS = 16
PLOT = Path(__file__).parent.parent / "growth.svg"
STEP_MS = 40.0
STREAMS_PER_WORKER = 8


@dataclass(frozen=True, slots=True)
class Growth:
    """(x, y) of each sweep, x ascending."""

    concurrency: list[tuple[int, float]]
    """Sequences, output tokens/s."""
    context: list[tuple[int, float]]
    """Prompt tokens, milliseconds of a decode step."""
    prefill: list[tuple[int, float]]
    """Prompt tokens, prompt tokens/s."""
    workers: list[tuple[int, float]]
    """Workers, output tokens/s."""

    def cliffs(self) -> list[str]:
        """Where a sweep does worse than its neighbour in a way that growth does not explain; for people."""
        found = drops("tokens/s against sequences", self.concurrency, 0.9)
        found += drops("prefill tokens/s against prompt tokens", self.prefill, 0.6)
        found += drops("tokens/s a worker against workers", [(n, speed / n) for n, speed in self.workers], 0.85)
        return found + drops("steps/s against context", [(n, 1000 / ms) for n, ms in self.context], 0.45)


def drops(name: str, points: Sequence[tuple[int, float]], least: float) -> list[str]:
    """The pairs of neighbours of which the later has less than `least` of the earlier's value."""
    return [
        f"{name}: {y0:,.1f} at {x0}, {y1:,.1f} at {x1}" for (x0, y0), (x1, y1) in pairwise(points) if y1 < least * y0
    ]


def by_concurrency(engine: Engine, counts: Sequence[int]) -> list[tuple[int, float]]:
    points = []
    for count in counts:
        names = _add(engine, count, PROMPT_TOKENS, NUM_STEPS + 2)
        _step_until_all_decode(engine, count)
        points.append((count, count * 1000 / _step_ms(engine, NUM_STEPS)))
        _end(engine, names)
    return points


def by_context(engine: Engine, lengths: Sequence[int]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Milliseconds of a decode step, and prompt tokens a second."""
    steps, prefill = [], []
    for length in lengths:
        names = _add(engine, 1, length, NUM_STEPS + 2)
        started_s = time.perf_counter()
        _step_until_all_decode(engine, 1)
        prefill.append((length, length / (time.perf_counter() - started_s)))
        steps.append((length, _step_ms(engine, NUM_STEPS)))
        _end(engine, names)
    return steps, prefill


def by_workers(counts: Sequence[int], num_tokens: int) -> list[tuple[int, float]]:
    points = []
    for count in counts:
        with cell(step_ms=STEP_MS, num_workers=count, MAX_NUM_SEQS=str(STREAMS_PER_WORKER)) as (_, target):
            streams = STREAMS_PER_WORKER * count
            requests = [encode_request(target, body_of(number, num_tokens)) for number in range(streams)]
            started_s = time.perf_counter()
            tally = asyncio.run(drive(target, requests, streams, 120.0))
            wall_s = time.perf_counter() - started_s
        if tally.errors:
            raise SystemExit(f"{count} workers: {dict(tally.errors)}")
        points.append((count, tally.num_output_tokens / wall_s))
    return points


_number = iter(range(1 << 60))


def _add(engine: Engine, count: int, num_prompt_tokens: int, max_tokens: int) -> list[str]:
    """`count` new sequences whose prompts nobody has had before."""
    vocab = min(engine.config.vocab_size, 20_000)
    names = []
    for _ in range(count):
        number = next(_number)
        prompt = [(number * 7919 + position * 104_729 + 13) % vocab for position in range(num_prompt_tokens)]
        sampling = SamplingParams(max_tokens=max_tokens + 1000, temperature=0.0, ignore_eos=True)
        names.append(f"growth-{number}")
        engine.add(EngineSequence(names[-1], prompt, sampling))
    return names


def _step_until_all_decode(engine: Engine, count: int) -> None:
    while len(engine.step()) < count:
        pass


def _step_ms(engine: Engine, num_steps: int) -> float:
    """The median: a step that was disturbed does not count."""
    times = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(times)


def _end(engine: Engine, names: Sequence[str]) -> None:
    for name in names:
        engine.abort(name)


def engine_for(checkpoint: Checkpoint, variant: str, max_num_seqs: int, max_len: int) -> Engine:
    return load_engine(
        checkpoint,
        variant=variant,
        device="cpu",
        kv_cache_tokens=max(max_len + 256, max_num_seqs * 256),
        max_model_len=max_len + 256,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_threads=0,
        cache_dir=Settings.from_env(os.environ).cache_dir,
    )


def measure(
    checkpoint: Checkpoint, variant: str, say: Callable[[str], object], num_worker_tokens: int = 150
) -> Growth:
    engine = engine_for(checkpoint, variant, CONCURRENCY[-1], CONTEXT[-1])
    say(f"engine: {engine.config.variant}")
    by_concurrency(engine, CONCURRENCY[-1:])  # the first steps find nothing warm
    concurrency = by_concurrency(engine, CONCURRENCY)
    say(f"sequences, tokens/s: {concurrency}")
    context, prefill = by_context(engine, CONTEXT)
    say(f"context, ms a step: {context}")
    workers = by_workers(WORKERS, num_worker_tokens)
    say(f"workers, tokens/s: {workers}")
    return Growth(concurrency, context, prefill, workers)


def table(growth: Growth) -> str:
    def row(name: str, points: Sequence[tuple[int, float]], digits: int) -> list[str]:
        return [
            f"| {name} | " + " | ".join(str(x) for x, _ in points) + " |",
            "|---" * (len(points) + 1) + "|",
            "| | " + " | ".join(f"{y:,.{digits}f}" for _, y in points) + " |",
            "",
        ]

    ideal = STREAMS_PER_WORKER * 1000 / STEP_MS
    lines = row("sequences at once: decode tokens/s", growth.concurrency, 0)
    lines += row("context of one sequence: ms a decode step", growth.context, 2)
    lines += row("prompt length: prompt tokens/s", growth.prefill, 0)
    lines += row(f"workers (scripted, {ideal:g} tokens/s each at most): tokens/s", growth.workers, 0)
    cliffs = growth.cliffs()
    lines.append("No cliff." if not cliffs else "Cliffs: " + "; ".join(cliffs) + ".")
    return "\n".join(lines)


def plot(growth: Growth) -> str:
    ideal = [(n, n * STREAMS_PER_WORKER * 1000 / STEP_MS) for n, _ in growth.workers]
    return svg(
        [
            Panel("Concurrency", "sequences at once", "tokens/s", {"measured": growth.concurrency}),
            Panel("Context", "tokens of context", "ms a decode step", {"measured": growth.context}),
            Panel("Prefill", "tokens of the prompt", "prompt tokens/s", {"measured": growth.prefill}),
            Panel("Workers", "workers", "tokens/s", {"measured": growth.workers, "at most": ideal}),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.parts.growth", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--variant", default="auto")
    parser.add_argument("--write", action="store_true", help=f"write bench/{PLOT.name}")
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(resolve(options.model, Settings.from_env(os.environ).cache_dir))
    growth = measure(checkpoint, options.variant, lambda text: print(text, file=sys.stderr, flush=True))
    print(table(growth))
    if options.write:
        PLOT.write_text(plot(growth), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
