"""What the engine costs beside the model: microseconds a step for planning and commit, and for the scripted runner.

Run with `python -m bench.parts.scheduler`. The planning figures use a runner that answers at once; the median and the
95th percentile are over steps in which every sequence decodes. No weights, no torch.
"""

from __future__ import annotations

import argparse
import statistics
import time

from decode.engine.engine import Engine, EngineConfig, ModelRunner
from decode.engine.sampling import Chosen, SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.scripted import ScriptedRunner

BLOCK_SIZE = 16


class InstantRunner:
    """Answers the same token to everything."""

    def execute(self, plan: StepPlan) -> Chosen:
        return Chosen([7] * sum(scheduled.samples for scheduled in plan.scheduled))


def decoding_engine(runner: ModelRunner, num_seqs: int, context_len: int, num_steps: int, num_blocks: int) -> Engine:
    """An engine whose `num_seqs` sequences have all been prefilled to `context_len` tokens."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=context_len + num_steps + 2,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(2048, num_seqs),
        fingerprint="bench",
        block_size=BLOCK_SIZE,
    )
    engine = Engine(runner, config)
    for number in range(num_seqs):
        sampling = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
        engine.add(Sequence(str(number), [number + 10] * context_len, sampling))
    while len(engine.step()) < num_seqs:
        pass
    return engine


def step_times_us(engine: Engine, num_steps: int) -> list[float]:
    times = []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        engine.step()
        times.append((time.perf_counter_ns() - start) / 1000)
    return times


def num_blocks_for(num_seqs: int, num_tokens: int) -> int:
    return num_seqs * (num_tokens // BLOCK_SIZE + 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200, help="steps to measure for each line")
    num_steps = parser.parse_args().steps
    print("runner    sequences  context   us/step p50      p95   us/sequence  tokens/s")
    for name, sizes in (("instant", (1, 16, 64)), ("scripted", (16, 64))):
        for num_seqs in sizes:
            for context_len in (64, 1024, 4096):
                num_blocks = num_blocks_for(num_seqs, context_len + num_steps)
                runner: ModelRunner = InstantRunner()
                if name == "scripted":
                    runner = ScriptedRunner(num_blocks=num_blocks, block_size=BLOCK_SIZE)
                engine = decoding_engine(runner, num_seqs, context_len, num_steps, num_blocks)
                times = sorted(step_times_us(engine, num_steps))
                median, p95 = statistics.median(times), times[int(0.95 * len(times))]
                print(
                    f"{name:9} {num_seqs:9} {context_len:8} {median:14.1f} {p95:8.1f} {median / num_seqs:13.2f}"
                    f" {num_seqs * 1e6 / statistics.mean(times):9.0f}"
                )


if __name__ == "__main__":
    main()
