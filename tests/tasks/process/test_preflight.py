"""Preflight: each threshold refuses alone, with its figures, and can be changed or turned off alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decode.checkpoint.config import ModelConfig, Rope
from tasks.process.preflight import (
    MachineFigures,
    PreflightRefused,
    Thresholds,
    examine,
    memory_needed_mb,
    read_machine,
    require,
)
from tasks.process.settings import SettingsError

FINE = MachineFigures(available_memory_mb=8000, total_swap_mb=0, free_swap_mb=0, load_per_cpu=0.5)
LIMITS = Thresholds(min_memory_mb=2000)


def test_a_machine_with_room_passes() -> None:
    assert [finding.what for finding in require(FINE, LIMITS)] == [
        "available memory",
        "load per processor (one minute)",
    ]


def test_too_little_memory_is_refused_with_the_figures() -> None:
    with pytest.raises(PreflightRefused, match="available memory is 1,999 MB, needed at least 2,000 MB"):
        require(replace(FINE, available_memory_mb=1999), LIMITS)


def test_too_much_load_is_refused_with_the_figures() -> None:
    with pytest.raises(PreflightRefused, match=r"load per processor .* is 16\.50, needed at most 16\.00"):
        require(replace(FINE, load_per_cpu=16.5), LIMITS)


def test_full_swap_is_refused_only_when_a_threshold_was_set() -> None:
    swapped = replace(FINE, total_swap_mb=4000, free_swap_mb=10)
    require(swapped, LIMITS)
    with pytest.raises(PreflightRefused, match="free swap is 10 MB, needed at least 500 MB"):
        require(swapped, replace(LIMITS, min_swap_mb=500))


def test_a_machine_without_swap_is_not_asked_for_free_swap() -> None:
    require(FINE, replace(LIMITS, min_swap_mb=500))


def test_every_shortage_is_named_at_once() -> None:
    with pytest.raises(PreflightRefused, match=r"available memory.*load per processor"):
        require(MachineFigures(10, 0, 0, 99.0), LIMITS)


def test_force_reports_the_figures_and_refuses_nothing() -> None:
    findings = require(MachineFigures(10, 100, 0, 99.0), replace(LIMITS, min_swap_mb=50, force=True))
    assert [finding.found for finding in findings] == ["10 MB", "0 MB", "99.00"]


def test_what_the_system_does_not_tell_is_not_examined() -> None:
    assert examine(MachineFigures(None, 0, 0, None), LIMITS) == ()


def test_each_threshold_can_be_changed_alone() -> None:
    assert Thresholds.from_env({}, 2000) == LIMITS
    assert Thresholds.from_env({"PREFLIGHT_MIN_MEMORY_MB": "1"}, 2000) == replace(LIMITS, min_memory_mb=1)
    assert Thresholds.from_env({"PREFLIGHT_MIN_SWAP_MB": "7"}, 2000) == replace(LIMITS, min_swap_mb=7)
    assert Thresholds.from_env({"PREFLIGHT_MAX_LOAD_PER_CPU": "0.5"}, 2000) == replace(LIMITS, max_load_per_cpu=0.5)
    assert Thresholds.from_env({"PREFLIGHT_FORCE": "1"}, 2000) == replace(LIMITS, force=True)


@pytest.mark.parametrize("value", ["much", "-1", "nan", "inf"])
@pytest.mark.parametrize(
    "name", ["PREFLIGHT_MIN_MEMORY_MB", "PREFLIGHT_MIN_SWAP_MB", "PREFLIGHT_MAX_LOAD_PER_CPU", "PREFLIGHT_FORCE"]
)
def test_a_bad_threshold_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        Thresholds.from_env({name: value}, 2000)


def config(**changes: object) -> ModelConfig:
    base = ModelConfig(
        family="llama",
        vocab_size=1000,
        hidden_size=100,
        intermediate_size=200,
        num_layers=10,
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        max_model_len=4096,
        rms_norm_eps=1e-5,
        rope=Rope(theta=10000.0),
        attention_scale=0.2,
        hidden_act="silu",
        tie_word_embeddings=True,
        qkv_bias=False,
        attn_out_bias=False,
        layer_windows=(0,) * 10,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_default_memory_grows_with_weights_and_kv_cache() -> None:
    one = memory_needed_mb(config(), "bf16", 0)
    with_cache = memory_needed_mb(config(), "bf16", 1_000_000)
    assert with_cache - one == 10 * 2 * 2 * 20 * 2  # layers, K and V, heads, values, bytes: MB for a million tokens
    assert memory_needed_mb(config(vocab_size=10_000_000), "bf16", 0) - one >= 1999
    assert memory_needed_mb(config(vocab_size=10_000_000), "fp32", 0) - one >= 3999


def test_a_container_limit_tighter_than_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemAvailable:  8388608 kB\nSwapTotal: 2048 kB\nSwapFree: 1024 kB\nHugePages: 0\n"
    )
    open_machine = read_machine(tmp_path, tmp_path)
    assert (open_machine.available_memory_mb, open_machine.total_swap_mb, open_machine.free_swap_mb) == (8192, 2, 1)
    (tmp_path / "memory.max").write_text(f"{1024 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{600 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 << 20}\n")
    assert read_machine(tmp_path, tmp_path).available_memory_mb == 524
    (tmp_path / "memory.max").write_text("max\n")
    assert read_machine(tmp_path, tmp_path).available_memory_mb == 8192


def test_the_real_machine_can_be_read() -> None:
    reading = read_machine()
    assert reading.available_memory_mb is None or reading.available_memory_mb > 0
