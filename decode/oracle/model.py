"""The decoder: every supported family's forward pass, told apart by descriptors alone.

Owns the weights in the form they are computed with, and the order of operations. Does not know where sequences come
from. The residual stream, norms, rotation and activations are float32 in every variant; linears and the K/V cache use
the variant's type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.config import ModelConfig, Rope
from decode.checkpoint.families import FAMILIES
from decode.checkpoint.rope import rope_tables
from decode.oracle.attention import CHUNK, PREFILL_TILE, AttentionShape, paged_attention
from decode.oracle.batch import StepTensors
from decode.oracle.kv_cache import KvCache
from decode.oracle.layers import Linear, RowCounts, cancelling, gelu_tanh, rms_norm, rotate, silu
from decode.oracle.weights import Progress, WeightReader

_MAX_ROWS = 256
_MAX_HEAD_ROWS = 32
"""Rows of one product; the head's is smaller, because measuring a large vocabulary takes seconds."""
_ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


@dataclass(frozen=True, slots=True)
class _Layer:
    attn_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attn_out: Linear
    post_attn_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: Tensor | None
    window: int
    rope: Rope

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.qkv, self.attn_out, self.gate_up, self.down)


class Decoder:
    """Weights on one device in one type. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        progress: Progress | None = None,
    ) -> None:
        self.config = config = checkpoint.config
        self.dtype, self.device = dtype, device
        reader = WeightReader(checkpoint, progress)
        embed = reader.read("embed").to(device, dtype)
        self._embed = embed  # [vocab, hidden]
        self._embed_scale = math.sqrt(config.hidden_size) if FAMILIES[config.family].scaled_embeddings else 1.0
        self._layers = [self._read_layer(reader, layer) for layer in range(config.num_layers)]
        self._final_norm = reader.read("final_norm").to(device)
        self._head = Linear(embed if config.tie_word_embeddings else reader.read("head").to(device, dtype))
        self._tables = {rope: self._rope_table(rope, max_positions) for rope in {x.rope for x in self._layers}}
        self._act = _ACTIVATIONS[config.hidden_act]
        self.counts = self._measure_counts()
        self._head.counts = self._head.measure(_MAX_HEAD_ROWS)
        self.attention_shape = AttentionShape(config.num_heads, config.num_kv_heads, self._decode_rows())

    @property
    def head_counts(self) -> RowCounts:
        """The numbers of sampled rows that `forward` takes; `counts` are the numbers of rows."""
        return self._head.counts

    def forward(self, batch: StepTensors, cache: KvCache) -> Tensor:
        """Write the K/V of the batch's tokens into the cache; return logits [num_samples, vocab], float32."""
        hidden = self._embed.index_select(0, batch.input_ids).float() * self._embed_scale  # [rows, hidden]
        rotations = {rope: self._rotation(table, batch.positions) for rope, table in self._tables.items()}
        for index, layer in enumerate(self._layers):
            attended = self._attention(layer, index, hidden, rotations[layer.rope], batch, cache)
            hidden = hidden + self._normed(attended, layer.post_attn_norm)
            mixed = self._mlp(layer, hidden)
            hidden = hidden + self._normed(mixed, layer.post_mlp_norm)
        if not batch.num_samples:
            return hidden.new_empty(0, self.config.vocab_size)
        last = rms_norm(hidden.index_select(0, batch.sample_rows), self._final_norm, self.config.rms_norm_eps)
        return self._head(last.to(self.dtype))[: batch.num_samples].float()

    def _attention(
        self,
        layer: _Layer,
        index: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: StepTensors,
        cache: KvCache,
    ) -> Tensor:
        config, eps = self.config, self.config.rms_norm_eps
        num_q, num_kv = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(rms_norm(hidden, layer.attn_norm, eps).to(self.dtype))
        heads = qkv.view(-1, num_q + 2 * num_kv, config.head_dim)  # [rows, q heads, k heads, v heads; head_dim]
        qk = heads[:, : num_q + num_kv].float()
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat(
                (rms_norm(qk[:, :num_q], layer.q_norm, eps), rms_norm(qk[:, num_q:], layer.k_norm, eps)), 1
            )
        qk = rotate(qk, *rotation)
        q = (qk[:, :num_q] * config.attention_scale).to(self.dtype)
        keys = qk[: batch.num_tokens, num_q:].to(self.dtype)
        cache.write(index, batch.slot_mapping, keys, heads[: batch.num_tokens, num_q + num_kv :])
        mixed = paged_attention(q, cache, index, batch.attention[layer.window])  # [rows, num_heads, head_dim]
        return layer.attn_out(mixed.view(mixed.shape[0], -1)).float()

    def _mlp(self, layer: _Layer, hidden: Tensor) -> Tensor:
        normed = rms_norm(hidden, layer.mlp_norm, self.config.rms_norm_eps).to(self.dtype)
        gate, up = layer.gate_up(normed).float().chunk(2, -1)  # [rows, intermediate] each
        return layer.down((self._act(gate) * up).to(self.dtype)).float()

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else rms_norm(x, weight, self.config.rms_norm_eps)

    def _read_layer(self, reader: WeightReader, layer: int) -> _Layer:
        def vector(role: str) -> Tensor | None:
            return reader.read(role, layer).to(self.device) if (role, layer) in reader else None

        def norm(role: str) -> Tensor:
            return reader.read(role, layer).to(self.device)

        def linear(*roles: str) -> Linear:
            weight = reader.read_rows(roles, layer)
            assert weight is not None
            bias = reader.read_rows(tuple(f"{role}_bias" for role in roles), layer)
            return Linear(
                weight.to(self.device, self.dtype), None if bias is None else bias.to(self.device, self.dtype)
            )

        return _Layer(
            attn_norm=norm("attn_norm"),
            qkv=linear("q", "k", "v"),
            q_norm=vector("q_norm"),
            k_norm=vector("k_norm"),
            attn_out=linear("attn_out"),
            post_attn_norm=vector("post_attn_norm"),
            mlp_norm=norm("mlp_norm"),
            gate_up=linear("gate", "up"),
            down=linear("down"),
            post_mlp_norm=vector("post_mlp_norm"),
            window=self.config.layer_windows[layer],
            rope=self.config.rope_of(layer),
        )

    def _rope_table(self, rope: Rope, max_positions: int) -> tuple[Tensor, Tensor]:
        cos, sin = rope_tables(rope, self.config.head_dim, max_positions)
        return torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device)

    @staticmethod
    def _rotation(table: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) as `rotate` wants them, [rows, 1, head_dim]."""
        cos, sin = (half.index_select(0, positions)[:, None] for half in table)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def _measure_counts(self) -> RowCounts:
        """The numbers of rows on which all linears of the layers agree; every shape is measured once."""
        linears = [linear for layer in self._layers for linear in layer.linears]
        by_shape = {(linear.out_features, linear.in_features): linear for linear in linears}
        counts = reduce(RowCounts.common, (linear.measure(_MAX_ROWS) for linear in by_shape.values()))
        for linear in linears:
            linear.counts = counts
        return counts

    def _decode_rows(self) -> int:
        """Rows of the attention products for a single token: few, if that gives the bits of a full tile."""
        config, group = self.config, self.config.num_heads // self.config.num_kv_heads
        full, few = PREFILL_TILE * group, -(-group // 4) * 4
        for inner, columns in ((config.head_dim, CHUNK), (CHUNK, config.head_dim)):
            pairs = [cancelling(full, columns, inner, self.dtype) for _ in range(4)]
            left, right = (torch.stack(side).to(self.device) for side in zip(*pairs, strict=True))
            expected = torch.bmm(left, right.transpose(1, 2))
            for part in (slice(0, few), slice(full - few, full)):
                if not torch.equal(expected[:, part], torch.bmm(left[:, part], right.transpose(1, 2))):
                    return full
        return few


def model_windows(config: ModelConfig) -> frozenset[int]:
    return frozenset(config.layer_windows)
