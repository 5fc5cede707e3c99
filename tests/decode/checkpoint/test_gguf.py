"""Opening GGUF files: the header, what the metadata means, and every refusal."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.config import CheckpointError, Rope
from decode.checkpoint.gguf import GgufTokenizer
from decode.checkpoint.gguf_file import read_gguf
from decode.checkpoint.stored import BLOCKS
from tests.decode.tiny_models import tiny_weights, write_gguf
from tests.models import smollm2_path


def header(*fields: tuple[str, int, bytes], num_tensors: int = 0, version: int = 3) -> bytes:
    body = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in fields)
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(fields)) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return path


def test_reads_every_kind_of_metadata(tmp_path: Path) -> None:
    fields = [
        ("u8", 0, b"\xff"),
        ("i8", 1, b"\xff"),
        ("u16", 2, b"\xff\xff"),
        ("i16", 3, b"\xff\xff"),
        ("u32", 4, b"\xff" * 4),
        ("i32", 5, b"\xff" * 4),
        ("f32", 6, struct.pack("<f", 0.5)),
        ("yes", 7, b"\1"),
        ("text", 8, text("käse")),
        ("numbers", 9, struct.pack("<IQ", 5, 2) + struct.pack("<ii", -1, 2)),
        ("texts", 9, struct.pack("<IQ", 8, 2) + text("a") + text("")),
        ("nested", 9, struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 0, 1) + b"\7"),
        ("u64", 10, b"\xff" * 8),
        ("i64", 11, b"\xff" * 8),
        ("f64", 12, struct.pack("<d", 0.25)),
    ]
    assert read_gguf(write(tmp_path, header(*fields))).metadata == {
        "u8": 255,
        "i8": -1,
        "u16": 65535,
        "i16": -1,
        "u32": 2**32 - 1,
        "i32": -1,
        "f32": 0.5,
        "yes": True,
        "text": "käse",
        "numbers": [-1, 2],
        "texts": ["a", ""],
        "nested": [[7]],
        "u64": 2**64 - 1,
        "i64": -1,
        "f64": 0.25,
    }


def nested(depth: int) -> bytes:
    return b"".join(struct.pack("<IQ", 9, 1) for _ in range(depth)) + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GGML", "not a GGUF file"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (header(("a", 13, b"")), "unknown kind 13"),
        (header(("a", 8, struct.pack("<Q", 2**60))), "truncated"),
        (header(("a", 9, struct.pack("<IQ", 5, 2**60))), "truncated"),
        (header(("a", 9, struct.pack("<IQ", 8, 2**60))), "truncated"),
        (header(("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 9) + b"abc")), "truncated"),
        (header(("a", 9, nested(9))), "nested deeper"),
        (header(("a", 8, struct.pack("<Q", 1) + b"\xff")), "not UTF-8"),
        (header(("general.alignment", 4, bytes(4))), "general.alignment is 0"),
        (header(num_tensors=2**60), "truncated"),
    ],
)
def test_refuses_a_damaged_header(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf(write(tmp_path, data))
    assert "model.gguf" in str(caught.value)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    data = write_gguf("llama", tmp_path / "whole.gguf").read_bytes()
    for size in [*range(4, 400, 7), len(data) // 2, len(data) - 1]:
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(write(tmp_path, data[:size]))


def test_an_empty_file_is_no_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(write(tmp_path, b""))


@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if not kind.endswith("_K")])
def test_values_are_near_what_was_stored(kind: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf("llama", tmp_path / "model.gguf", quantisation=kind))
    stored = checkpoint.tensors["blk.1.ffn_up.weight"]
    wanted = tiny_weights("llama", checkpoint.config)["model.layers.1.mlp.up_proj.weight"]
    bits = {"F32": 32, "F16": 11, "BF16": 8, "Q8_0": 7}.get(kind, int(kind[1]) - 1 if kind[0] == "Q" else 0)
    assert stored.type == kind
    np.testing.assert_allclose(stored.values(), wanted, atol=1.3 * float(np.abs(wanted).max()) / 2**bits)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_super_blocks_are_read_as_whole_rows(kind: str, tmp_path: Path) -> None:
    from decode.checkpoint.stored import StoredTensor

    values, size = BLOCKS[kind]
    path = write(tmp_path, bytes(16 + 3 * 2 * size))
    tensor = StoredTensor("w", path, kind, (3, 2 * values), 16)
    assert tensor.rows().shape == (3, 2 * size)
    np.testing.assert_array_equal(tensor.values(), np.zeros((3, 512), np.float32))


def test_quantised_rows_stay_reachable_as_they_are_stored(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "model.gguf", quantisation="Q4_1")
    tensor = open_checkpoint(path).tensors["blk.0.ffn_down.weight"]
    rows = tensor.rows()
    assert rows.shape == (96, 160 // 32 * 20)
    assert path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes] == rows.tobytes()


def test_reads_the_tokenizer(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ messages }}"}
    checkpoint = open_checkpoint(write_gguf("qwen3", tmp_path / "model.gguf", metadata=extra))
    assert checkpoint.tokenizer == GgufTokenizer(
        kind="gpt2",
        pre="default",
        tokens=[f"<{i}>" for i in range(320)],
        token_types=[1] * 320,
        merges=["a b"],
        scores=None,
        add_bos_token=True,
        add_space_prefix=None,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=None,
        padding_token_id=None,
    )
    assert (checkpoint.bos_token_id, checkpoint.chat_template) == (1, "{{ messages }}")


def test_control_tokens_with_a_known_name_end_an_answer_too(tmp_path: Path) -> None:
    tokens = [f"<{i}>" for i in range(320)]
    tokens[9], tokens[11] = "<end_of_turn>", "<|im_end|>"
    types = [1] * 320
    types[9] = 3  # token 11 has the name but is ordinary text
    extra = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eot_token_id": 5,
    }
    assert open_checkpoint(write_gguf("llama", tmp_path / "m.gguf", metadata=extra)).eos_token_ids == (2, 5, 9)


def test_gemma3_has_a_global_layer_after_every_five(tmp_path: Path) -> None:
    config = open_checkpoint(write_gguf("gemma3", tmp_path / "model.gguf")).config
    assert config.layer_windows == (24, 24, 24, 24, 24, 0)
    assert config.rope == Rope(1e6, linear_factor=8.0)
    assert config.local_rope == Rope(1e4)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"general.architecture": "mamba"}, "unknown architecture 'mamba'"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count differs"),
        ({"llama.attention.value_length": 8}, "attention.value_length differs"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 4}, r"tensor blk\.3\.attn_norm\.weight is missing"),
        ({"llama.feed_forward_length": 192}, r"blk\.0\.ffn_gate\.weight has shape \[160, 96\]"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.scores": [0.5]}, "scores has 1 entries for 320 tokens"),
    ],
)
def test_refuses_metadata_it_cannot_run(extra: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "model.gguf", metadata=extra)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_names_a_tensor_of_an_unsupported_type(tmp_path: Path) -> None:
    path = write_gguf("llama", tmp_path / "model.gguf", quantisation="Q4_0")
    data = path.read_bytes()
    name = text("blk.0.ffn_up.weight")
    at = data.index(name) + len(name) + 4 + 16  # behind the number of dimensions and both of them
    path.write_bytes(data[:at] + struct.pack("<I", 17) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up\.weight has the unsupported type IQ2_XS"):
        open_checkpoint(path)


def test_opens_the_default_model_in_well_under_a_second() -> None:
    start = time.process_time()
    checkpoint = open_checkpoint(smollm2_path())
    assert time.process_time() - start < 1.0  # 0.1 s here; the gguf package's reader takes 3.4
    assert (checkpoint.config.num_layers, checkpoint.eos_token_ids) == (30, (2, 0))
