"""Opening Hugging Face directories: what is read, and every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from decode.checkpoint.checkpoint import open_checkpoint
from decode.checkpoint.config import CheckpointError, Llama3Scaling, ModelConfig, Rope
from decode.checkpoint.hf import HfTokenizerFiles, hf_config
from tests.decode.tiny_models import CONFIGS, open_tiny, write_hf


def config_of(name: str, **changes: Any) -> ModelConfig:
    return hf_config(Path("somewhere"), CONFIGS[name] | changes, {})


def test_reads_sizes_and_defaults() -> None:
    config = config_of("llama", num_key_value_heads=None, head_dim=None)
    assert (config.family, config.num_kv_heads, config.head_dim, config.max_model_len) == ("llama", 6, 16, 512)


def test_reads_llama3_rope_scaling() -> None:
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 128)
    assert config_of("llama3-rope").rope == Rope(5e3, llama3=scaling)


def test_reads_rope_scaling_in_its_older_form() -> None:
    config = config_of("llama", rope_theta=7e3, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.rope == Rope(7e3, linear_factor=2.0)


def test_reads_both_rope_bases_of_gemma3_in_their_older_form() -> None:
    config = config_of("gemma3", rope_parameters=None, rope_theta=2e6, rope_local_base_freq=3e4)
    assert (config.rope, config.local_rope) == (Rope(2e6), Rope(3e4))
    assert config.rope_of(0) == Rope(3e4)
    assert config.rope_of(5) == Rope(2e6)


def test_gemma3_layers_follow_the_pattern_when_no_types_are_given() -> None:
    config = config_of("gemma3", layer_types=None, sliding_window_pattern=3)
    assert config.layer_windows == (24, 24, 0, 24, 24, 0)


def test_mistral_uses_its_window_in_every_layer() -> None:
    assert config_of("mistral").layer_windows == (40, 40, 40)


def test_qwen_uses_no_window_unless_told_to() -> None:
    assert config_of("qwen2", sliding_window=64).layer_windows == (0, 0, 0)


def test_qwen_uses_its_window_after_the_first_layers() -> None:
    config = config_of("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=2)
    assert config.layer_windows == (0, 0, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "unknown architecture 'mamba'"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 7}, "rope_scaling must be an object"),
        ({"rope_scaling": CONFIGS["llama3-rope"]["rope_parameters"] | {"high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"layer_types": ["linear_attention"] * 3}, "layer types"),
        ({"layer_types": ["full_attention"] * 2}, "2 layer types for 3 layers"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must not be 0"),
        ({"hidden_size": "96"}, "hidden_size must be a whole number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"model_type": 3}, "model_type must be text"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
)
def test_refuses_a_configuration_it_cannot_run(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        config_of("llama", **changes)
    assert "somewhere/config.json" in str(caught.value)


def test_sharded_and_single_files_hold_the_same_tensors(tmp_path: Path) -> None:
    single = open_tiny("qwen3", tmp_path / "single")
    sharded = open_tiny("qwen3", tmp_path / "sharded", num_shards=3)
    assert {tensor.path.name for tensor in sharded.tensors.values()} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    for name, tensor in single.tensors.items():
        np.testing.assert_array_equal(tensor.values(), sharded.tensors[name].values())


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_reads_half_precision_values(dtype: str, tmp_path: Path) -> None:
    values = np.asarray([[1.5, -2.0, 0.25]], np.float32)
    stored = values.astype(np.float16) if dtype == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
    header = json.dumps({"w": {"dtype": dtype, "shape": [1, 3], "data_offsets": [0, 6]}}).encode()
    directory = write_hf("llama", tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + stored.tobytes())
    from decode.checkpoint.hf import read_safetensors

    np.testing.assert_array_equal(read_safetensors(directory)["w"].values(), values)


def test_names_a_missing_tensor(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path)
    from decode.checkpoint.hf import read_safetensors

    kept = {
        name: tensor.values()
        for name, tensor in read_safetensors(directory).items()
        if name != "model.layers.1.mlp.up_proj.weight"
    }
    save_file(kept, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        open_checkpoint(directory)


def test_names_a_tensor_of_the_wrong_shape(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path)
    raw = CONFIGS["llama"] | {"intermediate_size": 161}
    (directory / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight has shape \[160, 96\], .* needs \[161, 96\]"):
        open_checkpoint(directory)


def test_refuses_a_truncated_weight_file(tmp_path: Path) -> None:
    file = write_hf("llama", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x04\0\0\0\0\0\0\0{]}}", b"\x09\0\0\0\0\0\0\0" + b'{"w": {}}']
)
def test_refuses_a_damaged_weight_file(content: bytes, tmp_path: Path) -> None:
    (write_hf("llama", tmp_path) / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_names_a_missing_file(file: str, tmp_path: Path) -> None:
    (write_hf("llama", tmp_path) / file).unlink()
    with pytest.raises(CheckpointError, match=f"{file}: missing"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_refuses_a_configuration_that_is_no_json_object(text: str, tmp_path: Path) -> None:
    (write_hf("llama", tmp_path) / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        open_checkpoint(tmp_path)


def test_refuses_an_index_that_names_a_file_outside_the_directory(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path, num_shards=2)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../secret"}}')
    with pytest.raises(CheckpointError, match="not a file name"):
        open_checkpoint(directory)


def test_refuses_an_index_whose_tensor_is_not_in_its_file(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path, num_shards=2)
    index = directory / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="tensor extra is missing"):
        open_checkpoint(directory)


def test_refuses_a_path_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or directory"):
        open_checkpoint(tmp_path / "nothing")


def test_generation_config_decides_which_tokens_end_an_answer(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path)
    assert open_checkpoint(directory).eos_token_ids == (2,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert open_checkpoint(directory).eos_token_ids == (7, 9)


def test_refuses_an_eos_id_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        open_tiny("llama", tmp_path, eos_token_id="</s>")


def test_template_comes_from_its_file_before_the_tokenizer_configuration(tmp_path: Path) -> None:
    directory = write_hf("llama", tmp_path)
    assert open_checkpoint(directory).chat_template is None
    templates = [{"name": "tools", "template": "no"}, {"name": "default", "template": "listed"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_checkpoint(directory).chat_template == "listed"
    (directory / "chat_template.jinja").write_text("from file")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.chat_template == "from file"
    assert checkpoint.tokenizer == HfTokenizerFiles(directory / "tokenizer.json", {"chat_template": templates})


def test_content_hash_changes_with_a_weight_and_with_the_configuration(tmp_path: Path) -> None:
    one = open_tiny("llama", tmp_path / "one")
    same = open_tiny("llama", tmp_path / "same")
    other_config = open_tiny("llama", tmp_path / "config", rope_theta=5e4)
    file = write_hf("llama", tmp_path / "weight") / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other_weight = open_checkpoint(file.parent)
    hashes = [checkpoint.content_hash() for checkpoint in (one, same, other_config, other_weight)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_opening_reaches_neither_torch_nor_the_gguf_package() -> None:
    code = "import sys, decode.checkpoint.checkpoint; print(sorted({'torch', 'gguf'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
