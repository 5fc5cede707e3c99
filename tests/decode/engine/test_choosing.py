"""What decides a token is its own history: every runner, with every feature, under random schedules.

Each job runs alone first. Then all of them run together, in an engine that is roomy, or crowded so that it preempts,
with pieces of prompts, neighbours that ask for other things, steps that fail, and outputs that were begun elsewhere.
The tokens, the log probabilities and the ends must be those of the run alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from decode.checkpoint.vocabulary import Vocabulary
from decode.engine.engine import Engine, EngineConfig, ModelRunner
from decode.engine.grammar import Grammars
from decode.engine.sampling import Chosen, SamplingParams, TokenLogprobs
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import DeviceOutOfMemory
from decode.oracle.runner import TorchModelRunner
from decode.scripted import SCRIPTED_EOS_TOKEN_ID, ScriptedRunner, generate, scripted_vocabulary
from tests.decode.native.reference import VOCAB, runner, tiny_checkpoint
from tests.decode.tiny_models import open_tiny

NUM_BLOCKS = 48
GRAMMAR = "start: /[a-f]{3,9}/ (/-[0-9]+/)+"
TEXT = re.compile(r"[a-f]{3,9}(-[0-9]+)+")
EOS = 1


@dataclass(frozen=True)
class Kind:
    """One way of executing, and what its tokens read as."""

    runner: ModelRunner
    vocabulary: Vocabulary
    vocab_size: int
    eos: int = EOS

    def text(self, token_ids: list[int]) -> str:
        return b"".join(self.vocabulary.token_bytes[token] for token in token_ids).decode()


def byte_vocabulary(size: int) -> Vocabulary:
    """Token 10 + n is the ASCII character n."""
    token_bytes = [b""] * 10 + [bytes([byte]) for byte in range(128)]
    return Vocabulary(token_bytes + [b""] * (size - len(token_bytes)), {EOS: "<eos>"}, (EOS,))


@pytest.fixture(scope="module", params=["fp32", "q8", "scripted"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    if request.param == "scripted":
        model = ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=16)
        yield Kind(model, scripted_vocabulary(), 1256, SCRIPTED_EOS_TOKEN_ID)
    elif request.param == "q8":
        native = runner(tiny_checkpoint("llama"), num_blocks=NUM_BLOCKS)
        yield Kind(native, byte_vocabulary(VOCAB), VOCAB)
        native.close()
    else:
        checkpoint = open_tiny("llama", Path(tmp_path_factory.mktemp("tiny")))
        settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_tokens": 16 * NUM_BLOCKS}
        yield Kind(TorchModelRunner(checkpoint, variant=request.param, **settings), byte_vocabulary(320), 320)


@pytest.fixture(scope="module")
def grammars(kind: Kind) -> Grammars:
    return Grammars(lambda: kind.vocabulary)


Result = tuple[list[int], list[TokenLogprobs], str | None]


class Failing:
    """The runner, which now and then loses a step."""

    def __init__(self, runner: ModelRunner, rng: Random | None) -> None:
        self.runner = runner
        self.rng = rng
        self.num_preempted = 0

    def execute(self, plan: StepPlan) -> Chosen:
        self.num_preempted += len(plan.preempted)
        if self.rng and self.rng.random() < 0.05:
            raise DeviceOutOfMemory
        return self.runner.execute(plan)


def run(
    kind: Kind, grammars: Grammars, sequences: list[Sequence], *, blocks: int, budget: int, rng: Random | None
) -> tuple[dict[str, Result], int]:
    config = EngineConfig(
        num_blocks=blocks,
        max_model_len=400,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        fingerprint="f",
        vocab_size=kind.vocab_size,
    )
    failing = Failing(kind.runner, rng)
    engine = Engine(failing, config, grammars)
    waiting = list(sequences)
    results: dict[str, Result] = {sequence.sequence_id: ([], [], None) for sequence in sequences}
    while waiting or engine.has_unfinished:
        while waiting and (rng is None or rng.random() < 0.7):
            engine.add(waiting.pop(0))
        try:
            outputs = engine.step()
        except DeviceOutOfMemory:
            continue
        for output in outputs:
            tokens, logprobs, _ = results[output.sequence_id]
            tokens.extend(output.token_ids)
            logprobs.extend(output.logprobs)
            assert output.failure is None
            results[output.sequence_id] = tokens, logprobs, output.finish_reason
    engine.check_idle()
    return results, failing.num_preempted


def jobs_of(rng: Random, kind: Kind) -> dict[str, tuple[list[int], SamplingParams]]:
    shared = [rng.randrange(20, 138) for _ in range(40)]
    jobs = {}
    for index in range(10):
        prompt = shared[: rng.choice([0, 32])] + [rng.randrange(20, 138) for _ in range(rng.randint(1, 40))]
        sampling = SamplingParams(
            max_tokens=rng.randint(8, 40),
            temperature=rng.choice([0.0, 0.0, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            seed=rng.randrange(1000),
            stop_token_ids=(kind.eos,),
            min_tokens=rng.choice([0, 5]),
        )
        if index % 5 != 4:
            sampling = replace(
                sampling,
                presence_penalty=rng.choice([0.0, 0.7, -0.5]),
                frequency_penalty=rng.choice([0.0, 0.3]),
                logit_bias=tuple((rng.randrange(kind.vocab_size + 9), rng.choice([-100.0, 2.0])) for _ in range(2)),
                num_logprobs=rng.choice([None, 0, 5, 20]),
                grammar=rng.choice(["", GRAMMAR]),
            )
        jobs[f"s{index}"] = prompt, sampling
    return jobs


def compare(kind: Kind, grammars: Grammars, seed: int) -> int:
    """Every job alone, and all of them together; returns how often one was preempted."""
    rng = Random(seed)
    jobs = jobs_of(rng, kind)
    alone: dict[str, Result] = {}
    for name, (prompt, sampling) in jobs.items():
        one = [Sequence(name, prompt, sampling)]
        alone |= run(kind, grammars, one, blocks=NUM_BLOCKS, budget=128, rng=None)[0]
    num_preempted = 0
    for blocks, budget in ((NUM_BLOCKS, 128), (8, 17)):
        begun = {name: rng.choice([0, 0, rng.randrange(len(alone[name][0]))]) for name in jobs}
        sequences = [
            Sequence(name, prompt, sampling, alone[name][0][: begun[name]])
            for name, (prompt, sampling) in rng.sample(list(jobs.items()), len(jobs))
        ]
        found, preempted = run(kind, grammars, sequences, blocks=blocks, budget=budget, rng=rng)
        num_preempted += preempted
        for name, (tokens, logprobs, reason) in alone.items():
            assert found[name] == (tokens[begun[name] :], logprobs[begun[name] :], reason), name
    for name, (_, sampling) in jobs.items():
        tokens, logprobs, reason = alone[name]
        assert len(logprobs) == (0 if sampling.num_logprobs is None else len(tokens))
        assert all(len(one.top) == (sampling.num_logprobs or 0) for one in logprobs)
        if sampling.grammar and reason == "stop":
            assert tokens[-1] == kind.eos
            assert TEXT.fullmatch(kind.text(tokens[:-1]))
        banned = {token for token, bias in sampling.logit_bias if bias == -100} - {kind.eos}
        assert sampling.grammar or not banned.intersection(tokens)
    return num_preempted


@pytest.mark.parametrize("seed", range(2))
def test_a_sequence_is_the_same_alone_and_under_any_schedule(kind: Kind, grammars: Grammars, seed: int) -> None:
    compare(kind, grammars, seed)


def test_more_schedules_of_the_scripted_model_with_preemptions() -> None:
    kind = Kind(ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=16), scripted_vocabulary(), 1256, 2)
    grammars = Grammars(scripted_vocabulary)
    assert sum(compare(kind, grammars, seed) for seed in range(100, 120)) > 4


def test_a_plain_neighbour_keeps_its_tokens(kind: Kind, grammars: Grammars) -> None:
    plain = SamplingParams(max_tokens=12, temperature=0)
    prompt = list(range(30, 60))
    alone, _ = run(kind, grammars, [Sequence("a", prompt, plain)], blocks=NUM_BLOCKS, budget=128, rng=None)
    rich = replace(plain, grammar=GRAMMAR, num_logprobs=20, logit_bias=((40, 3.0),), stop_token_ids=(kind.eos,))
    both = [Sequence("b", prompt[3:], rich), Sequence("a", prompt, plain), Sequence("c", prompt[9:], rich)]
    together, _ = run(kind, grammars, both, blocks=NUM_BLOCKS, budget=128, rng=None)
    assert together["a"] == alone["a"]


@pytest.mark.parametrize("changes", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_the_end_of_a_grammar_ends_the_output(kind: Kind, grammars: Grammars, changes: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=(kind.eos,), grammar='start: "abc"')
    one = [Sequence("a", [50, 51], replace(sampling, **changes))]
    tokens, _, reason = run(kind, grammars, one, blocks=NUM_BLOCKS, budget=64, rng=None)[0]["a"]
    assert (kind.text(tokens[:-1]), tokens[-1], reason) == ("abc", kind.eos, "stop")
    again = Sequence("a", [50, 51], replace(sampling, **changes), tokens)
    assert run(kind, grammars, [again], blocks=NUM_BLOCKS, budget=64, rng=None)[0]["a"] == ([], [], "stop")


def test_a_token_limit_cuts_a_grammar(kind: Kind, grammars: Grammars) -> None:
    sampling = SamplingParams(max_tokens=2, temperature=0, stop_token_ids=(kind.eos,), grammar='start: "abc"')
    results, _ = run(kind, grammars, [Sequence("a", [50], sampling)], blocks=NUM_BLOCKS, budget=64, rng=None)
    assert (kind.text(results["a"][0]), results["a"][2]) == ("ab", "length")


def test_scripted_outputs_are_those_of_the_model_without_a_cache() -> None:
    kind = Kind(ScriptedRunner(num_blocks=NUM_BLOCKS, block_size=16), scripted_vocabulary(), 1256, 2)
    grammars = Grammars(scripted_vocabulary)
    for name, (prompt, sampling) in jobs_of(Random(9), kind).items():
        one = [Sequence(name, prompt, sampling)]
        tokens, _, reason = run(kind, grammars, one, blocks=NUM_BLOCKS, budget=64, rng=None)[0][name]
        assert (tokens, reason) == generate(prompt, sampling, 400)
