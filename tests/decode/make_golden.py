"""Make the golden tokens again: greedy float32 output of `transformers` on the checkpoints that the tests use.

Run by hand, with the `oracle` extra installed: python -m tests.decode.make_golden [name ...]
Refuses a prompt whose two best logits are ever so close that rounding could decide.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.decode.tiny_models import CONFIGS, write_hf
from tests.models import gemma3_path, smollm2_path

GOLDEN = Path(__file__).with_name("golden")
MIN_MARGIN = 5e-5
SMOLLM2_PROMPTS = {
    # ChatML: "What is the capital of France?", then two plain texts
    "chat": [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
             2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "short": [504],
    "plain": [504, 3575, 282, 4649, 314, 7042, 30],
}  # fmt: skip
GEMMA3_PROMPTS = {"plain": [2, 818, 5279, 529, 7001, 563], "numbers": [2, *range(2000, 2600)]}


def tiny_prompts() -> dict[str, list[int]]:
    generator = np.random.Generator(np.random.PCG64(7))
    return {str(length): generator.integers(3, 320, length).tolist() for length in (1, 9, 150)}


def greedy(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1]
        best = logits.topk(2)
        margin = float(best.values[0] - best.values[1])
        if margin < MIN_MARGIN:
            raise SystemExit(f"margin {margin} after {len(tokens)} tokens: choose another prompt")
        tokens.append(int(best.indices[0]))
    return tokens


def load(name: str, directory: Path) -> PreTrainedModel:
    if name in CONFIGS:
        model, report = AutoModelForCausalLM.from_pretrained(
            write_hf(name, directory), dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        assert not report["missing_keys"], report
        assert not report["unexpected_keys"], report
        return model
    path = smollm2_path() if name == "smollm2" else gemma3_path()
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or [*CONFIGS, "smollm2", "gemma3-270m"]:
        prompts = {"smollm2": SMOLLM2_PROMPTS, "gemma3-270m": GEMMA3_PROMPTS}.get(name) or tiny_prompts()
        with tempfile.TemporaryDirectory() as directory:
            model = load(name, Path(directory)).eval()
            cases = [{"prompt": prompt, "tokens": greedy(model, prompt, 24)} for prompt in prompts.values()]
        lines = ",\n ".join(json.dumps(case) for case in cases)
        (GOLDEN / f"{name}.json").write_text(f"[{lines}]\n")
        print(name, [len(case["prompt"]) for case in cases])


if __name__ == "__main__":
    main(sys.argv[1:])
