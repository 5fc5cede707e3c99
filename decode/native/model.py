"""The native decoder as a Python object: the C structures mirrored, filled from a checkpoint, and one step called.

Owns the pointers and everything they point to. Does not plan: it executes arrays. ctypes releases the interpreter
lock during a step. Structures mirror native/model.hpp field by field.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_double, c_float, c_int32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from decode.checkpoint.config import ModelConfig, Rope
from decode.checkpoint.families import FAMILIES
from decode.checkpoint.rope import rope_tables
from decode.engine.sampling import MAX_LOGPROBS
from decode.native.build import NativeUnavailable
from decode.native.weights import Matrix, NativeWeights

PHASES = ("embed", "norm", "qkv", "append", "attend", "attn_out", "gate_up", "down", "head", "sample")
"""What a step consists of, as native/team.hpp numbers it."""
CACHE_BLOCK = 16
"""Tokens in a cache block; the engine's block size must be this."""
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}


class _Linear(Structure):
    _fields_: ClassVar[Any] = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
    ]


_LAYER_LINEARS = ("q", "k", "v", "attn_out", "gate", "up", "down")
_LAYER_VECTORS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")


class _Layer(Structure):
    _fields_: ClassVar[Any] = [
        *((name, _Linear) for name in _LAYER_LINEARS),
        *((name, c_void_p) for name in (*_LAYER_VECTORS, "cos", "sin")),
        ("window", c_int32),
        ("reserved", c_int32),
    ]


_MODEL_SIZES = (
    "vocab", "hidden", "inner", "num_layers", "heads", "kv_heads", "head_dim", "max_positions", "activation"
)  # fmt: skip


class _Model(Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_int32) for name in _MODEL_SIZES),
        *((name, c_float) for name in ("eps", "attention_scale", "embed_scale")),
        ("embed", _Linear),
        ("head", _Linear),
        ("final_norm", c_void_p),
        ("layers", POINTER(_Layer)),
    ]


class _Limits(Structure):
    _fields_: ClassVar[Any] = [(name, c_int32) for name in ("num_blocks", "max_rows", "max_samples", "num_threads")]


class Sampling(Structure):
    """How one sampled row chooses: mirrors `SamplingParams`, with its draw made.

    `num_logprobs` and `mask` are -1 where there are none.
    """

    _fields_: ClassVar[Any] = [
        ("uniform", c_double),
        *((name, c_float) for name in ("temperature", "top_p", "min_p")),
        *((name, c_int32) for name in ("top_k", "first_banned", "num_banned", "first_adjusted", "num_adjusted")),
        *((name, c_int32) for name in ("num_logprobs", "mask")),
    ]


LOGPROBS = np.dtype(
    [("chosen", np.float32), ("top", np.float32, MAX_LOGPROBS), ("top_tokens", np.int32, MAX_LOGPROBS)]
)
"""The log probabilities of one sampled row; of `top` as many are filled as the row asked for."""


class Step(Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_int32) for name in ("num_seqs", "num_rows", "num_samples")),
        *(
            (name, c_void_p)
            for name in (
                "token_ids", "row_starts", "first_positions", "table_starts", "block_tables", "sample_rows",
                "samplings", "banned", "adjusted", "adjustments", "masks", "logprobs", "tokens", "logits",
            )
        ),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepArrays:
    """One step as flat int32 arrays; a sequence's rows are consecutive, its block table reaches its last row."""

    token_ids: array[int]
    row_starts: array[int]
    """[num_seqs + 1]"""
    first_positions: array[int]
    """[num_seqs]: the position of each sequence's first row."""
    table_starts: array[int]
    """[num_seqs]: where each block table begins in `block_tables`."""
    block_tables: array[int]
    sample_rows: array[int]
    """Rows whose logits give a token, rising."""
    samplings: Sequence[Sampling] = ()
    """One for every sampled row; empty: all greedy."""
    banned: array[int] = field(default_factory=lambda: array("i"))
    """Token ids that `samplings` refer to."""
    adjusted: array[int] = field(default_factory=lambda: array("i"))
    adjustments: array[float] = field(default_factory=lambda: array("f"))
    """[len(adjusted)]: what is added to the logit of each; `samplings` refer to these as well."""
    masks: Callable[[], npt.NDArray[np.int32]] | None = None
    """Gives the masks that `samplings` refer to, [masks, vocab / 32 rounded up]; called when all logits are there."""
    logprobs: npt.NDArray[np.void] | None = None
    """[num_samples] of LOGPROBS: where the rows that want log probabilities get them."""


def check_supported(config: ModelConfig) -> None:
    """Raises NativeUnavailable naming the size that the kernels cannot handle."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % 32:
            raise NativeUnavailable(f"{name} {getattr(config, name)} is not a multiple of 32")
    if config.head_dim > 256:
        raise NativeUnavailable(f"head_dim {config.head_dim} is above 256")
    if config.num_heads // config.num_kv_heads > 48:
        raise NativeUnavailable(f"{config.num_heads // config.num_kv_heads} heads share one key/value head, above 48")


class NativeDecoder:
    """A model in memory with its paged cache. One thread calls `step`."""

    def __init__(
        self,
        library: Path,
        config: ModelConfig,
        weights: NativeWeights,
        *,
        num_blocks: int,
        max_rows: int,
        max_samples: int,
        max_positions: int,
        num_threads: int,
    ) -> None:
        """Raises NativeUnavailable: sizes that the kernels cannot handle, or not enough memory."""
        check_supported(config)
        self.vocab_size = config.vocab_size
        self._config = config
        self.num_blocks, self.max_rows, self.max_samples = num_blocks, max_rows, max_samples
        self._weights = weights
        self._tables: dict[Rope, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}
        self._lib = ctypes.CDLL(str(library))
        self._lib.tokenferry_decoder_create.restype = c_void_p
        self._lib.tokenferry_decoder_profile.argtypes = [c_void_p, c_int32, c_void_p]
        self._lib.tokenferry_decoder_destroy.argtypes = [c_void_p]
        self._lib.tokenferry_decoder_step.argtypes = [c_void_p, POINTER(Step)]
        self._lib.tokenferry_decoder_choose_masked.argtypes = [c_void_p, POINTER(Step)]
        layers = (_Layer * config.num_layers)(
            *(self._layer(config, index, max_positions) for index in range(config.num_layers))
        )
        embed = self._linear("embed", None)
        model = _Model(
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            num_layers=config.num_layers,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_positions=max_positions,
            activation=_ACTIVATIONS[config.hidden_act],
            eps=config.rms_norm_eps,
            attention_scale=config.attention_scale,
            embed_scale=math.sqrt(config.hidden_size) if FAMILIES[config.family].scaled_embeddings else 1.0,
            embed=embed,
            head=embed if config.tie_word_embeddings else self._linear("head", None),
            final_norm=_address(weights.vectors["final_norm", None]),
            layers=layers,
        )
        limits = _Limits(num_blocks, max_rows, max_samples, num_threads)
        self._decoder = self._lib.tokenferry_decoder_create(byref(model), byref(limits))
        if not self._decoder:
            raise NativeUnavailable(f"not enough memory for {num_blocks} cache blocks, or no threads to be had")

    def close(self) -> None:
        """Free the cache and end the threads. May be called twice."""
        if self._decoder:
            self._lib.tokenferry_decoder_destroy(self._decoder)
            self._decoder = None

    def step(
        self, arrays: StepArrays, *, with_logits: bool = False
    ) -> tuple[array[int], npt.NDArray[np.float32] | None]:
        """Run the rows, write their K/V; the token of every sampled row, and logits [samples, vocab] if asked."""
        num_samples = len(arrays.sample_rows)
        tokens = array("i", bytes(4 * num_samples))
        logits = np.empty((num_samples, -(-self.vocab_size // 16) * 16), np.float32) if with_logits else None
        samplings = (Sampling * num_samples)(*arrays.samplings) if arrays.samplings else None
        step = Step(
            num_seqs=len(arrays.first_positions),
            num_rows=len(arrays.token_ids),
            num_samples=num_samples,
            token_ids=arrays.token_ids.buffer_info()[0],
            row_starts=arrays.row_starts.buffer_info()[0],
            first_positions=arrays.first_positions.buffer_info()[0],
            table_starts=arrays.table_starts.buffer_info()[0],
            block_tables=arrays.block_tables.buffer_info()[0],
            sample_rows=arrays.sample_rows.buffer_info()[0],
            samplings=ctypes.cast(samplings, c_void_p) if samplings is not None else None,
            banned=arrays.banned.buffer_info()[0],
            adjusted=arrays.adjusted.buffer_info()[0],
            adjustments=arrays.adjustments.buffer_info()[0],
            logprobs=None if arrays.logprobs is None else arrays.logprobs.ctypes.data,
            tokens=tokens.buffer_info()[0],
            logits=None if logits is None else logits.ctypes.data,
        )
        assert self._decoder
        assert step.num_rows <= self.max_rows
        assert num_samples <= self.max_samples
        self._lib.tokenferry_decoder_step(self._decoder, byref(step))
        if arrays.masks is not None:
            masks = arrays.masks()
            step.masks = masks.ctypes.data
            self._lib.tokenferry_decoder_choose_masked(self._decoder, byref(step))
        return tokens, None if logits is None else logits[:, : self.vocab_size]

    def profile(self, *, on: bool) -> dict[str, tuple[float, float]]:
        """Time the phases of the steps from now on, or no longer.

        Returns the seconds since the last call that the calling thread worked in each phase and waited for others.
        """
        assert self._decoder
        seconds = (c_double * (2 * len(PHASES)))()
        self._lib.tokenferry_decoder_profile(self._decoder, on, byref(seconds))
        return {phase: (seconds[2 * i], seconds[2 * i + 1]) for i, phase in enumerate(PHASES)}

    def step_bytes(self, num_cached_tokens: int) -> tuple[int, int]:
        """Bytes that a step reads at least: of weights, when it samples, and of the cache."""
        weights = sum(matrix.data.nbytes for (role, _), matrix in self._weights.matrices.items() if role != "embed")
        token_bytes = 2 * (self._config.head_dim + 4) * self._config.num_kv_heads * self._config.num_layers
        if ("head", None) not in self._weights.matrices:
            weights += self._weights.matrices["embed", None].data.nbytes
        return weights, num_cached_tokens * token_bytes

    def _layer(self, config: ModelConfig, index: int, max_positions: int) -> _Layer:
        rope = config.rope_of(index)
        if rope not in self._tables:
            self._tables[rope] = rope_tables(rope, config.head_dim, max_positions)
        cos, sin = self._tables[rope]
        vectors = {name: _address(self._weights.vectors.get((name, index))) for name in _LAYER_VECTORS}
        linears = {name: self._linear(name, index) for name in _LAYER_LINEARS}
        window = config.layer_windows[index]
        return _Layer(**linears, **vectors, cos=_address(cos), sin=_address(sin), window=window)

    def _linear(self, role: str, layer: int | None) -> _Linear:
        return linear_of(self._weights.matrices[role, layer], self._weights.vectors.get((f"{role}_bias", layer)))


def linear_of(matrix: Matrix, bias: npt.NDArray[np.float32] | None) -> _Linear:
    """The C structure that points into both; it keeps neither alive."""
    return _Linear(_address(matrix.data), _address(bias), matrix.kind, matrix.n, matrix.k)


def _address(values: npt.NDArray[Any] | None) -> int | None:
    return None if values is None else values.ctypes.data
