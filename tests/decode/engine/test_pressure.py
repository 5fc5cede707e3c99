"""The engine against the model without a cache, under random pressure: tiny block pools, shared prefixes, arrivals,
aborts, continuations, drafts of any quality, failing steps and shedding at random moments.

Every scenario is a function of its seed, which is the test's parameter. After every step all books are compared with
reality, every plan is checked before it is executed, and in the end every text must be the oracle's.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from decode.engine.engine import Engine, EngineConfig
from decode.engine.sampling import Chosen, SamplingParams
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence
from decode.errors import DeviceOutOfMemory, PromptTooLong
from decode.scripted import SCRIPTED_EOS_TOKEN_ID, SCRIPTED_STOP_AFTER, ScriptedRunner, generate
from tests.decode.guesses import Guesses

SEEDS = range(40)


class CheckingRunner:
    """The scripted model; checks every plan against what a device would need, and fails when told to."""

    def __init__(self, scenario: Scenario) -> None:
        config = scenario.config
        self.model = ScriptedRunner(num_blocks=config.num_blocks, block_size=config.block_size)
        self.scenario = scenario
        self.fails: str | None = None

    def execute(self, plan: StepPlan) -> Chosen:
        self.scenario.check_plan(plan)
        if self.fails == "before":
            raise DeviceOutOfMemory
        chosen = self.model.execute(plan)
        if self.fails == "after":
            raise DeviceOutOfMemory
        return chosen


class Scenario:
    """One random workload on one random engine, turned to its end."""

    def __init__(self, seed: int, max_draft_rows: int = 0) -> None:
        self.rng = Random(seed)
        block_size = self.rng.choice([1, 2, 4, 5])
        num_blocks = self.rng.randint(40, 160) // block_size
        max_num_seqs = self.rng.randint(1, 8)
        self.config = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=self.rng.choice([30, 60, 90]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + self.rng.choice([0, 1, 7, 40]),
            fingerprint="f",
            block_size=block_size,
            max_draft_rows=max_draft_rows,
        )
        self.runner = CheckingRunner(self)
        self.engine = Engine(self.runner, self.config)
        self.prefixes = [[self.rng.randint(10, 99) for _ in range(30)] for _ in range(2)]
        self.live: dict[str, Sequence] = {}
        self.expected: dict[str, tuple[list[int], str]] = {}
        self.texts: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()
        self.num_added = 0

    def run(self) -> Counter[str]:
        while self.num_added < 60 or self.engine.has_unfinished:
            if self.num_added < 60:
                for _ in range(self.rng.choice([0, 0, 1, 3])):
                    self.add()
            if self.rng.random() < 0.04 and self.live:
                self.abort(self.rng.choice(sorted(self.live)))
            self.step()
            self.check()
        self.engine.check_idle()
        assert self.engine.load().num_free_blocks == self.config.num_blocks
        assert self.engine.load().num_running == self.engine.load().num_waiting == 0
        assert not self.live
        return self.counts

    def add(self) -> None:
        rng, config = self.rng, self.config
        self.num_added += 1
        name = str(self.num_added)
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 30)]
        prompt = prompt + [rng.randint(10, 99) for _ in range(rng.randint(0 if prompt else 1, 25))]
        if rng.random() < 0.3:
            prompt += [SCRIPTED_STOP_AFTER, rng.randint(0, 20)]
        sampling = SamplingParams(
            max_tokens=rng.randint(1, 30),
            stop_token_ids=(SCRIPTED_EOS_TOKEN_ID,),
            min_tokens=rng.choice([0, 0, 5]),
            ignore_eos=rng.random() < 0.1,
        )
        max_len = config.max_sequence_len
        if len(prompt) + 1 > max_len:
            with pytest.raises(PromptTooLong):
                self.engine.add(Sequence(name, prompt, sampling))
            self.counts["refusals"] += 1
            return
        text, reason = generate(prompt, sampling, max_len)
        num_published = rng.randint(0, len(text) - 1) if rng.random() < 0.3 else 0
        self.counts["continuations"] += num_published > 0
        self.expected[name] = text, reason
        self.texts[name] = text[:num_published]
        self.live[name] = Sequence(name, prompt, sampling, text[:num_published])
        self.engine.add(self.live[name])
        assert (self.live[name].lookup is not None) == (config.max_draft_rows > 0)
        if config.max_draft_rows:
            self.live[name].lookup = Guesses(lambda token_ids, num: self.guess([*prompt, *text], token_ids, num))

    def guess(self, known: list[int], token_ids: list[int], max_tokens: int) -> list[int]:
        """Right, right in part, wrong, beyond the end, or none at all."""
        draft = known[len(token_ids) : len(token_ids) + max_tokens]
        draft += [SCRIPTED_EOS_TOKEN_ID] * self.rng.choice([0, 0, 1, 20])
        if draft and self.rng.random() < 0.5:
            draft[self.rng.randrange(len(draft))] = 7
        return draft if self.rng.random() < 0.9 else []

    def abort(self, name: str) -> None:
        sequence = self.live.pop(name)
        num_left = sequence.num_tokens - sequence.num_computed_tokens
        kind = "waiting" if not sequence.is_admitted else "prefilling" if num_left > 1 else "decoding"
        self.counts[f"aborts {kind}"] += 1
        assert self.engine.abort(name)
        assert not self.engine.abort(name)
        assert self.texts[name] == self.expected[name][0][: len(self.texts[name])]

    def step(self) -> None:
        self.runner.fails = self.rng.choice(["before", "after"]) if self.rng.random() < 0.03 else None
        before = {name: (s.num_computed_tokens, s.num_tokens) for name, s in self.live.items()}
        try:
            outputs = self.engine.step()
        except DeviceOutOfMemory:
            self.counts["failed steps"] += 1
            assert all(s.num_tokens == before[name][1] for name, s in self.live.items())
            if self.rng.random() < 0.5:
                self.counts["shed"] += self.engine.shed().num_preempted
            return
        self.counts["steps"] += 1
        for output in outputs:
            name, text = output.sequence_id, self.texts[output.sequence_id]
            assert output.first_index == len(text)
            text.extend(output.token_ids)
            self.counts["tokens of drafts"] += max(0, len(output.token_ids) - 1)
            self.counts["ends in drafts"] += len(output.token_ids) > 1 and output.finish_reason is not None
            if output.finish_reason is not None:
                self.counts[output.finish_reason] += 1
                self.counts["prefix hits"] += output.num_cached_tokens > 0
                del self.live[name]
                assert (text, output.finish_reason) == self.expected[name]

    def check(self) -> None:
        """What must be true between any two steps."""
        self.engine.check_integrity()
        load = self.engine.load()
        held = [block for s in self.live.values() for block in s.block_table]
        assert load.num_free_blocks == self.config.num_blocks - len(set(held))
        self.counts["shared blocks"] += len(held) - len(set(held))
        assert load.num_running == sum(s.is_admitted for s in self.live.values()) <= self.config.max_num_seqs
        assert load.num_running + load.num_waiting == len(self.live)
        for s in self.live.values():
            assert s.num_computed_tokens < s.num_tokens
            assert s.is_admitted or s.num_computed_tokens == 0
            assert s.num_cached_tokens <= min(s.num_prompt_tokens, s.num_tokens - 1)
            assert not s.is_admitted or len(s.block_table) * self.config.block_size >= s.num_tokens - 1

    def check_plan(self, plan: StepPlan) -> None:
        """What must be true of a plan when it reaches the device."""
        size = self.config.block_size
        self.counts["preemptions"] += len(plan.preempted)
        assert len({scheduled.sequence.sequence_id for scheduled in plan.scheduled}) == len(plan.scheduled)
        num_drafts = sum(len(s.draft_token_ids) for s in plan.scheduled)
        num_rows = sum(s.num_scheduled_tokens for s in plan.scheduled) + num_drafts
        assert num_rows <= self.config.max_num_batched_tokens
        if num_drafts:
            assert num_rows <= self.config.max_draft_rows
            assert all(s.samples and s.num_scheduled_tokens == 1 for s in plan.scheduled), "drafts beside a prefill"
        self.counts["drafts"] += num_drafts
        num_holders = Counter(block for s in self.live.values() for block in s.block_table)
        for scheduled in plan.scheduled:
            sequence, first = scheduled.sequence, scheduled.num_computed_tokens
            last = first + scheduled.num_scheduled_tokens
            assert scheduled.num_scheduled_tokens > 0
            assert first == sequence.num_computed_tokens
            assert scheduled.samples == (last == sequence.num_tokens)
            end = last + len(scheduled.draft_token_ids)
            written = sequence.block_table[first // size : (end - 1) // size + 1]
            assert len(written) == (end - 1) // size + 1 - first // size
            assert all(num_holders[block] == 1 for block in written), "writes into a block that others read"
            self.counts["chunks"] += not scheduled.samples


@pytest.mark.parametrize("max_draft_rows", [0, 4, 12])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_text_is_the_oracles_under_pressure(seed: int, max_draft_rows: int) -> None:
    Scenario(seed, max_draft_rows).run()


@pytest.mark.parametrize("max_draft_rows", [0, 12])
def test_the_pressure_is_real(max_draft_rows: int) -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS[:10]:
        counts.update(Scenario(seed, max_draft_rows).run())
    print(counts)
    for kind in (
        *(
            "preemptions",
            "prefix hits",
            "shared blocks",
            "chunks",
            "continuations",
            "refusals",
            "failed steps",
            "shed",
        ),
        *("aborts waiting", "aborts prefilling", "aborts decoding", "stop", "length"),
        *(("drafts", "tokens of drafts", "ends in drafts") if max_draft_rows else ()),
    ):
        assert counts[kind] > 5, f"{kind}: {counts[kind]}"
