"""Every native kernel against a few lines of numpy, from both instruction sets, which must agree bit for bit."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decode.checkpoint.stored import BLOCKS, StoredTensor
from decode.engine.sampling import LogitAdjustments, SamplingParams, uniform
from decode.native.model import LOGPROBS, Sampling, Step, linear_of
from decode.native.pack import BLOCK, pack
from decode.native.weights import Matrix
from decode.oracle.sampler import SampleRow
from decode.oracle.sampler import sample as sample_rows
from tests.decode.native.reference import library

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0", "Q6_K")


@pytest.fixture(params=[False, True], ids=["native", "portable"])
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return ctypes.CDLL(str(library(portable=request.param)))


def floats(values: Any) -> Any:
    return np.ascontiguousarray(values, np.float32)


def pointer(values: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def stored(folder: Path, kind: str, n: int, k: int) -> StoredTensor:
    """A tensor of random blocks: whatever the bytes are, they mean some weights."""
    random = np.random.default_rng(11)
    values, size = BLOCKS[kind]
    blocks = random.integers(0, 256, (n * k // values, size), np.uint8)
    halves = {"Q4_0": 1, "Q5_0": 1, "Q8_0": 1, "Q4_1": 2, "Q4_K": 2}.get(kind, 0)
    if halves:
        scales = random.uniform(-0.1, 0.1, (len(blocks), halves)).astype(np.float16)
        blocks[:, : 2 * halves] = scales.view(np.uint8)
    elif kind == "Q6_K":
        blocks[:, -2:] = random.uniform(-0.01, 0.01, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    elif kind == "BF16":
        blocks = (
            (random.standard_normal(n * k).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        )
    else:
        dtype = np.float32 if kind == "F32" else np.float16
        blocks = random.standard_normal(n * k).astype(dtype).view(np.uint8)
    path = folder / "tensor"
    path.write_bytes(blocks.tobytes())
    return StoredTensor("tensor", path, kind, (n, k), 0)


def matrix(tensor: StoredTensor) -> Matrix:
    packed = pack(tensor)
    return Matrix(packed.kind, packed.n, packed.k, packed.data)


def linear(lib: ctypes.CDLL, w: Matrix, x: Any) -> Any:
    out = np.empty((len(x), -(-w.n // 16) * 16), np.float32)
    lib.tokenferry_linear(ctypes.byref(linear_of(w, None)), pointer(x), len(x), pointer(out))
    return out[:, : w.n]


@pytest.mark.parametrize("kind", TYPES)
def test_packed_weights_mean_what_the_stored_ones_mean(lib: ctypes.CDLL, tmp_path: Path, kind: str) -> None:
    tensor = stored(tmp_path, kind, 40, 256)
    w, wanted = matrix(tensor), tensor.values()
    row = np.empty(256, np.float32)
    step = np.abs(wanted).reshape(40, -1, BLOCK).max(-1).repeat(BLOCK, -1) / 127  # of an 8-bit block
    for channel in range(40):
        lib.tokenferry_dequantize(ctypes.byref(linear_of(w, None)), channel, pointer(row))
        if kind in ("Q4_0", "Q4_1", "Q8_0"):
            np.testing.assert_allclose(row, wanted[channel], rtol=1e-6, atol=1e-6)
        elif kind == "Q4_K":
            np.testing.assert_allclose(row, wanted[channel], rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
        else:
            assert (np.abs(row - wanted[channel]) <= 0.6 * step[channel] + 1e-6).all()


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_linear_is_the_product_with_quantised_activations(lib: ctypes.CDLL, tmp_path: Path, kind: str) -> None:
    tensor = stored(tmp_path, kind, 48, 320)
    x = floats(np.random.default_rng(1).standard_normal((5, 320)) * 3)
    blocks = x.reshape(5, -1, BLOCK)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    rounded = (np.rint(blocks / scale) * scale).reshape(5, 320)
    wanted = rounded.astype(np.float64) @ tensor.values().astype(np.float64).T
    np.testing.assert_allclose(linear(lib, matrix(tensor), x), wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(lib: ctypes.CDLL, tmp_path: Path, kind: str) -> None:
    w = matrix(stored(tmp_path, kind, 33, 128))
    x = floats(np.random.default_rng(2).standard_normal((37, 128)))
    wanted = np.concatenate([linear(lib, w, x[i : i + 1]) for i in range(37)])
    for count in range(1, 38):
        assert np.array_equal(linear(lib, w, x[:count]), wanted[:count])


def test_both_instruction_sets_give_the_same_bits(tmp_path: Path) -> None:
    x = floats(np.random.default_rng(3).standard_normal((9, 128)))
    libs = [ctypes.CDLL(str(library(portable=portable))) for portable in (False, True)]
    for kind in ("Q4_1", "Q8_0"):
        w = matrix(stored(tmp_path, kind, 33, 128))
        assert np.array_equal(linear(libs[0], w, x), linear(libs[1], w, x))
    queries, keys, values = attention_inputs(150, 7, 3, 64)
    outs = [attention(lib, queries, keys, values, 40) for lib in libs]
    assert np.array_equal(outs[0], outs[1])


def attention_inputs(tokens: int, rows: int, group: int, dim: int) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(4)
    shapes = ((rows, group, dim), (tokens, dim), (tokens, dim))
    queries, keys, values = (floats(random.standard_normal(shape)) for shape in shapes)
    return queries, keys, values


def attention(lib: ctypes.CDLL, queries: Any, keys: Any, values: Any, window: int) -> Any:
    rows, group, dim = queries.shape
    out = np.empty_like(queries)
    scale = ctypes.c_float(1.4426950408889634 / np.sqrt(dim))
    lib.tokenferry_attention(
        pointer(queries), pointer(keys), pointer(values), len(keys), rows, group, dim, window, scale, pointer(out)
    )
    return out


@pytest.mark.parametrize("window", [0, 1, 40, 1000])
@pytest.mark.parametrize(
    ("tokens", "rows", "group", "dim"), [(1, 1, 1, 32), (150, 7, 3, 64), (200, 1, 9, 128), (64, 16, 3, 256)]
)
def test_attention_is_close_to_its_definition(
    lib: ctypes.CDLL, tokens: int, rows: int, group: int, dim: int, window: int
) -> None:
    queries, keys, values = attention_inputs(tokens, rows, group, dim)
    age = np.arange(tokens - rows, tokens)[:, None, None] - np.arange(tokens)
    scores = np.where((age >= 0) & (age < (window or tokens)), queries @ keys.T / np.sqrt(dim), -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = share / share.sum(-1, keepdims=True) @ values
    np.testing.assert_allclose(attention(lib, queries, keys, values, window), wanted, atol=0.05)


def test_a_query_has_the_same_attention_bits_in_any_chunk(lib: ctypes.CDLL) -> None:
    queries, keys, values = attention_inputs(150, 16, 3, 64)
    for window in (0, 40):
        whole = attention(lib, queries, keys, values, window)
        for i in range(16):
            end = 150 - 15 + i
            alone = attention(lib, queries[i : i + 1].copy(), keys[:end].copy(), values[:end].copy(), window)
            assert np.array_equal(alone[0], whole[i])


@pytest.mark.parametrize("activation", [0, 1], ids=["silu", "gelu_tanh"])
def test_gated_activations_follow_their_formulas(lib: ctypes.CDLL, activation: int) -> None:
    gate = floats(np.concatenate([np.linspace(-200, 200, 496), np.linspace(-3, 3, 512)]))
    up = floats(np.full(len(gate), 1.5))
    out = np.empty_like(gate)
    lib.tokenferry_gated(pointer(gate), pointer(up), len(gate), activation, pointer(out))
    x = gate.astype(np.float64)
    inner = x if activation == 0 else 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    wanted = x / (1 + np.exp(-np.clip(inner, -80, 700))) * 1.5
    np.testing.assert_allclose(out, wanted, rtol=3e-6, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
def test_norm_and_rotation_follow_their_formulas(lib: ctypes.CDLL, normed: bool) -> None:
    random = np.random.default_rng(5)
    x, weight = floats(random.standard_normal(64)), floats(random.standard_normal(64))
    angle = random.uniform(0, 6, 32)
    cos, sin = floats(np.cos(angle)), floats(np.sin(angle))
    y = x / np.sqrt((x * x).mean() + 1e-5) * weight if normed else x
    wanted = np.concatenate([y[:32] * cos - y[32:] * sin, y[32:] * cos + y[:32] * sin])
    eps = ctypes.c_float(1e-5)
    lib.tokenferry_norm_rotate(pointer(x), 64, pointer(weight) if normed else None, eps, pointer(cos), pointer(sin))
    np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-6)


def sample(lib: ctypes.CDLL, logits: Any, *, banned: tuple[int, ...] = (), **changes: Any) -> int:
    options = {"uniform": 0.5, "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    sampling = Sampling(**(options | changes), num_banned=len(banned), num_logprobs=-1, mask=-1)
    padded = floats(np.concatenate([logits, np.full(-len(logits) % 16, 99.0)]))
    ids = np.array([*banned, 0], np.int32)
    step = Step(banned=ids.ctypes.data)
    return int(lib.tokenferry_sample(pointer(padded), len(logits), ctypes.byref(sampling), ctypes.byref(step), None))


def sample_changed(
    lib: ctypes.CDLL, logits: Any, sampling: SamplingParams, output: list[int], allowed: Any = None
) -> tuple[int, Any]:
    """The token after `output` and its log probabilities, with everything that changes logits."""
    adjustments = LogitAdjustments.of(sampling, output) or LogitAdjustments(sampling, ())
    row, padded = np.zeros((), LOGPROBS), floats(np.concatenate([logits, np.full(-len(logits) % 16, 99.0)]))
    ids, values = np.array(adjustments.token_ids, np.int32), np.array(adjustments.values, np.float32)
    mask = np.packbits(np.ones(len(logits), bool) if allowed is None else allowed, bitorder="little")
    mask = np.pad(mask, (0, -len(mask) % 4))
    native = Sampling(
        uniform=uniform(sampling.seed, len(output)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        num_adjusted=len(ids),
        num_logprobs=-1 if sampling.num_logprobs is None else sampling.num_logprobs,
        mask=-1 if allowed is None else 0,
    )
    step = Step(adjusted=ids.ctypes.data, adjustments=values.ctypes.data, masks=mask.ctypes.data)
    pass_on = ctypes.byref(native), ctypes.byref(step), pointer(row)
    return int(lib.tokenferry_sample(pointer(padded), len(logits), *pass_on)), row


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_changed_logits_give_the_tokens_of_the_reference(lib: ctypes.CDLL, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    for case in range(60):
        logits = floats(random.standard_normal(vocab) * 3)
        output = random.integers(0, vocab, 9).tolist()
        sampling = SamplingParams(
            max_tokens=99,
            temperature=float(random.choice([0.0, 0.0, 0.7, 1.5])),
            top_p=float(random.choice([1.0, 0.8])),
            top_k=int(random.choice([0, 3])),
            seed=case,
            presence_penalty=float(random.choice([0.0, 1.5, -1.0])),
            frequency_penalty=float(random.choice([0.0, 0.7])),
            logit_bias=((output[0], 4.0), (vocab + 3, 100.0)),
            num_logprobs=int(random.choice([0, 4, 20])),
        )
        bits = random.random(vocab) < 0.3
        bits[random.integers(vocab)] = True
        allowed = bits if case % 2 else None
        token, row = sample_changed(lib, logits, sampling, output, allowed)
        changed = torch.from_numpy(logits.copy())
        if (
            allowed is not None
        ):  # the reference takes masks from a grammar; adding 0 to minus infinity changes nothing
            changed[torch.from_numpy(~allowed)] = -torch.inf
        reference = SampleRow(sampling, len(output), LogitAdjustments.of(sampling, output))
        assert token == sample_rows(changed[None], [reference]).token_ids[0]
        assert allowed is None or allowed[token]
        wanted = torch.from_numpy(logits).double().log_softmax(-1).numpy()
        number = min(sampling.num_logprobs or 0, vocab)
        np.testing.assert_allclose(row["chosen"], wanted[token], rtol=1e-6, atol=1e-6)
        likeliest = np.lexsort((np.arange(vocab), -logits))[:number]
        assert row["top_tokens"][:number].tolist() == likeliest.tolist()
        np.testing.assert_allclose(row["top"][:number], wanted[likeliest], rtol=1e-6, atol=1e-6)


def test_the_likeliest_tokens_come_with_ties_by_id(lib: ctypes.CDLL) -> None:
    logits = floats([1, 2, 1, 2, 1, 1] * 10)
    _, row = sample_changed(lib, logits, SamplingParams(max_tokens=1, temperature=0, num_logprobs=20), [])
    assert row["top_tokens"].tolist() == sorted(range(60), key=lambda token: (-logits[token], token))[:20]


def test_a_request_for_more_log_probabilities_than_there_are_gets_the_most(lib: ctypes.CDLL) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0, num_logprobs=1_000_000)
    token, row = sample_changed(lib, np.arange(100.0), sampling, [])
    assert (token, row["top_tokens"][19]) == (99, 80)


def kept(lib: ctypes.CDLL, logits: Any, **changes: Any) -> set[int]:
    return {sample(lib, logits, uniform=u, **changes) for u in np.linspace(0, 1, 400, endpoint=False)}


PROBABILITIES = np.array([0.05, 0.3, 0.0625, 0.3, 0.25, 0.0375])


def test_draws_invert_the_cumulative_distribution(lib: ctypes.CDLL) -> None:
    logits = np.random.default_rng(6).standard_normal(1000) * 2
    for temperature in (0.5, 1.0, 2.0):
        share = np.exp(logits / temperature)
        ends = np.cumsum(share / share.sum())
        for draw in (0.0, 0.1, 0.37, 0.5, 0.93, 0.99999):
            wanted = int(np.searchsorted(ends, draw, side="right"))
            assert sample(lib, logits, temperature=temperature, uniform=draw) == wanted


def test_filters_keep_the_tokens_that_reach_the_least_weight(lib: ctypes.CDLL) -> None:
    logits = np.log(PROBABILITIES)
    assert kept(lib, logits) == {0, 1, 2, 3, 4, 5}
    assert kept(lib, logits, top_k=2) == {1, 3}
    assert kept(lib, logits, top_k=1) == {1, 3}  # equals stay together
    assert kept(lib, logits, top_k=3) == {1, 3, 4}
    assert kept(lib, logits, top_k=100) == {0, 1, 2, 3, 4, 5}
    assert kept(lib, logits, top_p=0.7) == {1, 3, 4}
    assert kept(lib, logits, top_p=0.0001) == {1, 3}
    assert kept(lib, logits, top_k=3, top_p=0.71) == {1, 3, 4}
    assert kept(lib, logits, top_k=3, top_p=0.6) == {1, 3}
    assert kept(lib, logits, min_p=0.2) == {1, 2, 3, 4}
    assert kept(lib, logits, min_p=0.9, top_p=0.9) == {1, 3}


def test_a_banned_token_is_never_chosen(lib: ctypes.CDLL) -> None:
    logits = np.log(PROBABILITIES)
    assert sample(lib, logits, temperature=0.0) == 1
    assert sample(lib, logits, temperature=0.0, banned=(1,)) == 3
    assert kept(lib, logits, banned=(1, 4)) == {0, 2, 3, 5}


def test_logits_that_are_not_finite_give_no_token(lib: ctypes.CDLL) -> None:
    assert sample(lib, np.array([0.0, np.inf, 1.0])) == -1
    assert sample(lib, np.array([-np.inf, -np.inf])) == -1
