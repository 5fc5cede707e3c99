"""The sampler: each parameter against its definition, and that a row does not depend on its neighbours."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from decode.checkpoint.vocabulary import Vocabulary
from decode.engine.grammar import Grammars
from decode.engine.sampling import LogitAdjustments, SamplingParams, uniform
from decode.errors import IntegrityError
from decode.oracle import sampler
from decode.oracle.sampler import SampleRow
from decode.oracle.sampler import sample as sample_rows

PLAIN = SamplingParams(max_tokens=10_000)
GREEDY = replace(PLAIN, temperature=0)


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return sample_rows(logits, rows).token_ids


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()[None]


def draw(logits: torch.Tensor, sampling: SamplingParams, num_draws: int = 400) -> Counter[int]:
    """How often each token is chosen for output indices 0 .. num_draws."""
    rows = [SampleRow(sampling, index) for index in range(num_draws)]
    return Counter(sample(logits.repeat(num_draws, 1), rows))


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, -math.inf]])
    assert sample(logits, [SampleRow(GREEDY, 0)] * 2) == [1, 0]


def test_nothing_to_sample_is_no_error() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_draws_follow_the_inverse_of_the_cumulative_distribution() -> None:
    probabilities = (0.2, 0.5, 0.3)
    for index in range(50):
        u = uniform(3, index)
        wanted = 0 if u < 0.2 else 1 if u < 0.7 else 2
        assert sample(logits_of(*probabilities), [SampleRow(replace(PLAIN, seed=3), index)]) == [wanted]


def test_draws_have_the_distribution_of_the_logits() -> None:
    counts = draw(logits_of(0.1, 0.6, 0.3), PLAIN, 2000)
    for token, probability in enumerate((0.1, 0.6, 0.3)):
        assert counts[token] / 2000 == pytest.approx(probability, abs=0.04)


def test_temperature_sharpens_and_flattens() -> None:
    logits = logits_of(0.4, 0.6)
    cold, hot = (draw(logits, replace(PLAIN, temperature=t))[0] / 400 for t in (0.2, 5.0))
    assert cold == pytest.approx(0.4**5 / (0.4**5 + 0.6**5), abs=0.06)
    assert hot == pytest.approx(0.4**0.2 / (0.4**0.2 + 0.6**0.2), abs=0.06)


def test_seeds_decide() -> None:
    logits = torch.zeros(1, 1000)
    tokens = [sample(logits, [SampleRow(replace(PLAIN, seed=seed), 0)])[0] for seed in (1, 1, 2)]
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"top_p": 0.45}, {1, 2}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.999}, {0, 1, 2, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.6}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.5}, {1, 2}),
        ({"top_k": 3, "min_p": 0.9}, {1}),
        ({"top_k": 1}, {1}),
    ],
)
def test_filters_keep_what_they_are_defined_to_keep(changes: dict[str, float], kept: set[int]) -> None:
    logits = logits_of(0.15, 0.4, 0.3, 0.15)
    assert set(draw(logits, replace(PLAIN, **changes))) == kept  # type: ignore[arg-type]


def test_top_p_is_taken_of_what_top_k_left() -> None:
    logits = logits_of(0.25, 0.35, 0.4)
    assert set(draw(logits, replace(PLAIN, top_k=2, top_p=0.6))) == {1, 2}  # 0.4 of 0.75 is not enough
    assert set(draw(logits, replace(PLAIN, top_k=2, top_p=0.5))) == {2}  # 0.4 of 0.75 is more than half


def test_top_p_that_is_reached_exactly_needs_no_further_token() -> None:
    logits = logits_of(0.2, 0.5, 0.3)
    largest = float(logits.softmax(-1).max())
    assert set(draw(logits, replace(PLAIN, top_p=largest))) == {1}


def test_equal_probabilities_at_the_edge_of_a_filter_all_stay() -> None:
    assert set(draw(torch.zeros(1, 6), replace(PLAIN, top_k=2))) == set(range(6))


def test_a_wide_distribution_is_sorted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.linspace(0, 1, 600)[None]
    whole = draw(logits.clone(), replace(PLAIN, top_p=0.9))
    monkeypatch.setattr(sampler, "_FEW", 8)
    assert draw(logits.clone(), replace(PLAIN, top_p=0.9)) == whole
    assert min(whole) > 20


def test_stop_tokens_cannot_be_chosen_before_the_least_number_of_tokens() -> None:
    sampling = replace(GREEDY, min_tokens=2, stop_token_ids=(1, 7, -1))
    rows = [SampleRow(sampling, index) for index in range(4)]
    assert sample(logits_of(0.3, 0.7).repeat(4, 1), rows) == [0, 0, 1, 1]
    assert set(draw(logits_of(0.3, 0.7), replace(sampling, temperature=1.0, min_tokens=1000))) == {0}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 3001, generator=generator) * 2
    params = [
        GREEDY,
        PLAIN,
        replace(PLAIN, top_k=40, seed=4),
        replace(PLAIN, top_p=0.9, temperature=0.7),
        replace(PLAIN, min_p=0.05),
        replace(PLAIN, min_tokens=50, stop_token_ids=(3,)),
        replace(PLAIN, top_p=0.5, top_k=100, min_p=0.01, seed=9),
        GREEDY,
        replace(PLAIN, temperature=3.0),
    ]
    rows = [SampleRow(sampling, 3 * i) for i, sampling in enumerate(params)]
    alone = [sample(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert sample(logits.clone(), rows) == alone
    order = [8, 3, 1, 0, 2, 7, 6, 5, 4]
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]


def test_broken_logits_are_noticed() -> None:
    for broken in (torch.tensor([[0.0, math.nan]]), torch.tensor([[math.inf, 0.0]])):
        with pytest.raises(IntegrityError, match="not finite"):
            sample(broken, [SampleRow(GREEDY, 0)])


def adjusted(sampling: SamplingParams, output: list[int], grammar: str = "") -> SampleRow:
    """A row after `output`; token i of the vocabulary reads as letter i."""
    letters = [bytes([letter]) for letter in b"abcdefgh"]
    matcher = None
    if grammar:
        params = replace(sampling, grammar=grammar, stop_token_ids=(7,))
        matcher = Grammars(lambda: Vocabulary([*letters[:7], b""], {7: "<eos>"}, (7,))).matcher("a", params, output)
    return SampleRow(sampling, len(output), LogitAdjustments.of(sampling, output), matcher)


def chosen_after(output: list[int], logits: torch.Tensor, **changes: object) -> int:
    return sample(logits.clone(), [adjusted(replace(GREEDY, **changes), output)])[0]  # type: ignore[arg-type]


def test_penalties_are_taken_from_what_the_output_holds_already() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, 0.0]])
    assert chosen_after([], logits, presence_penalty=1.1, frequency_penalty=1.1) == 0
    assert chosen_after([0], logits, presence_penalty=0.6) == 1
    assert chosen_after([0, 0, 0], logits, presence_penalty=0.4) == 0
    assert chosen_after([0, 0, 0], logits, frequency_penalty=0.2) == 1
    assert chosen_after([0, 0, 0, 1], logits, frequency_penalty=0.3, presence_penalty=0.5) == 2
    assert chosen_after([3], logits, presence_penalty=-2.0, frequency_penalty=-2.0) == 3


def test_a_bias_is_added_before_temperature() -> None:
    assert chosen_after([], torch.tensor([[3.0, 2.5, 0.0]]), logit_bias=((2, 3.5), (1, -100.0), (9, 100.0))) == 2
    counts = draw_row(torch.zeros(1, 2), replace(PLAIN, logit_bias=((1, 1.0),), temperature=2.0))
    assert counts[1] / 2000 == pytest.approx(1 / (1 + math.exp(-0.5)), abs=0.03)


def draw_row(logits: torch.Tensor, sampling: SamplingParams) -> Counter[int]:
    rows = [SampleRow(sampling, index, LogitAdjustments.of(sampling, ())) for index in range(2000)]
    return Counter(sample(logits.repeat(2000, 1), rows))


def test_a_grammar_leaves_the_likeliest_of_the_allowed() -> None:
    logits = torch.tensor([[9.0, 1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 8.0]])
    assert sample(logits.clone(), [adjusted(GREEDY, [], 'start: "b" | "c" | "d"')]) == [2]
    assert sample(logits.clone(), [adjusted(GREEDY, [2], 'start: "c" "d"?')]) == [7]
    drawn = {sample(logits.clone(), [adjusted(replace(PLAIN, seed=s), [], "start: /[bcd]/")])[0] for s in range(60)}
    assert drawn == {1, 2, 3}


def test_log_probabilities_are_those_of_the_unchanged_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3))
    wanted = logits.log_softmax(-1)
    sampling = replace(PLAIN, temperature=0.3, top_k=4, num_logprobs=3, logit_bias=((5, 100.0), (6, -100.0)))
    result = sample_rows(logits.clone(), [SampleRow(GREEDY, 0), adjusted(sampling, [])])
    assert result.token_ids[1] == 5
    assert set(result.logprobs) == {1}
    found = result.logprobs[1]
    assert found.logprob == float(wanted[1, 5])
    assert [token for token, _ in found.top] == wanted[1].argsort(descending=True)[:3].tolist()
    assert [logprob for _, logprob in found.top] == wanted[1].sort(descending=True).values[:3].tolist()


def test_the_likeliest_tokens_come_with_ties_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    for number, wanted in ((0, []), (1, [1]), (4, [1, 3, 0, 2]), (20, [1, 3, 0, 2, 4, 5])):
        top = sample_rows(logits.clone(), [SampleRow(replace(GREEDY, num_logprobs=number), 0)]).logprobs[0].top
        assert [token for token, _ in top] == wanted
