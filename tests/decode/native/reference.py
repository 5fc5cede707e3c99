"""What the native tests compare with: the decoder in a few lines of numpy, and checkpoints small enough for tests."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.families import FAMILIES, tensor_specs
from decode.checkpoint.rope import rope_tables
from decode.native.build import build_native
from decode.native.runner import NativeModelRunner, NativeVariant

VOCAB = 200
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True, "head_dim": 64},
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_local_base_freq": 1_000.0,
        "query_pre_attn_scalar": 32,
    },
}
FAMILY_NAMES = tuple(_FAMILIES)


@functools.cache
def cache_dir() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="native-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def library(*, portable: bool = False) -> Path:
    return build_native(cache_dir(), portable=portable)


@functools.cache
def tiny_checkpoint(family: str) -> Checkpoint:
    """A random model with every feature of its family; the same weights every time."""
    folder = cache_dir() / family
    folder.mkdir()
    config = _SIZES | _FAMILIES[family]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}))
    shapes = _shapes(config, family)
    random = np.random.default_rng(7)
    tensors = {}
    for name, shape in shapes.items():
        scale = 0.3 if name.endswith("bias") else 0.8 / np.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        offset = 1.0 if "norm" in name and family != "gemma3" else 0.0
        tensors[name] = (random.standard_normal(shape) * scale + offset).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def _shapes(config: dict[str, Any], family: str) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, hidden)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if family == "gemma3":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows, hidden)
            if family == "qwen2":
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows,)
            if family in ("qwen3", "gemma3") and name != "v":
                shapes[f"{at}self_attn.{name}_norm.weight"] = (dim,)
        shapes[f"{at}self_attn.o_proj.weight"] = (hidden, q)
        shapes |= {f"{at}mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{at}{name}.weight": (hidden,) for name in norms}
    return shapes


def runner(checkpoint: Checkpoint, variant: NativeVariant = "q8", **changes: Any) -> NativeModelRunner:
    options: dict[str, Any] = {
        "num_blocks": 64,
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "num_threads": 2,
    }
    return NativeModelRunner(
        checkpoint,
        variant=variant,
        cache_dir=cache_dir(),
        content_hash=checkpoint.content_hash(),
        **(options | changes),
    )


class ReferenceDecoder:
    """The whole sequence at once, in float64, with the checkpoint's own values: no cache, batch or quantisation."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._config = config = checkpoint.config
        self._family = family = FAMILIES[config.family]
        self._weights = {}
        for spec in tensor_specs(config, checkpoint.naming):
            values = checkpoint.tensors[spec.name].values().astype(np.float64)
            if checkpoint.naming == "gguf" and family.gguf_interleaves_qk and spec.role in ("q", "k"):
                values = values.reshape(-1, config.head_dim // 2, 2, spec.shape[1]).swapaxes(1, 2).reshape(spec.shape)
            if checkpoint.naming == "hf" and family.hf_norms_are_offsets and spec.is_norm:
                values = values + 1
            self._weights[spec.role, spec.layer] = values

    def logits(self, token_ids: list[int]) -> Any:
        """[tokens, vocab]"""
        config, w = self._config, self._weights
        x = w["embed", None][token_ids]
        if self._family.scaled_embeddings:
            x = x * np.sqrt(config.hidden_size)
        for layer in range(config.num_layers):
            branch = self._attention(self._norm(x, "attn_norm", layer), layer)
            x = x + self._after(branch, "post_attn_norm", layer)
            h = self._norm(x, "mlp_norm", layer)
            gate, up = h @ w["gate", layer].T, h @ w["up", layer].T
            x = x + self._after((_act(gate, config.hidden_act) * up) @ w["down", layer].T, "post_mlp_norm", layer)
        head = w["embed" if config.tie_word_embeddings else "head", None]
        return self._norm(x, "final_norm", None) @ head.T

    def _attention(self, h: Any, layer: int) -> Any:
        config, w = self._config, self._weights
        tokens, group = len(h), config.num_heads // config.num_kv_heads
        q, k, v = (
            (h @ w[role, layer].T + w.get((f"{role}_bias", layer), 0)).reshape(tokens, -1, config.head_dim)
            for role in ("q", "k", "v")
        )
        if self._family.qk_norm:
            q, k = self._norm(q, "q_norm", layer), self._norm(k, "k_norm", layer)
        cos, sin = (table[:, None] for table in rope_tables(config.rope_of(layer), config.head_dim, tokens))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        position = np.arange(tokens)
        age = position[:, None] - position
        window = config.layer_windows[layer] or tokens
        heads = []
        for head in range(config.num_heads):
            scores = q[:, head] @ k[:, head // group].T * config.attention_scale
            scores = np.where((age >= 0) & (age < window), scores, -np.inf)
            share = np.exp(scores - scores.max(axis=-1, keepdims=True))
            heads.append(share / share.sum(axis=-1, keepdims=True) @ v[:, head // group])
        return np.concatenate(heads, axis=-1) @ w["attn_out", layer].T

    def _norm(self, x: Any, role: str, layer: int | None) -> Any:
        return (
            x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._config.rms_norm_eps) * self._weights[role, layer]
        )

    def _after(self, branch: Any, role: str, layer: int) -> Any:
        return self._norm(branch, role, layer) if self._family.sandwich_norms else branch


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _act(x: Any, kind: str) -> Any:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
