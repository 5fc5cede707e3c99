"""What one step of the native decoder costs: decode at several batch sizes and contexts, and prefill.

    python -m bench.native MODEL.gguf [--variant q4] [--threads 0] [--repeat 20] [--profile]

Model only: no scheduler, no server. Prints the least and the median time of a step; the least is what the machine can
do, the median what it did while other processes ran. `--profile`: instead, where the time of a decode step at 1, 16
and 32 sequences and of a prefill goes, phase by phase, and how long its bytes alone would take to read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from decode.checkpoint.checkpoint import open_checkpoint
from decode.native.model import CACHE_BLOCK, NativeDecoder, StepArrays
from decode.native.runner import NATIVE_VARIANTS, NativeModelRunner

_DECODE = (
    (1, 128),
    (4, 128),
    (8, 128),
    (16, 128),
    (32, 128),
    (64, 128),
    (1, 2000),
    (16, 640),
    (16, 1128),
    (16, 2000),
)
_PREFILL = (64, 512, 2000)
_PROFILED = ((1, 128), (16, 200), (32, 200))
_MAX_ROWS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", choices=NATIVE_VARIANTS, default="q4")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tokenferry")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    checkpoint = open_checkpoint(arguments.model)
    runner = NativeModelRunner(
        checkpoint,
        variant=arguments.variant,
        num_blocks=64 * 2048 // CACHE_BLOCK,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=_MAX_ROWS,
        cache_dir=arguments.cache,
        content_hash=checkpoint.content_hash(),
        num_threads=arguments.threads,
    )
    print(f"ready in {time.perf_counter() - begin:.2f} s")
    if arguments.profile:
        _profile(runner.decoder, arguments.repeat)
    else:
        _measure_all(runner.decoder, arguments.repeat)
    runner.close()


def _measure_all(decoder: NativeDecoder, repeat: int) -> None:
    for num_seqs, context in _DECODE:
        least, median = _measure(partial(_decode, decoder, num_seqs, context), repeat)
        print(
            f"decode {num_seqs:3} x {context:5} tokens: {least * 1e3:7.2f} ms least {median * 1e3:7.2f} median "
            f"{num_seqs / least:7.0f} tokens/s"
        )
    for length in _PREFILL:
        least, median = _measure(partial(_prefill, decoder, length), max(3, repeat // 5))
        print(
            f"prefill {length:8} tokens: {least * 1e3:7.1f} ms least {median * 1e3:7.1f} median "
            f"{length / least:7.0f} tokens/s"
        )


def _profile(decoder: NativeDecoder, repeat: int) -> None:
    bandwidth = _bandwidth()
    print(f"two threads read {bandwidth / 1e9:.1f} GB/s")
    for num_seqs, context in _PROFILED:
        weights, cache = decoder.step_bytes(num_seqs * context)
        memory = (weights + cache) / bandwidth
        seconds = _print_profile(
            f"decode {num_seqs} x {context}", decoder, partial(_decode, decoder, num_seqs, context), repeat
        )
        print(
            f"  {weights / 1e6:.0f} MB of weights and {cache / 1e6:.1f} MB of cache take {memory * 1e3:.2f} ms "
            f"to read, {memory / seconds:.0%} of the step"
        )
    for length in _PREFILL[1:]:
        _print_profile(f"prefill {length}", decoder, partial(_prefill, decoder, length), max(3, repeat // 5))


def _print_profile(name: str, decoder: NativeDecoder, step: Callable[[], None], repeat: int) -> float:
    """Shares of the calling thread's time: its work by phase, and waiting for others. Returns the median step."""
    step()
    decoder.profile(on=True)
    median = _measure(step, repeat)[1]
    phases = decoder.profile(on=False)
    total = sum(work + wait for work, wait in phases.values())
    shares = {phase: work / total for phase, (work, _) in phases.items()}
    shares["waiting"] = sum(wait for _, wait in phases.values()) / total
    print(
        f"{name}: {median * 1e3:.2f} ms median; "
        + ", ".join(f"{phase} {share:.1%}" for phase, share in shares.items())
    )
    return median


def _bandwidth() -> float:
    """Bytes a second that two threads read from memory, each its own array, larger than the caches."""
    arrays = [np.ones(2**25, np.uint64) for _ in range(2)]
    best = 0.0
    with ThreadPoolExecutor(2) as pool:
        for _ in range(5):
            begin = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - begin))
    return best


def _measure(step: Callable[[], None], repeat: int) -> tuple[float, float]:
    step()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)


def _decode(decoder: NativeDecoder, num_seqs: int, context: int) -> None:
    blocks = -(-(context + 1) // CACHE_BLOCK)
    arrays = StepArrays(
        token_ids=array("i", [7 + i for i in range(num_seqs)]),
        row_starts=array("i", range(num_seqs + 1)),
        first_positions=array("i", [context] * num_seqs),
        table_starts=array("i", [i * blocks for i in range(num_seqs)]),
        block_tables=array("i", range(num_seqs * blocks)),
        sample_rows=array("i", range(num_seqs)),
    )
    decoder.step(arrays)


def _prefill(decoder: NativeDecoder, length: int) -> None:
    table = array("i", range(-(-length // CACHE_BLOCK)))
    for first in range(0, length, _MAX_ROWS):
        size = min(_MAX_ROWS, length - first)
        samples = array("i", [size - 1] if first + size == length else [])
        tokens = array("i", [(i * 37) % 1000 + 20 for i in range(first, first + size)])
        decoder.step(StepArrays(tokens, array("i", [0, size]), array("i", [first]), array("i", [0]), table, samples))


if __name__ == "__main__":
    main()
