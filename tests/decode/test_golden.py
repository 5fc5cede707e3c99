"""Greedy float32 output equals `transformers` on the same checkpoint, token for token (kept in golden/)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from decode.checkpoint.checkpoint import Checkpoint, open_checkpoint
from decode.engine.sequence import Sequence
from tests.decode.decoding import GREEDY, RecordingRunner, engine, run
from tests.decode.tiny_models import CONFIGS, open_tiny
from tests.models import gemma3_path, smollm2_path


def cases(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(__file__).with_name("golden") / f"{name}.json").read_text())
    return found


def assert_golden(name: str, checkpoint: Checkpoint) -> None:
    runner = RecordingRunner(checkpoint, kv_cache_tokens=1024)
    sequences = [Sequence(str(i), case["prompt"], GREEDY) for i, case in enumerate(cases(name))]
    tokens = run(engine(runner), sequences)
    assert [tokens[sequence.sequence_id] for sequence in sequences] == [case["tokens"] for case in cases(name)]


@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_models_decode_like_the_oracle(name: str, tmp_path: Path) -> None:
    assert_golden(name, open_tiny(name, tmp_path))


@pytest.mark.parametrize("name", CONFIGS)
def test_golden_outputs_of_tiny_models_are_no_echo(name: str) -> None:
    assert len({token for case in cases(name) for token in case["tokens"]}) > 20


def test_smollm2_decodes_like_the_oracle() -> None:
    assert_golden("smollm2", open_checkpoint(smollm2_path()))


def test_gemma3_270m_decodes_like_the_oracle_beyond_its_window() -> None:
    assert_golden("gemma3-270m", open_checkpoint(gemma3_path()))
