"""The two file conventions hold the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode.checkpoint.checkpoint import open_checkpoint
from decode.oracle.weights import WeightReader
from tests.decode.decoding import RecordingRunner, generate
from tests.decode.tiny_models import open_tiny, write_gguf


@pytest.mark.parametrize("name", ["llama", "llama-linear-bias", "qwen2", "qwen3", "gemma3"])
def test_a_gguf_file_decodes_like_the_directory_it_was_made_from(name: str, tmp_path: Path) -> None:
    prompt = [7, 300, 21, 4, 99] * 9
    runners = [
        RecordingRunner(checkpoint, kv_cache_tokens=256)
        for checkpoint in (
            open_tiny(name, tmp_path / "hf", query_pre_attn_scalar=None),
            open_checkpoint(write_gguf(name, tmp_path / "model.gguf")),
        )
    ]
    tokens = [generate(runner, prompt) for runner in runners]
    assert tokens[0] == tokens[1]
    # bit for bit, but for the epsilon, which GGUF keeps in single precision
    torch.testing.assert_close(runners[0].rows["only", 0], runners[1].rows["only", 0], rtol=1e-5, atol=1e-5)


def test_rope_factors_stored_in_a_gguf_file_are_used(tmp_path: Path) -> None:
    import gguf
    import numpy as np

    from tests.decode.tiny_models import tiny_weights

    plain = open_checkpoint(write_gguf("llama", tmp_path / "plain.gguf"))
    writer_tensors = {"rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    original = gguf.GGUFWriter.write_header_to_file

    def with_factors(self: gguf.GGUFWriter) -> None:
        for key, values in writer_tensors.items():
            self.add_tensor(key, values)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        scaled = open_checkpoint(write_gguf("llama", tmp_path / "scaled.gguf"))
    assert plain.config.rope.frequency_factors == ()
    assert scaled.config.rope.frequency_factors == tuple(writer_tensors["rope_freqs.weight"].tolist())
    assert tiny_weights("llama", plain.config).keys() == tiny_weights("llama", scaled.config).keys()


def test_progress_is_told_of_every_tensor(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_tiny("llama-linear-bias", tmp_path)
    RecordingRunner(checkpoint, kv_cache_tokens=64, progress=lambda done, total: seen.append((done, total)))
    total = len(checkpoint.tensors)
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_norms_of_gemma3_directories_are_stored_minus_one(tmp_path: Path) -> None:
    checkpoint = open_tiny("gemma3", tmp_path)
    stored = torch.from_numpy(checkpoint.tensors["model.norm.weight"].values())
    torch.testing.assert_close(WeightReader(checkpoint).read("final_norm"), stored + 1)
