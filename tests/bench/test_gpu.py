"""The GPU run's logic, with the CPU in the place of the device and a tiny shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.parts import gpu
from bench.parts.gpu import (
    SHAPES,
    Agreement,
    Speed,
    agreement,
    check_exactness,
    engine_of,
    main,
    our_speed,
    prompts,
    report,
    require_gpu,
    run_alone,
    run_together,
    timed,
    write_checkpoint,
)
from decode.checkpoint.checkpoint import open_checkpoint

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def test_a_random_checkpoint_is_the_same_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_SHARD_BYTES", 100_000)
    one = write_checkpoint(SHAPES["tiny"], tmp_path / "one", "cpu")
    other = write_checkpoint(SHAPES["tiny"], tmp_path / "other", "cpu")
    assert len(list(one.glob("*.safetensors"))) > 2
    assert open_checkpoint(one).content_hash() == open_checkpoint(other).content_hash()
    third = write_checkpoint(SHAPES["tiny"], tmp_path / "third", "cpu", seed=1)
    assert open_checkpoint(third).content_hash() != open_checkpoint(one).content_hash()


@pytest.mark.parametrize(("shape", "low", "high"), [("0.6B", 0.55e9, 0.65e9), ("8B", 7.5e9, 8.5e9)])
def test_the_shapes_have_the_size_of_their_name(shape: str, low: float, high: float, tmp_path: Path) -> None:
    config = gpu.hf_config(tmp_path, SHAPES[shape], {})
    size = sum(torch.Size(spec.shape).numel() for spec in gpu.tensor_specs(config, "hf"))
    assert low < size < high


def test_random_weights_make_texts_that_differ(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(SHAPES["tiny"], tmp_path, "cpu"))
    wanted = prompts(4, 30, checkpoint.config.vocab_size)
    engine = engine_of(checkpoint, "fp32", "cpu", 4, 60)
    together = run_together(engine, wanted, 20)
    assert [len(tokens) for tokens in together] == [20] * 4
    assert len({tuple(tokens) for tokens in together}) == 4
    assert len(set(together[0])) > 5  # not one token over and over
    assert run_alone(engine, wanted, 20) == together


def test_a_device_that_computes_otherwise_is_found_out() -> None:
    assert agreement("x", [[1, 2], [3, 4]], [[1, 2], [3, 5]]) == Agreement("x", 1, 2)


def test_everything_is_exact_where_the_device_is_the_cpu(tmp_path: Path) -> None:
    found = check_exactness("cpu", tmp_path, num_prompts=3, num_tokens=8, variants=["fp32"])
    assert [one.what for one in found] == [
        "fp32: the device and the CPU",
        "fp32: alone and together",
        "fp32: whole prompts and chunks of 24",
    ]
    assert all(one.num_same == one.num_sequences == 3 for one in found)


def test_speed_is_measured_at_every_count_and_reported(tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], tmp_path, "cpu")
    speed = our_speed("tiny", tmp_path, "cpu", (1, 3), 4)
    assert list(speed.by_count) == [1, 3]
    assert all(isinstance(value, float) and value > 0 for value in speed.by_count.values())
    other = Speed("tiny", "transformers", {1: 12.0, 3: "out of memory (x)"})
    text = report("no card", "the command", [Agreement("fp32", 15, 16)], [speed, other])
    assert "| fp32 | 15 of 16 |" in text
    assert "| shape | engine | 1 sequences | 3 sequences |" in text
    assert "| tiny | transformers | 12 | out of memory (x) |" in text


def test_a_row_that_does_not_fit_says_so() -> None:
    def too_large() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert timed(1, 10, too_large) == "out of memory (CUDA out of memory)"


@NO_GPU
def test_without_a_gpu_it_refuses_and_says_what_is_missing() -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU that torch can use"):
        require_gpu()
    with pytest.raises(SystemExit, match="NVIDIA GPU"):
        main([])


@pytest.mark.parametrize(
    ("arguments", "field"), [(["--shapes", "0.6B,70B"], "--shapes: 70B"), (["--counts", "0"], "--counts")]
)
def test_a_bad_option_is_named(arguments: list[str], field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert field in capsys.readouterr().err
