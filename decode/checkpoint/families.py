"""The model families as data: which tensor plays which role under which name, and the flags that differ.

Adding a standard decoder is an entry in `FAMILIES`. Owns roles, names and expected shapes. Does not know how
tensors are stored (`decode.checkpoint.stored`) or computed with (`decode.oracle.model`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from decode.checkpoint.config import ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Naming = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a family has beyond the plain pre-norm, gated-MLP, rotary decoder."""

    hf_model_type: str
    gguf_architecture: str
    qk_norm: bool = False
    """RMS norm on every query and key head before rope."""
    sandwich_norms: bool = False
    """Norms after attention and after the MLP, before the residual sum, as well as before them."""
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(hidden_size)."""
    hf_norms_are_offsets: bool = False
    """Hugging Face files hold norm weights minus one (GGUF files hold the weights themselves)."""
    gguf_interleaves_qk: bool = False
    """GGUF files order the rows of q and k for rope on neighbouring pairs; ours rotates halves."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "llama", gguf_interleaves_qk=True),
    "mistral": Family("mistral", "llama", gguf_interleaves_qk=True),
    "qwen2": Family("qwen2", "qwen2"),
    "qwen3": Family("qwen3", "qwen3", qk_norm=True),
    "gemma3": Family(
        "gemma3_text",
        "gemma3",
        qk_norm=True,
        sandwich_norms=True,
        scaled_embeddings=True,
        hf_norms_are_offsets=True,
    ),
}

_TOP: Mapping[str, tuple[str, str]] = {  # role -> (Hugging Face name, GGUF name)
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
}
_LAYER: Mapping[str, tuple[str, str]] = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    "attn_out": ("self_attn.o_proj.weight", "attn_output.weight"),
    "attn_out_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
    "post_attn_norm": ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "post_mlp_norm": ("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
_SANDWICH_MLP_NORM = "pre_feedforward_layernorm.weight"
"""Hugging Face's name of `mlp_norm` where there are sandwich norms; the usual name then means `post_attn_norm`."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that the decoder needs: its role, where it is stored, and its shape (rows = outputs)."""

    role: str
    layer: int | None
    name: str
    shape: tuple[int, ...]

    @property
    def is_norm(self) -> bool:
        return self.role.endswith("norm")


def tensor_name(role: str, layer: int | None, family: Family, naming: Naming) -> str:
    column = 0 if naming == "hf" else 1
    if layer is None:
        return _TOP[role][column]
    if naming == "gguf":
        return f"blk.{layer}.{_LAYER[role][1]}"
    tail = _SANDWICH_MLP_NORM if family.sandwich_norms and role == "mlp_norm" else _LAYER[role][0]
    return f"model.layers.{layer}.{tail}"


def tensor_specs(config: ModelConfig, naming: Naming) -> Iterator[TensorSpec]:
    """Every tensor the decoder needs, in the order it uses them."""
    family = FAMILIES[config.family]

    def spec(role: str, layer: int | None, *shape: int) -> TensorSpec:
        return TensorSpec(role, layer, tensor_name(role, layer, family, naming), shape)

    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield spec("embed", None, config.vocab_size, hidden)
    for layer in range(config.num_layers):
        yield spec("attn_norm", layer, hidden)
        for role, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield spec(role, layer, rows, hidden)
            if config.qkv_bias:
                yield spec(f"{role}_bias", layer, rows)
        if family.qk_norm:
            yield spec("q_norm", layer, config.head_dim)
            yield spec("k_norm", layer, config.head_dim)
        yield spec("attn_out", layer, hidden, q_rows)
        if config.attn_out_bias:
            yield spec("attn_out_bias", layer, hidden)
        if family.sandwich_norms:
            yield spec("post_attn_norm", layer, hidden)
        yield spec("mlp_norm", layer, hidden)
        yield spec("gate", layer, inner, hidden)
        yield spec("up", layer, inner, hidden)
        yield spec("down", layer, hidden, inner)
        if family.sandwich_norms:
            yield spec("post_mlp_norm", layer, hidden)
    yield spec("final_norm", None, hidden)
    if not config.tie_word_embeddings:
        yield spec("head", None, config.vocab_size, hidden)


def stored_row_order(config: ModelConfig, naming: Naming, spec: TensorSpec) -> npt.NDArray[np.int64] | None:
    """Which stored row is row i of `spec`; None where they are in order.

    GGUF files of the llama architecture alternate the first and second half of a head in q and k; ours keep each half
    in a row.
    """
    if naming != "gguf" or not FAMILIES[config.family].gguf_interleaves_qk:
        return None
    if spec.role not in ("q", "k", "q_bias", "k_bias"):
        return None
    import numpy as np  # not at the top: whoever looks at a configuration alone does without

    stored = np.arange(spec.shape[0]).reshape(-1, config.head_dim // 2, 2)  # [heads, pairs, half]
    return stored.transpose(0, 2, 1).reshape(-1)


def computed_values(
    config: ModelConfig, naming: Naming, spec: TensorSpec, stored: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """What the decoder computes with for `spec`, from the values in the file: rows in our order, norms as weights."""
    if (order := stored_row_order(config, naming, spec)) is not None:
        return stored[order]
    if naming == "hf" and FAMILIES[config.family].hf_norms_are_offsets and spec.is_norm:
        return stored + 1
    return stored
