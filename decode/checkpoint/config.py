"""What a checkpoint says about its model, as data that one decoder reads.

Owns `ModelConfig` and the typed reading of metadata (`Fields`). Does not know file formats: `hf` and
`gguf` fill it in. No torch here: the web process opens checkpoints for their tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from decode.errors import DecodeError


class CheckpointError(DecodeError):
    """A checkpoint that cannot be served; the message names the file and the field, tensor or architecture."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rope scaling of Llama 3.1 (low frequencies divided by `factor`, high ones kept, a ramp between)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: frequencies theta ** (-2 i / head_dim), then at most one kind of scaling."""

    theta: float
    linear_factor: float = 1.0
    """Every frequency is divided by this."""
    llama3: Llama3Scaling | None = None
    frequency_factors: tuple[float, ...] = ()
    """Frequency i is divided by entry i (how GGUF files store llama3 scaling); empty means none."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. `family` is a key of `decode.checkpoint.families.FAMILIES`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    rope: Rope
    attention_scale: float
    """Factor on q.k before the softmax."""
    hidden_act: Literal["silu", "gelu_tanh"]
    tie_word_embeddings: bool
    qkv_bias: bool
    attn_out_bias: bool
    layer_windows: tuple[int, ...]
    """Per layer: how many positions, its own included, a token may attend to; 0 means all."""
    local_rope: Rope | None = None
    """Rope of the layers with a window, where it differs (Gemma 3)."""

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope


def check_config(config: ModelConfig, source: str) -> ModelConfig:
    """Returns `config`. Raises CheckpointError when its sizes contradict each other."""
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{source}: {config.num_heads} heads cannot share {config.num_kv_heads} key/value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim {config.head_dim} is odd, rope needs pairs")
    if len(config.layer_windows) != config.num_layers:
        raise CheckpointError(f"{source}: {len(config.layer_windows)} layer types for {config.num_layers} layers")
    return config


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed look-ups in metadata; every failure names the source and the key."""

    source: str
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands; a JSON null counts as absent."""
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(f"{self.source}: {self.prefix}{key} must be a whole number, not {value!r}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise CheckpointError(f"{self.source}: {self.prefix}{key} must not be 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise CheckpointError(f"{self.source}: {self.prefix}{key} must be a positive number, not {value!r}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self.source}: {self.prefix}{key} must be text, not {value!r}")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.source}: {self.prefix}{key} must be an object, not {value!r}")
        return value

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.source}: {self.prefix}{key} is missing")
        return value
