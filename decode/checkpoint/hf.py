"""A Hugging Face directory: config.json, safetensors files, generation_config.json, tokenizer files.

Owns the reading of these files into our types. Does not guess: a model type or a feature that the decoder does not
compute is refused by name. No torch: safetensors headers are read here, the data stays mapped in the file.
Source: the safetensors format description (8 bytes of header length, a JSON table, then raw little-endian data).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.checkpoint.config import CheckpointError, Fields, Llama3Scaling, ModelConfig, Rope, check_config
from decode.checkpoint.families import FAMILIES
from decode.checkpoint.stored import StoredTensor

_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class HfTokenizerFiles:
    """Where the tokenizer is. `tokenizer_json` may not exist: who needs text finds out and says so."""

    tokenizer_json: Path
    config: dict[str, Any]
    """tokenizer_config.json, empty when there is none."""


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError: missing, not JSON, or not an object."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return raw


def read_safetensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of every file that model.safetensors.index.json names."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return _read_header(directory / "model.safetensors")
    weight_map = Fields(str(index), read_json(index)).mapping("weight_map")
    files: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(weight_map.values())):
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not a file name")
        files[name] = _read_header(directory / name)
    tensors = {}
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise CheckpointError(f"{directory / name}: tensor {tensor} is missing, {index.name} says it is there")
        tensors[tensor] = files[name][tensor]
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > min(_MAX_HEADER_BYTES, path.stat().st_size):
                raise CheckpointError(f"{path}: truncated or not a safetensors file (header of {size} bytes)")
            table = json.loads(file.read(size))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: truncated or not a safetensors file ({error})") from error
    try:
        return {
            name: StoredTensor(name, path, row["dtype"], tuple(row["shape"]), 8 + size + row["data_offsets"][0])
            for name, row in table.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{path}: damaged header ({error!r})") from error


def hf_config(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    """Raises CheckpointError: model type not known, a feature not supported, a field missing or contradictory."""
    fields = Fields(str(directory / "config.json"), raw)
    model_type = fields.text("model_type")
    known = {family.hf_model_type: name for name, family in FAMILIES.items()}
    if model_type not in known:
        raise CheckpointError(f"{fields.source}: unknown architecture {model_type!r} (known: {', '.join(known)})")
    _refuse_unsupported(fields)
    family = known[model_type]
    num_layers, num_heads = fields.positive("num_hidden_layers"), fields.positive("num_attention_heads")
    head_dim = fields.positive("head_dim", fields.positive("hidden_size") // num_heads)
    rope, local_rope = _ropes(fields, family)
    is_llama_like = family in ("llama", "mistral", "qwen3", "gemma3")
    attention_bias = bool(fields.get("attention_bias", False)) and is_llama_like
    return check_config(
        ModelConfig(
            family=family,
            vocab_size=fields.positive("vocab_size"),
            hidden_size=fields.positive("hidden_size"),
            intermediate_size=fields.positive("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.positive("num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_model_len=fields.positive("max_position_embeddings"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            rope=rope,
            attention_scale=1.0 / math.sqrt(fields.number("query_pre_attn_scalar", head_dim)),
            hidden_act=_hidden_act(fields, family),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", "lm_head.weight" not in tensors)),
            qkv_bias=family == "qwen2" or attention_bias,
            attn_out_bias=attention_bias,
            layer_windows=_layer_windows(fields, family, num_layers),
            local_rope=local_rope,
        ),
        fields.source,
    )


def _refuse_unsupported(fields: Fields) -> None:
    for key in (
        "quantization_config",
        "mlp_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
        "num_experts",
        "num_local_experts",
    ):
        if fields.get(key):
            raise CheckpointError(f"{fields.source}: {key} is not supported")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{fields.source}: partial_rotary_factor is not supported")


def _hidden_act(fields: Fields, family: str) -> Any:
    default = "gelu_pytorch_tanh" if family == "gemma3" else "silu"
    name = fields.text("hidden_activation", fields.text("hidden_act", default))
    known = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in known:
        raise CheckpointError(f"{fields.source}: activation {name!r} is not supported ({', '.join(known)} are)")
    return known[name]


def _ropes(fields: Fields, family: str) -> tuple[Rope, Rope | None]:
    """(rope, rope of the layers with a window), from `rope_parameters` or the older `rope_theta`, `rope_scaling`."""
    parameters = fields.mapping("rope_parameters")
    theta = fields.number("rope_theta", 1_000_000.0 if family == "gemma3" else 10_000.0)
    if "full_attention" in parameters:
        inner = Fields(fields.source, parameters)
        return (
            _rope(fields.source, inner.mapping("full_attention"), theta),
            _rope(fields.source, inner.mapping("sliding_attention"), 10_000.0),
        )
    rope = _rope(fields.source, parameters or fields.mapping("rope_scaling"), theta)
    return rope, Rope(fields.number("rope_local_base_freq", 10_000.0)) if family == "gemma3" else None


def _rope(source: str, raw: Mapping[str, Any], default_theta: float) -> Rope:
    fields = Fields(source, raw)
    theta = fields.number("rope_theta", default_theta)
    match fields.text("rope_type", fields.text("type", "default")):
        case "default":
            return Rope(theta)
        case "linear":
            return Rope(theta, linear_factor=fields.number("factor"))
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if high <= low:
                raise CheckpointError(f"{source}: llama3 rope scaling needs high_freq_factor above low_freq_factor")
            original = fields.positive("original_max_position_embeddings")
            return Rope(theta, llama3=Llama3Scaling(fields.number("factor"), low, high, original))
        case other:
            raise CheckpointError(f"{source}: rope scaling {other!r} is not supported (linear and llama3 are)")


def _layer_windows(fields: Fields, family: str, num_layers: int) -> tuple[int, ...]:
    window = fields.integer("sliding_window", 0)
    if family.startswith("qwen") and not fields.get("use_sliding_window", False):
        window = 0
    if (layer_types := fields.get("layer_types")) is not None:
        if unknown := set(layer_types) - {"sliding_attention", "full_attention"}:
            raise CheckpointError(f"{fields.source}: layer types {sorted(unknown)} are not supported")
        return tuple(window if kind == "sliding_attention" else 0 for kind in layer_types)
    if family == "gemma3":
        pattern = fields.positive("sliding_window_pattern", fields.positive("_sliding_window_pattern", 6))
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(num_layers))
    if family.startswith("qwen"):
        first_windowed = fields.integer("max_window_layers", num_layers)
        return tuple(window if layer >= first_windowed else 0 for layer in range(num_layers))
    return (window if family == "mistral" else 0,) * num_layers
