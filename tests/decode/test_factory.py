"""From settings to an engine: refusals, limits, the fingerprint, the number of threads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.checkpoint.checkpoint import Checkpoint
from decode.engine.engine import Engine
from decode.engine.sampling import SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import DeviceOutOfMemory
from decode.factory import UnsupportedVariant, fingerprint, load_engine
from decode.native.build import NativeUnavailable
from decode.native.runner import MAX_DRAFT_ROWS
from decode.oracle.runner import TorchModelRunner
from decode.threads import choose_num_threads
from tests.decode.decoding import run
from tests.decode.native.reference import cache_dir, tiny_checkpoint
from tests.decode.tiny_models import open_tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_tiny("llama", tmp_path)


def load(checkpoint: Checkpoint, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "variant": "fp32",
        "device": "cpu",
        "kv_cache_tokens": 100,
        "max_model_len": 0,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "num_threads": 1,
        "cache_dir": cache_dir(),
    }
    return load_engine(checkpoint, **(settings | changes))


def test_a_loaded_engine_decodes(checkpoint: Checkpoint) -> None:
    engine = load(checkpoint)
    assert len(run(engine, [Sequence("a", [5, 6, 7], SamplingParams(max_tokens=3))])["a"]) == 3


def test_a_loaded_engine_follows_grammars_in_the_vocabulary_of_its_checkpoint(checkpoint: Checkpoint) -> None:
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(2,), grammar='start: ("ab" | "a") "c"')
    engine, failures = load(checkpoint), []
    engine.add(Sequence("a", [5], sampling))
    while engine.has_unfinished:
        failures += [output.failure for output in engine.step()]
    assert len(failures) == 1
    assert "tokenizer.json cannot be read" in str(failures[0])
    vocab = {"a": 5, "ab": 6, "c": 7, "</s>": 2}
    added = [{"id": 2, "content": "</s>", "special": True}]
    spec = {"model": {"vocab": vocab, "merges": []}, "added_tokens": added, "decoder": {"type": "ByteLevel"}}
    (checkpoint.path / "tokenizer.json").write_text(json.dumps(spec))
    tokens = run(load(checkpoint), [Sequence("a", [5, 6, 7], sampling)])["a"]
    assert tokens in ([5, 7, 2], [6, 7, 2])


def test_limits_come_from_the_settings_and_the_checkpoint(checkpoint: Checkpoint) -> None:
    config = load(checkpoint).config
    assert (config.num_blocks, config.max_model_len, config.vocab_size) == (6, 512, 320)
    assert load(checkpoint, max_model_len=64).config.max_model_len == 64
    assert load(checkpoint, max_model_len=9999).config.max_model_len == 512


def test_a_sequence_may_fill_the_whole_memory(checkpoint: Checkpoint) -> None:
    got = run(load(checkpoint), [Sequence("a", [9] * 90, SamplingParams(max_tokens=50))])["a"]
    assert len(got) == 6  # six blocks of 16


def test_an_unknown_variant_is_refused_by_name(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedVariant, match="unknown variant 'fp8'"):
        load(checkpoint, variant="fp8")


def test_auto_is_the_native_4_bit_variant_on_a_cpu() -> None:
    checkpoint = tiny_checkpoint("llama")
    engine = load(checkpoint, variant="auto")
    assert engine.config.variant == "q4"
    assert engine.config.fingerprint == load(checkpoint, variant="q4").config.fingerprint
    assert len(run(engine, [Sequence("a", [5, 6, 7], SamplingParams(max_tokens=3))])["a"]) == 3


@pytest.mark.parametrize("variant", ["q4", "q8", "auto"])
def test_the_native_variants_draft_when_asked_to(variant: str) -> None:
    native = tiny_checkpoint("llama")
    assert load(native, variant=variant).config.max_draft_rows == 0
    engine = load(native, variant=variant, prompt_lookup=True, kv_cache_tokens=512, max_num_seqs=1)
    assert engine.config.max_draft_rows == MAX_DRAFT_ROWS
    run(engine, [Sequence("a", [5, 6, 7] * 9, SamplingParams(max_tokens=100, temperature=0))])
    assert engine.num_accepted_tokens > 0


def test_torch_does_not_draft(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(checkpoint, prompt_lookup=True).config.max_draft_rows == 0
    monkeypatch.setattr("decode.native.runner.build_native", without_compiler)
    assert load(tiny_checkpoint("llama"), variant="auto", prompt_lookup=True).config.max_draft_rows == 0


def without_compiler(*arguments: Any, **keywords: Any) -> Path:
    raise NativeUnavailable("no C++ compiler found")


def test_auto_without_a_compiler_serves_with_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("decode.native.runner.build_native", without_compiler)
    assert load(tiny_checkpoint("llama"), variant="auto").config.variant == "bf16"
    assert "no C++ compiler found" in caplog.text


def test_a_native_variant_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.native.runner.build_native", without_compiler)
    with pytest.raises(UnsupportedVariant, match="variant q4: no C\\+\\+ compiler found"):
        load(tiny_checkpoint("llama"), variant="q4")


def test_a_native_variant_is_refused_on_a_gpu(checkpoint: Checkpoint) -> None:
    with pytest.raises(UnsupportedVariant, match="runs on the CPU, not on device 'cuda'"):
        load(checkpoint, variant="q8", device="cuda")


def test_a_missing_device_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedVariant, match="no CUDA device"):
        load(checkpoint, device="cuda")


def test_a_block_size_that_does_not_divide_the_chunk_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="block_size is 24"):
        TorchModelRunner(checkpoint, variant="fp32", device="cpu", kv_cache_tokens=96, block_size=24, num_threads=1)


def test_fingerprint_names_weights_and_variant(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = open_tiny("llama", tmp_path / "other", rope_theta=5e4)
    one = fingerprint(checkpoint, "fp32", "cpu")
    assert one == load(checkpoint).config.fingerprint
    assert one.startswith("fp32-")
    assert len({one, fingerprint(checkpoint, "q4", "cpu"), fingerprint(other, "fp32", "cpu")}) == 3


def test_lack_of_device_memory_is_told_as_such(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(checkpoint)
    engine.add(Sequence("a", [5], SamplingParams(max_tokens=1)))

    def exhausted(self: TorchModelRunner, plan: StepPlan) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(TorchModelRunner, "logits", exhausted)
        with pytest.raises(DeviceOutOfMemory, match="no room"):
            engine.step()
    assert len(engine.step()) == 1


def system(tmp_path: Path, siblings: dict[int, str], quota: str | None) -> Path:
    for processor, text in siblings.items():
        file = tmp_path / f"devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(text + "\n")
    if quota is not None:
        (tmp_path / "fs/cgroup").mkdir(parents=True)
        (tmp_path / "fs/cgroup/cpu.max").write_text(quota + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "num_threads"), [(None, 2), ("max 100000", 2), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_one_thread_for_each_physical_core_within_the_quota(
    quota: str | None, num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    machine = system(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, quota)
    assert choose_num_threads(machine) == num_threads


def test_every_processor_counts_where_the_topology_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2})
    assert choose_num_threads(tmp_path) == 3
