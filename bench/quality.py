"""What each execution variant costs in quality, on a text of our own: `python -m bench.quality`.

    python -m bench.quality --write                    the default model, all variants, written to bench/QUALITY.md
    python -m bench.quality MODEL --variants fp32,q8   another model, or fewer variants

Owns the cutting of the text and the three figures. Refuses to know how a variant computes. The text is cut into
windows; in each, every token but the first is predicted from all before it in the window, in one prefill.

- perplexity: exp of the mean negative log probability of the text's tokens
- top-1: how often the likeliest token is the one that fp32 finds likeliest
- KL: the mean over all positions of sum p log(p / q), p from fp32, in nats; the 99th percentile beside it
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from app.text.edge import open_text_edge
from bench.machine import machine
from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.names import DEFAULT_MODEL, resolve, served_name
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import ScheduledSequence, StepPlan
from decode.engine.sequence import Sequence as EngineSequence
from decode.native.model import CACHE_BLOCK, StepArrays
from decode.native.runner import NATIVE_VARIANTS, NativeModelRunner
from decode.oracle.batch import build_batch
from decode.oracle.kv_cache import KvCache
from decode.oracle.model import Decoder, model_windows
from decode.oracle.runner import VARIANTS as TORCH_VARIANTS
from decode.threads import choose_num_threads
from tasks.process.settings import Settings

ORACLE = "fp32"
VARIANTS = (*TORCH_VARIANTS, *NATIVE_VARIANTS)
TEXT = Path(__file__).parent / "quality.txt"
REPORT = Path(__file__).parent / "QUALITY.md"

Logits = Callable[[Sequence[int]], Tensor]
"""Token ids of a window to logits [tokens, vocab], float32."""


def windows(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive pieces of `size` tokens; a last one of a single token predicts nothing and is left out."""
    pieces = [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]
    return [piece for piece in pieces if len(piece) > 1]


@dataclass(slots=True)
class Scores:
    """The figures of one variant, window by window."""

    num_predicted: int = 0
    nll: float = 0.0
    num_agreeing: int = 0
    divergences: list[float] = field(default_factory=list)

    def add(self, window: Sequence[int], reference: Tensor, logits: Tensor) -> None:
        """`reference` and `logits` [tokens, vocab]: by the oracle, and by this variant."""
        targets = torch.tensor(window[1:])[:, None]
        wanted, got = (values[:-1].double().log_softmax(-1) for values in (reference, logits))  # [tokens - 1, vocab]
        self.num_predicted += len(window) - 1
        self.nll -= float(got.gather(1, targets).sum())
        self.num_agreeing += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        self.divergences += (wanted.exp() * (wanted - got)).sum(-1).clamp_min(0.0).tolist()

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.num_predicted)

    @property
    def agreement(self) -> float:
        return self.num_agreeing / self.num_predicted

    @property
    def mean_kl(self) -> float:
        return sum(self.divergences) / self.num_predicted

    def kl_percentile(self, share: float) -> float:
        return sorted(self.divergences)[max(1, math.ceil(share * len(self.divergences))) - 1]


@contextmanager
def opened(checkpoint: Checkpoint, variant: str, size: int) -> Iterator[Logits]:
    """How `variant` computes all logits of a window of up to `size` tokens."""
    if variant in TORCH_VARIANTS:
        yield _torch_logits(checkpoint, variant, size)
        return
    runner = NativeModelRunner(
        checkpoint,
        variant=next(name for name in NATIVE_VARIANTS if name == variant),
        num_blocks=-(-size // CACHE_BLOCK),
        max_model_len=size,
        max_num_seqs=size,
        max_num_batched_tokens=size,
        cache_dir=Settings.from_env(os.environ).cache_dir,
        content_hash=checkpoint.content_hash(),
        num_threads=choose_num_threads(),
    )
    try:
        yield lambda window: _native_logits(runner, window)
    finally:
        runner.close()


def _torch_logits(checkpoint: Checkpoint, variant: str, size: int) -> Logits:
    config, dtype, device = checkpoint.config, TORCH_VARIANTS[variant], torch.device("cpu")
    torch.set_num_threads(choose_num_threads())
    num_blocks = -(-size // CACHE_BLOCK)
    with torch.inference_mode():
        model = Decoder(checkpoint, dtype, device, size)
        cache = KvCache(
            config.num_layers, config.num_kv_heads, config.head_dim, num_blocks, CACHE_BLOCK, dtype, device
        )

    def logits(window: Sequence[int]) -> Tensor:
        sequence = EngineSequence("window", window, SamplingParams(max_tokens=1))
        sequence.block_table.extend(range(num_blocks))
        plan = StepPlan((ScheduledSequence(sequence, 0, len(window), True),), (), CACHE_BLOCK)
        with torch.inference_mode():
            batch = build_batch(
                plan,
                counts=model.counts,
                head_counts=model.head_counts,
                shape=model.attention_shape,
                windows=model_windows(config),
                device=device,
            )
            rows = torch.arange(model.head_counts.padded(len(window))).clamp_max(len(window) - 1)
            return model.forward(replace(batch, sample_rows=rows, num_samples=len(window)), cache)

    return logits


def _native_logits(runner: NativeModelRunner, window: Sequence[int]) -> Tensor:
    blocks = array("i", range(-(-len(window) // CACHE_BLOCK)))
    rows = array("i", range(len(window)))
    arrays = StepArrays(
        array("i", window), array("i", [0, len(window)]), array("i", [0]), array("i", [0]), blocks, rows
    )
    _, logits = runner.decoder.step(arrays, with_logits=True)
    assert logits is not None
    return torch.from_numpy(logits.copy())


def judge(checkpoint: Checkpoint, variants: Sequence[str], token_ids: Sequence[int], size: int) -> dict[str, Scores]:
    """The scores of each variant; the oracle is computed whether it is among them or not."""
    scores = {variant: Scores() for variant in variants}
    with ExitStack() as stack:
        oracle = stack.enter_context(opened(checkpoint, ORACLE, size))
        others = {name: stack.enter_context(opened(checkpoint, name, size)) for name in variants if name != ORACLE}
        for window in windows(token_ids, size):
            reference = oracle(window)
            for name in variants:
                scores[name].add(window, reference, reference if name == ORACLE else others[name](window))
    return scores


def table(scores: dict[str, Scores]) -> str:
    lines = ["| variant | perplexity | top-1 as fp32 | mean KL, nats | KL p99, nats |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {one.perplexity:.2f} | {one.agreement:.1%} | {one.mean_kl:.4f} | {one.kl_percentile(0.99):.4f} |"
        for name, one in scores.items()
    ]
    return "\n".join(lines)


def report(model: str, command: str, size: int, num_tokens: int, scores: dict[str, Scores]) -> str:
    num_predicted = next(iter(scores.values())).num_predicted
    return f"""# Quality of the execution variants

Written by `{command}` on {time.strftime("%Y-%m-%d")}: {machine()}.

Model `{model}`; [`quality.txt`](quality.txt), a text written for this purpose (English prose, some code, a little
German and Chinese), in windows of {size} tokens: {num_predicted} of its {num_tokens} tokens are predicted from what
stands before them in their window. The text was never seen in training, and the model is small: read the differences,
not the height. fp32 is the oracle, computed from the same checkpoint, whose weights are 4-bit blocks already; so this
is what executing in a variant adds to that, and nothing about the checkpoint's own quantisation.

{table(scores)}

`q4` and `q8` share 8-bit activations, keys and values. Where the checkpoint stores 4-bit blocks, `q4` keeps them as
they are, and `q8` rounds their values once more to 8 bits a row. Perplexity is the text's; top-1 and KL compare with
fp32 (its own row is that by definition), so they say how often greedy decoding would take another turn.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--window", type=int, default=512, help="tokens; 512 by default")
    parser.add_argument("--write", action="store_true", help=f"write bench/{REPORT.name}")
    options = parser.parse_args(arguments)
    variants = options.variants.split(",")
    if unknown := set(variants) - set(VARIANTS):
        parser.error(f"--variants: {', '.join(sorted(unknown))} not among {', '.join(VARIANTS)}")
    if options.window < 2:
        parser.error("--window: at least 2")
    checkpoint = open_checkpoint(resolve(options.model, Settings.from_env(os.environ).cache_dir))
    token_ids = open_text_edge(checkpoint).encode(options.text.read_text(encoding="utf-8"))
    scores = judge(checkpoint, variants, token_ids, min(options.window, checkpoint.config.max_model_len))
    print(table(scores))
    if options.write:
        text = report(
            served_name(options.model), "python -m bench.quality --write", options.window, len(token_ids), scores
        )
        REPORT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
