"""What a step costs when requests ask for more than the likeliest token: penalties, log probabilities, a JSON schema.

    python -m bench.parts.choosing MODEL [--variant q4] [--steps 15] [--rounds 8]

Whole engine steps, no server. The kinds take turns, so that a busy machine is busy for all of them. Prints the least
and the median time of a step and the median of the processor time of all threads, the medians also as multiples of
those of plain greedy requests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from decode.checkpoint.checkpoint import open_checkpoint
from decode.engine.engine import Engine
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence
from decode.factory import load_engine

_SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["reader", "writer", "editor"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "age", "role", "tags"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
_KINDS = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": ((5, -100.0),)},
    "5 log probabilities": {"num_logprobs": 5},
    "JSON schema": {"grammar": json.dumps({"grammars": [{"json_schema": _SCHEMA}]})},
}
_PROMPT_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", default="q4")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tokenferry" / "native")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments.model)
    engine = load_engine(
        checkpoint,
        variant=arguments.variant,
        device="cpu",
        kv_cache_tokens=16 * 1024,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        num_threads=0,
        cache_dir=arguments.cache,
    )
    for num_seqs in (1, 16):
        times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
        for _ in range(arguments.rounds):
            for kind in _KINDS:
                times[kind] += _steps(engine, kind, num_seqs, arguments.steps, checkpoint.eos_token_ids)
        least = {kind: min(wall for wall, _ in of) for kind, of in times.items()}
        wall, cpu = ({k: statistics.median(one[i] for one in of) for k, of in times.items()} for i in (0, 1))
        for kind in _KINDS:
            print(
                f"{num_seqs:3} rows, {kind:20} {least[kind] * 1e3:7.2f} ms least {wall[kind] * 1e3:7.2f} median "
                f"x{wall[kind] / wall['greedy']:.3f}, {cpu[kind] * 1e3:7.2f} ms of processors "
                f"x{cpu[kind] / cpu['greedy']:.3f}",
                flush=True,
            )


def _steps(
    engine: Engine, kind: str, num_seqs: int, num_steps: int, stops: tuple[int, ...]
) -> list[tuple[float, float]]:
    """Seconds on the clock and of processors of `num_steps` steps in which every sequence decodes."""
    sampling = SamplingParams(
        **{"max_tokens": 800, "temperature": 0.0, "ignore_eos": True, "stop_token_ids": stops} | _KINDS[kind]
    )
    for row in range(num_seqs):
        prompt = [(i * 37 + row) % 1000 + 20 for i in range(_PROMPT_TOKENS)]
        engine.add(Sequence(str(row), prompt, sampling))
    times: list[tuple[float, float]] = []
    while len(times) < num_steps:
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = engine.step()
        if len(outputs) == num_seqs:
            times.append((time.perf_counter() - begin, time.process_time() - cpu))
    for row in range(num_seqs):
        engine.abort(str(row))
    return times


if __name__ == "__main__":
    main()
