"""What the metadata of a GGUF file says about the model and its tokenizer.

Owns the keys of the llama, gemma3, qwen2 and qwen3 architectures and of the tokenizer. Does not guess: an
architecture or a feature that the decoder does not compute is refused by name. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.checkpoint.config import CheckpointError, Fields, ModelConfig, Rope, check_config
from decode.checkpoint.families import FAMILIES
from decode.checkpoint.gguf_file import GgufFile

_END_OF_TURN = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer even where the metadata names only one EOS id."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types. GGUF took the numbers from SentencePiece's model file."""
_GEMMA3_PATTERN = 6
"""Every sixth Gemma 3 layer is global; the files do not always say so."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The tokenizer as a GGUF file stores it. `kind` is "gpt2" (byte-level BPE), "llama" (SentencePiece), ..."""

    kind: str
    pre: str
    """Name of the pre-tokenizer, such as "smollm"; "default" when the file has none."""
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    scores: list[float] | None
    add_bos_token: bool | None
    add_space_prefix: bool | None
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None


def gguf_config(path: Path, file: GgufFile) -> ModelConfig:
    """Raises CheckpointError: architecture not known, a feature not supported, a field missing or contradictory."""
    architecture = Fields(str(path), file.metadata).text("general.architecture")
    known = {family.gguf_architecture: name for name, family in FAMILIES.items() if name != "mistral"}
    if architecture not in known:
        raise CheckpointError(f"{path}: unknown architecture {architecture!r} (known: {', '.join(sorted(known))})")
    fields = Fields(str(path), file.metadata, architecture + ".")
    if fields.get("expert_count"):
        raise CheckpointError(f"{path}: mixtures of experts are not supported ({architecture}.expert_count)")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key):
            raise CheckpointError(f"{path}: {architecture}.{key} is not supported")
    num_layers, num_heads = fields.positive("block_count"), fields.positive("attention.head_count")
    hidden_size = fields.positive("embedding_length")
    head_dim = fields.positive("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{path}: {architecture}.{key} differs from the head size {head_dim}")
    windows = _layer_windows(fields, architecture, num_layers)
    return check_config(
        ModelConfig(
            family=known[architecture],
            vocab_size=_vocab_size(path, file),
            hidden_size=hidden_size,
            intermediate_size=fields.positive("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.positive("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            max_model_len=fields.positive("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope=_rope(fields, file),
            attention_scale=_attention_scale(architecture, num_layers, hidden_size, num_heads, head_dim),
            hidden_act="gelu_tanh" if architecture == "gemma3" else "silu",
            tie_word_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            attn_out_bias="blk.0.attn_output.bias" in file.tensors,
            layer_windows=windows,
            local_rope=Rope(fields.number("rope.freq_base_swa", 10_000.0)) if architecture == "gemma3" else None,
        ),
        str(path),
    )


def gguf_tokenizer(path: Path, metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Raises CheckpointError: no tokenizer in the file, or lists of different lengths."""
    fields = Fields(str(path), metadata, "tokenizer.ggml.")
    kind, tokens = fields.text("model"), fields.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens is missing")
    types, scores = fields.get("token_type", [1] * len(tokens)), fields.get("scores")
    for key, values in (("token_type", types), ("scores", scores)):
        if values is not None and len(values) != len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{key} has {len(values)} entries for {len(tokens)} tokens")
    return GgufTokenizer(
        kind=kind,
        pre=fields.text("pre", "default"),
        tokens=tokens,
        token_types=types,
        merges=fields.get("merges", []),
        scores=scores,
        add_bos_token=fields.get("add_bos_token"),
        add_space_prefix=fields.get("add_space_prefix"),
        bos_token_id=fields.get("bos_token_id"),
        eos_token_id=fields.get("eos_token_id"),
        unknown_token_id=fields.get("unknown_token_id"),
        padding_token_id=fields.get("padding_token_id"),
    )


def gguf_eos_token_ids(metadata: Mapping[str, Any], tokenizer: GgufTokenizer) -> tuple[int, ...]:
    """The ids that end an answer: those the metadata names, then control tokens that are known by their text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    found = [
        token_id
        for token_id, (text, kind) in enumerate(zip(tokenizer.tokens, tokenizer.token_types, strict=True))
        if kind == CONTROL and text in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(named + found))


def _vocab_size(path: Path, file: GgufFile) -> int:
    embed = file.tensors.get("token_embd.weight")
    if embed is None or not embed.shape:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    return embed.shape[0]


def _layer_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int, ...]:
    window = fields.integer("attention.sliding_window", 0)
    if architecture != "gemma3":
        return (window,) * num_layers
    pattern = fields.get("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    if isinstance(pattern, list):
        return tuple(window if is_local else 0 for is_local in pattern)
    return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(num_layers))


def _rope(fields: Fields, file: GgufFile) -> Rope:
    kind = fields.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{fields.source}: rope scaling {kind!r} is not supported (linear and llama3 are)")
    factor = fields.number("rope.scaling.factor", 1.0) if kind == "linear" else 1.0
    factors: tuple[float, ...] = ()
    if (stored := file.tensors.get("rope_freqs.weight")) is not None:
        if stored.type != "F32":
            raise CheckpointError(f"{fields.source}: tensor rope_freqs.weight has the unsupported type {stored.type}")
        factors = tuple(stored.values().tolist())
    return Rope(fields.number("rope.freq_base", 10_000.0), linear_factor=factor, frequency_factors=factors)


def _attention_scale(architecture: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int) -> float:
    if architecture == "gemma3" and num_layers == 62:  # NOTE: Gemma 3 27B alone scales by hidden_size / num_heads
        return 1.0 / math.sqrt(hidden_size / num_heads)
    return 1.0 / math.sqrt(head_dim)
