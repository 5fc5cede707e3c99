"""Tiny random checkpoints of every family, written by the tests: as Hugging Face directories and as GGUF files.

The same name gives the same bits everywhere: weights come from numpy's PCG64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.checkpoint.config import ModelConfig
from decode.checkpoint.families import FAMILIES, TensorSpec, tensor_specs
from decode.checkpoint.hf import hf_config

Values = npt.NDArray[np.float32]

_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 1e4},
    "llama-tied": _SIZES | {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 1e4},
    "llama3-rope": _SIZES
    | {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": _LLAMA3 | {"rope_theta": 5e3, "original_max_position_embeddings": 128},
    },
    "llama-linear-bias": _SIZES
    | {
        "model_type": "llama",
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "mistral": _SIZES | {"model_type": "mistral", "sliding_window": 40, "tie_word_embeddings": False},
    "qwen2": _SIZES | {"model_type": "qwen2", "use_sliding_window": False, "tie_word_embeddings": False},
    "qwen3": _SIZES | {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "gemma3": _SIZES
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        "tie_word_embeddings": False,
    },
}


def tiny_weights(name: str, config: ModelConfig) -> dict[str, Values]:
    """By Hugging Face name."""
    generator = np.random.Generator(np.random.PCG64(sum(name.encode())))
    family = FAMILIES[config.family]

    def values(spec: TensorSpec) -> Values:
        noise = generator.standard_normal(spec.shape)
        if spec.is_norm:
            noise = noise * 0.1 + (0 if family.hf_norms_are_offsets else 1)
        elif spec.role == "embed":
            noise *= 0.05  # small beside what the layers add, or a tied head would only echo the last token
        elif spec.role != "head":
            noise *= 1.5 / np.sqrt(spec.shape[-1])
        return noise.astype(np.float32)

    return {spec.name: values(spec) for spec in tensor_specs(config, "hf")}


def write_hf(name: str, directory: Path, *, num_shards: int = 1, **changes: Any) -> Path:
    """A Hugging Face directory; `changes` replace fields of config.json."""
    raw = CONFIGS[name] | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    weights = tiny_weights(name, hf_config(directory, raw, {}))
    names = list(weights)
    if num_shards == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: weights[key] for key in names[shard::num_shards]}
        save_file(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def open_tiny(name: str, directory: Path, **changes: Any) -> Checkpoint:
    return open_checkpoint(write_hf(name, directory, **changes))


def write_gguf(name: str, path: Path, *, quantisation: str = "F32", metadata: dict[str, Any] | None = None) -> Path:
    """A GGUF file with the weights of `write_hf(name, ..., query_pre_attn_scalar=None)`.

    Matrices are stored as `quantisation`. `metadata` adds keys or, with None, leaves them out.
    """
    raw = CONFIGS[name] | {"query_pre_attn_scalar": None}
    config = hf_config(path, raw, {})
    family = FAMILIES[config.family]
    writer = gguf.GGUFWriter(path, family.gguf_architecture)
    for key, value in (_gguf_metadata(family.gguf_architecture, config) | (metadata or {})).items():
        _add(writer, key, value)
    weights = tiny_weights(name, config)
    kind = gguf.GGMLQuantizationType[quantisation]
    for hf, stored in zip(tensor_specs(config, "hf"), tensor_specs(config, "gguf"), strict=True):
        values = weights[hf.name]
        if family.gguf_interleaves_qk and hf.role in ("q", "k", "q_bias", "k_bias"):
            values = interleaved(values, config.head_dim)
        if family.hf_norms_are_offsets and hf.is_norm:
            values = values + 1
        if values.ndim == 2 and quantisation != "F32":
            writer.add_tensor(stored.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(values: Values, head_dim: int) -> Values:
    """Rows (first half, second half) of every head to alternating rows, as the converter of the llama family does."""
    heads = len(values) // head_dim
    return values.reshape(heads, 2, head_dim // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _gguf_metadata(architecture: str, config: ModelConfig) -> dict[str, Any]:
    tokens = [f"<{i}>" for i in range(config.vocab_size)]
    fields: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_model_len,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope.theta,
    }
    if config.rope.linear_factor != 1:
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.linear_factor}
    if any(config.layer_windows):
        fields["attention.sliding_window"] = max(config.layer_windows)
    return {f"{architecture}.{key}": value for key, value in fields.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * config.vocab_size,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
