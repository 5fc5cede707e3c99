"""The contract: a sequence's tokens and logits, to the bit, whatever else runs and however it is cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from decode.checkpoint.checkpoint import open_checkpoint
from decode.engine.sampling import SamplingParams
from decode.engine.sequence import Sequence
from tests.decode.decoding import RecordingRunner, engine, run
from tests.decode.tiny_models import open_tiny
from tests.models import smollm2_path

SAMPLING = SamplingParams(max_tokens=20, temperature=0.8, seed=5, top_p=0.9)
MODELS = ["llama-linear-bias", "mistral", "qwen3", "gemma3"]


@pytest.fixture(params=["fp32", "bf16"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=MODELS)
def runner(request: pytest.FixtureRequest, variant: str, tmp_path: Path) -> RecordingRunner:
    checkpoint = open_tiny(str(request.param), tmp_path)
    return RecordingRunner(checkpoint, variant=variant, kv_cache_tokens=2048)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(length * 1000 + seed)
    return [rng.randrange(3, 320) for _ in range(length)]


def subject(name: str = "subject", num_tokens: int = 170) -> Sequence:
    return Sequence(name, prompt(num_tokens), SAMPLING)


def alone(runner: RecordingRunner) -> list[int]:
    return run(engine(runner), [subject("alone")])["alone"]


def assert_same(runner: RecordingRunner, tokens: list[int], got: list[int], name: str = "subject") -> None:
    assert got == tokens
    for index in range(len(tokens)):
        assert torch.equal(runner.rows[name, index], runner.rows["alone", index]), index


def test_neighbours_change_nothing(runner: RecordingRunner) -> None:
    tokens = alone(runner)
    neighbours = [Sequence(f"n{n}", prompt(n), SAMPLING) for n in (1, 5, 33, 140, 260)]
    got = run(engine(runner), [*neighbours[:2], subject(), *neighbours[2:]])
    assert_same(runner, tokens, got["subject"])


@pytest.mark.parametrize("budget", [8, 37, 129])
def test_chunking_changes_nothing(runner: RecordingRunner, budget: int) -> None:
    tokens = alone(runner)
    runner.max_chunk = 0
    got = run(engine(runner, budget=budget), [subject(), Sequence("other", prompt(60), SAMPLING)])
    assert runner.max_chunk <= budget
    assert_same(runner, tokens, got["subject"])


def test_a_prefix_hit_changes_nothing(runner: RecordingRunner) -> None:
    tokens = alone(runner)
    shared = engine(runner)
    run(shared, [subject("first")])
    second = subject()
    got = run(shared, [second, Sequence("other", prompt(9), SAMPLING)])
    assert second.num_cached_tokens == 160
    assert_same(runner, tokens, got["subject"])


def test_continuation_changes_nothing(runner: RecordingRunner) -> None:
    tokens = alone(runner)
    continued = Sequence("subject", prompt(170), SAMPLING, tokens[:11])
    got = run(engine(runner), [continued, Sequence("other", prompt(50), SAMPLING)])["subject"]
    assert got == tokens[11:]
    for index in range(11, len(tokens)):
        assert torch.equal(runner.rows["subject", index], runner.rows["alone", index])


@pytest.mark.parametrize("name", MODELS)
def test_preemption_changes_nothing(name: str, variant: str, tmp_path: Path) -> None:
    checkpoint = open_tiny(name, tmp_path)
    runner = RecordingRunner(checkpoint, variant=variant, kv_cache_tokens=256)
    tokens = run(engine(runner), [subject("alone", 90)])["alone"]
    others = [Sequence(f"n{i}", prompt(60, i), SAMPLING) for i in range(2)]
    got = run(engine(runner, budget=64), [*others, subject(num_tokens=90)])
    assert runner.num_preempted > 0
    assert_same(runner, tokens, got["subject"])


def test_smollm2_in_bf16_gives_the_same_bits_alone_and_among_others() -> None:
    runner = RecordingRunner(open_checkpoint(smollm2_path()), variant="bf16", kv_cache_tokens=1024)
    few = SamplingParams(max_tokens=3, temperature=0)

    def sequence(name: str, length: int) -> Sequence:
        return Sequence(name, [token * 31 for token in prompt(length)], few)

    tokens = run(engine(runner), [sequence("alone", 140)])["alone"]
    got = run(engine(runner, budget=70), [sequence("a", 3), sequence("subject", 140), sequence("b", 50)])
    assert_same(runner, tokens, got["subject"])
