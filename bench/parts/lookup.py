"""What drafts by prompt lookup bring a single stream: tokens a second with and without them, by kind of prompt.

    python -m bench.parts.lookup MODEL.gguf [--variant q4] [--tokens 128 400] [--prompts 6] [--rounds 5]

Whole engine, no server. "free" are questions and requests for texts, "edit" asks for a given text or code again, as
it is or with small changes. With and without take turns; the tokens have to be the same. A rate is that of the
tokens after the first; of a prompt it is the median of its rounds. Prints the median over the prompts of both rates,
and the median and the least of their ratio, and of that of the tokens for a second of the processors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from app.dialect.conversation import ChatMessage
from app.text.edge import TextEdge, open_text_edge
from decode.checkpoint.checkpoint import open_checkpoint
from decode.engine.engine import Engine, EngineConfig
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence
from decode.native.model import CACHE_BLOCK
from decode.native.runner import MAX_DRAFT_ROWS, NATIVE_VARIANTS, NativeModelRunner

_TEXT = (
    "The ferry left the harbour at seven in the morning, and two hundred passengers watched the lights of the town "
    "go out one after the other. Nobody spoke until the sun came up behind the lighthouse. Then the captain told "
    "them about the winter in which the sea had frozen from one shore to the other, and how his grandfather had "
    "walked across it with a sledge full of letters, because the people on the island were waiting for news from "
    "their sons."
)
_CODE = '''```python
def total_price(items, tax_rate):
    """Return the total price of the items with tax."""
    total = 0
    for item in items:
        price = item["price"]
        quantity = item["quantity"]
        if quantity <= 0:
            raise ValueError("quantity must be positive")
        total += price * quantity
    tax = total * tax_rate
    return total + tax


def average_price(items):
    """Return the average price of the items."""
    if not items:
        return 0
    total = sum(item["price"] for item in items)
    return total / len(items)
```'''
_PROMPTS = {
    "free": (
        "Tell me a story about a lighthouse keeper.",
        "Explain how photosynthesis works.",
        "What are the advantages of learning a second language?",
        "Write an email to my landlord about a broken heater.",
        "Why is the sky blue, and why are sunsets red?",
        "Describe the city of Lisbon to somebody who has never been there.",
    ),
    "edit": (
        f"Repeat the following text word for word:\n\n{_TEXT}",
        f"Correct the spelling of this text and write it out again:\n\n{_TEXT.replace('passengers', 'pasengers')}",
        f"Repeat this code exactly:\n\n{_CODE}",
        f"Rewrite this code with the variable `total` renamed to `amount`:\n\n{_CODE}",
        f"Add a docstring to every function of this code and print the whole code again:\n\n{_CODE}",
    ),
}


class Bench:
    def __init__(self, model: Path, variant: str, cache_dir: Path) -> None:
        checkpoint = open_checkpoint(model)
        self.edge: TextEdge = open_text_edge(checkpoint)
        self._stops = tuple(checkpoint.eos_token_ids)
        self._runner = NativeModelRunner(
            checkpoint,
            variant=next(name for name in NATIVE_VARIANTS if name == variant),
            num_blocks=2048 // CACHE_BLOCK,
            max_model_len=2048,
            max_num_seqs=1,
            max_num_batched_tokens=512,
            cache_dir=cache_dir,
            content_hash=checkpoint.content_hash(),
        )

    def engine(self, max_draft_rows: int) -> Engine:
        """A new one, with an empty prefix cache, over the same memory."""
        config = EngineConfig(
            num_blocks=2048 // CACHE_BLOCK,
            max_model_len=2048,
            max_num_seqs=1,
            max_num_batched_tokens=512,
            fingerprint="bench",
            max_draft_rows=max_draft_rows,
        )
        return Engine(self._runner, config)

    def generate(self, prompt: list[int], max_draft_rows: int, max_tokens: int, temperature: float) -> Run:
        engine = self.engine(max_draft_rows)
        sampling = SamplingParams(max_tokens, temperature, seed=5, stop_token_ids=self._stops)
        engine.add(Sequence("only", prompt, sampling))
        token_ids: list[int] = []
        begin = cpu = 0.0
        while engine.has_unfinished:
            for output in engine.step():
                if not token_ids:
                    begin, cpu = time.perf_counter(), time.process_time()
                token_ids.extend(output.token_ids)
        num_timed = len(token_ids) - 1
        rates = num_timed / (time.perf_counter() - begin), num_timed / (time.process_time() - cpu)
        return Run(token_ids, *rates, engine.num_draft_tokens, engine.num_accepted_tokens)


class Run(NamedTuple):
    token_ids: list[int]
    rate: float
    cpu_rate: float
    """Tokens for a second of the processors."""
    num_drafted: int
    num_accepted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--variant", choices=NATIVE_VARIANTS, default="q4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 400])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--prompts", type=int, default=6, help="of each kind, at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-draft-rows", type=int, default=MAX_DRAFT_ROWS)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "tokenferry" / "native")
    arguments = parser.parse_args()
    bench = Bench(arguments.model, arguments.variant, arguments.cache)
    for kind, prompts in _PROMPTS.items():
        chats = [bench.edge.render_chat([ChatMessage("user", prompt)]) for prompt in prompts[: arguments.prompts]]
        for temperature in arguments.temperatures:
            for max_tokens in arguments.tokens:
                found = [
                    _in_turns(bench, list(chat), arguments.max_draft_rows, max_tokens, temperature, arguments.rounds)
                    for chat in chats
                ]
                name = f"{kind} temperature {temperature} {max_tokens:4} tokens"
                print(f"{name}: {_report(found)}", flush=True)


def _in_turns(
    bench: Bench, prompt: list[int], max_draft_rows: int, max_tokens: int, temperature: float, num_rounds: int
) -> tuple[Run, Run]:
    """Of one prompt, without and with drafts, the medians of all rounds."""
    runs: dict[int, list[Run]] = {0: [], max_draft_rows: []}
    for _ in range(num_rounds):
        for rows, of_kind in runs.items():
            of_kind.append(bench.generate(prompt, rows, max_tokens, temperature))
    first = runs[0][0]
    assert all(run.token_ids == first.token_ids for kind in runs.values() for run in kind), "a token has changed"
    without, drafted = (
        kind[0]._replace(
            rate=statistics.median(run.rate for run in kind), cpu_rate=statistics.median(run.cpu_rate for run in kind)
        )
        for kind in runs.values()
    )
    return without, drafted


def _report(found: list[tuple[Run, Run]]) -> str:
    without, drafted = (statistics.median(pair[i].rate for pair in found) for i in (0, 1))
    ratios = [pair[1].rate / pair[0].rate for pair in found]
    cpu_ratios = [pair[1].cpu_rate / pair[0].cpu_rate for pair in found]
    num_accepted, num_drafted = sum(pair[1].num_accepted for pair in found), sum(p[1].num_drafted for p in found)
    return (
        f"{without:6.1f} -> {drafted:6.1f} tokens/s, x{statistics.median(ratios):.2f} (least {min(ratios):.2f}), "
        f"by processor time x{statistics.median(cpu_ratios):.2f} (least {min(cpu_ratios):.2f}); "
        f"{num_accepted} of {num_drafted} drafts right"
    )


if __name__ == "__main__":
    main()
