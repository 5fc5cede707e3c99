"""One prepared run of a few minutes on a machine with an NVIDIA GPU: is it exact there, and how fast?

    python -m bench.parts.gpu --write                   everything, and bench/GPU.md
    python -m bench.parts.gpu --shapes 0.6B --counts 1,16

- exactness: a tiny model, greedy, in fp32 on the device and on the CPU: the same tokens
- batch invariance: the same model in bf16 on the device: the tokens of each sequence alone, together, and with
  prompts cut into small chunks are the same
- speed: random weights of a 0.6B and an 8B shape in bf16; output tokens a second of the whole run, prompts included,
  at several numbers of sequences, beside `generate` of transformers (where that is installed) on the same checkpoint

Owns the random checkpoints, the comparisons and the report. Refuses to run without a GPU, whose place only its tests
take. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.families import FAMILIES, TensorSpec, tensor_specs
from decode.checkpoint.hf import hf_config
from decode.engine.engine import Engine
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence as EngineSequence
from decode.factory import BLOCK_SIZE, load_engine

COUNTS = (1, 16, 64, 256)
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
REPORT = Path(__file__).parent.parent / "GPU.md"
_SHARD_BYTES = 2_000_000_000


def qwen3(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool
) -> Any:
    """The config.json of a Qwen 3 model of these sizes."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": qwen3(128, 256, 3, 4, 2, 32, 512, True),
    "0.6B": qwen3(1024, 3072, 28, 16, 8, 128, 151_936, True),
    "8B": qwen3(4096, 12_288, 36, 32, 8, 128, 151_936, False),
}


def write_checkpoint(config: dict[str, Any], folder: Path, device: str, seed: int = 0) -> Path:
    """Random bf16 weights for `config` in Hugging Face form, in files of about 2 GB; the same for the same device."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator(device).manual_seed(seed)
    parsed = hf_config(folder, config, {})
    offset = 0.0 if FAMILIES[parsed.family].hf_norms_are_offsets else 1.0

    def values(spec: TensorSpec) -> torch.Tensor:
        noise = torch.randn(spec.shape, generator=generator, device=device)
        if spec.is_norm:
            return (noise * 0.1 + offset).to(torch.bfloat16).cpu()
        scale = 0.05 if spec.role == "embed" else 1.5 / spec.shape[-1] ** 0.5
        return (noise * scale).to(torch.bfloat16).cpu()

    shards: list[list[TensorSpec]] = [[]]
    num_bytes = 0
    for spec in tensor_specs(parsed, "hf"):
        if num_bytes > _SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(spec)
        num_bytes += 2 * torch.Size(spec.shape).numel()
    weight_map = {}
    for number, specs in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({spec.name: values(spec) for spec in specs}, folder / name, metadata={"format": "pt"})
        weight_map |= {spec.name: name for spec in specs}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def engine_of(
    checkpoint: Checkpoint, variant: str, device: str, num_seqs: int, num_tokens: int, chunk: int = 2048
) -> Engine:
    """An engine with room for `num_seqs` sequences of `num_tokens` tokens at once."""
    blocks = num_seqs * (-(-num_tokens // BLOCK_SIZE) + 1)
    return load_engine(
        checkpoint,
        variant=variant,
        device=device,
        kv_cache_tokens=blocks * BLOCK_SIZE,
        max_model_len=num_tokens + BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(chunk, num_seqs),
        num_threads=0,
        cache_dir=Path(tempfile.gettempdir()),
    )


def prompts(count: int, length: int, vocab: int) -> list[list[int]]:
    """Of `length` tokens and fewer, each another one."""
    return [
        [(number * 7919 + position * position * 31 + 17) % vocab for position in range(length - number % 7)]
        for number in range(count)
    ]


def run_together(engine: Engine, wanted: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """The greedy output of every prompt, all of them submitted at once."""
    outputs: dict[str, list[int]] = {str(number): [] for number in range(len(wanted))}
    for number, prompt in enumerate(wanted):
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        engine.add(EngineSequence(str(number), prompt, sampling))
    while engine.has_unfinished:
        for output in engine.step():
            outputs[output.sequence_id].extend(output.token_ids)
    return list(outputs.values())


def run_alone(engine: Engine, wanted: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    return [run_together(engine, [prompt], num_tokens)[0] for prompt in wanted]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of `num_sequences`, how many came out the same in both ways."""

    what: str
    num_same: int
    num_sequences: int


def agreement(what: str, one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Agreement:
    return Agreement(what, sum(list(a) == list(b) for a, b in zip(one, other, strict=True)), len(one))


def check_exactness(
    device: str,
    folder: Path,
    *,
    num_prompts: int = 16,
    num_tokens: int = 64,
    variants: Sequence[str] = ("fp32", "bf16"),
) -> list[Agreement]:
    """Everything that must be the same to the token, on the tiny shape."""
    checkpoint = open_checkpoint(write_checkpoint(SHAPES["tiny"], folder, "cpu"))
    wanted = prompts(num_prompts, 90, checkpoint.config.vocab_size)

    def engine(variant: str, where: str, chunk: int = 2048) -> Engine:
        return engine_of(checkpoint, variant, where, len(wanted), 96 + num_tokens, chunk)

    oracle = run_alone(engine("fp32", "cpu"), wanted, num_tokens)
    found = [agreement("fp32: the device and the CPU", oracle, run_alone(engine("fp32", device), wanted, num_tokens))]
    for variant in variants:
        alone = run_alone(engine(variant, device), wanted, num_tokens)
        together = run_together(engine(variant, device), wanted, num_tokens)
        chunked = run_together(engine(variant, device, 24), wanted, num_tokens)
        found.append(agreement(f"{variant}: alone and together", alone, together))
        found.append(agreement(f"{variant}: whole prompts and chunks of 24", together, chunked))
    return found


@dataclass(frozen=True, slots=True)
class Speed:
    """Output tokens a second by number of sequences; what failed is a text that says how."""

    shape: str
    engine: str
    by_count: dict[int, float | str] = field(default_factory=dict)


def timed(count: int, num_tokens: int, call: Callable[[], object]) -> float | str:
    """Tokens a second, or what went wrong: a machine may be too small for one of the rows."""
    try:
        started_s = time.perf_counter()
        call()
        return count * num_tokens / (time.perf_counter() - started_s)
    except torch.OutOfMemoryError as error:
        return f"out of memory ({str(error)[:60]})"


def our_speed(shape: str, folder: Path, device: str, counts: Sequence[int], num_tokens: int) -> Speed:
    checkpoint = open_checkpoint(folder)
    engine = engine_of(checkpoint, "bf16", device, max(counts), PROMPT_TOKENS + num_tokens)
    run_together(engine, prompts(2, PROMPT_TOKENS, 200), 4)
    speed = Speed(shape, "tokenferry")
    for count in counts:
        asked = [
            [*prompt[1:], count % 200] for prompt in prompts(count, PROMPT_TOKENS + 1, 200)
        ]  # no prefix is known
        speed.by_count[count] = timed(count, num_tokens, lambda asked=asked: run_together(engine, asked, num_tokens))  # type: ignore[misc]
    return speed


def transformers_speed(shape: str, folder: Path, device: str, counts: Sequence[int], num_tokens: int) -> Speed:
    """Raises ImportError where it is not installed."""
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    speed = Speed(shape, "transformers")

    def generate(count: int) -> None:
        ids = torch.randint(3, 200, (count, PROMPT_TOKENS), device=device)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
            )

    generate(1)
    for count in counts:
        speed.by_count[count] = timed(count, num_tokens, lambda count=count: generate(count))  # type: ignore[misc]
    return speed


def report(where: str, command: str, agreements: Sequence[Agreement], speeds: Sequence[Speed]) -> str:
    exact = "\n".join(f"| {one.what} | {one.num_same} of {one.num_sequences} |" for one in agreements)
    counts = list(speeds[0].by_count) if speeds else []
    rows = "\n".join(
        f"| {one.shape} | {one.engine} | "
        + " | ".join(f"{x:,.0f}" if isinstance(x, float) else str(x) for x in one.by_count.values())
        + " |"
        for one in speeds
    )
    return f"""# On a GPU

Written by `{command}` on {time.strftime("%Y-%m-%d")}: {where}, torch {torch.__version__}.

## Exactness

A tiny model with random weights, 16 prompts, 64 greedy tokens each: sequences whose tokens are all the same.

| | the same |
|---|---|
{exact}

## Speed

Output tokens/s of a whole run, random bf16 weights: prompts of {PROMPT_TOKENS} tokens, {OUTPUT_TOKENS} tokens each,
all sequences at once.

| shape | engine | {" | ".join(f"{count} sequences" for count in counts)} |
|---|---{"|---" * len(counts)}|
{rows}
"""


def require_gpu() -> str:
    """The name of the GPU. Raises SystemExit saying what is missing."""
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise SystemExit(
            "bench.parts.gpu needs an NVIDIA GPU that torch can use: "
            f"torch {torch.__version__} is {built} and finds none. "
            "Install the torch build for the card (README, GPU), and check that `nvidia-smi` lists it."
        )
    name: str = torch.cuda.get_device_name()
    return name


def numbers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError
    return values


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.parts.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shapes", default="0.6B,8B", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--counts", type=numbers, default=COUNTS, help="numbers of sequences")
    parser.add_argument("--tokens", type=int, default=OUTPUT_TOKENS, help="of each sequence")
    parser.add_argument("--write", action="store_true", help=f"write bench/{REPORT.name}")
    options = parser.parse_args(arguments)
    shapes = options.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"--shapes: {', '.join(sorted(unknown))} not among {', '.join(SHAPES)}")
    where = require_gpu()
    speeds: list[Speed] = []
    with tempfile.TemporaryDirectory(prefix="tokenferry-gpu-") as temporary:
        folder = Path(temporary)
        agreements = check_exactness("cuda", folder / "exact")
        for shape in shapes:
            write_checkpoint(SHAPES[shape], folder / shape, "cuda")
            for measure in (our_speed, transformers_speed):
                try:
                    speeds.append(measure(shape, folder / shape, "cuda", options.counts, options.tokens))
                except ImportError as error:
                    print(f"{measure.__name__}: left out, {error}", file=sys.stderr)
                gc.collect()
                torch.cuda.empty_cache()
                print(speeds[-1], file=sys.stderr, flush=True)
    text = report(where, "python -m bench.parts.gpu --write", agreements, speeds)
    print(text)
    if options.write:
        REPORT.write_text(text, encoding="utf-8")
    return 0 if all(one.num_same == one.num_sequences for one in agreements) else 1


if __name__ == "__main__":
    sys.exit(main())
