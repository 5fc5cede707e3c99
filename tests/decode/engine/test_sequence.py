"""`decode.engine.sequence`: the facts of one request and the rule by which it ends."""

from __future__ import annotations

import pytest

from decode.engine.sampling import SamplingParams
from decode.engine.sequence import FinishReason, Sequence

EOS = 2


def sequence(outputs: list[int], **sampling: object) -> Sequence:
    params = {"max_tokens": 4, "stop_token_ids": (EOS,)} | sampling
    return Sequence("a", [5, 6, 7], SamplingParams(**params), outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outputs", "sampling", "max_len", "reason"),
    [
        ([], {}, 100, None),
        ([9], {}, 100, None),
        ([9, 9, 9, 9], {}, 100, "length"),
        ([9, 9], {}, 5, "length"),
        ([9, 9], {}, 6, None),
        ([9, EOS], {}, 100, "stop"),
        ([9, 9, 9, EOS], {}, 100, "stop"),
        ([9, EOS], {}, 5, "stop"),
        ([EOS, 9], {}, 100, None),
        ([9, EOS], {"ignore_eos": True}, 100, None),
        ([9, EOS], {"min_tokens": 2}, 100, None),
        ([9, 9, EOS], {"min_tokens": 2}, 100, "stop"),
        ([9, EOS], {"stop_token_ids": ()}, 100, None),
        ([9, 8], {"stop_token_ids": (EOS, 8)}, 100, "stop"),
    ],
)
def test_a_sequence_ends_by_a_stop_token_or_by_a_length(
    outputs: list[int], sampling: dict[str, object], max_len: int, reason: FinishReason | None
) -> None:
    assert sequence(outputs, **sampling).finish_reason(max_len) == reason


def test_a_stop_token_at_the_end_of_the_prompt_is_not_an_end() -> None:
    assert Sequence("a", [5, EOS], SamplingParams(max_tokens=4, stop_token_ids=(EOS,))).finish_reason(100) is None


def test_a_continuation_counts_its_published_tokens_as_output() -> None:
    continued = sequence([8, 9])
    assert continued.token_ids == [5, 6, 7, 8, 9]
    assert (continued.num_prompt_tokens, continued.num_output_tokens) == (3, 2)
    assert continued.output_token_ids == [8, 9]
    assert continued.num_computed_tokens == 0


def test_it_takes_copies_of_the_lists_it_is_given() -> None:
    prompt = [5, 6]
    made = Sequence("a", prompt, SamplingParams(max_tokens=1))
    made.token_ids.append(7)
    assert prompt == [5, 6]


def test_a_sequence_that_holds_blocks_is_admitted() -> None:
    one = sequence([])
    assert not one.is_admitted
    one.admit([0], 1)
    assert one.is_admitted


def test_what_was_restored_at_the_first_admission_is_what_is_reported() -> None:
    one = sequence([])
    one.admit([0], 2)
    one.block_table = []
    one.preempt()
    assert one.num_computed_tokens == 0
    one.admit([0], 0)
    assert one.num_cached_tokens == 2


def test_restored_output_tokens_of_a_continuation_are_not_cached_prompt_tokens() -> None:
    one = sequence([8, 9])
    one.admit([0, 1], 4)
    assert (one.num_computed_tokens, one.num_cached_tokens) == (4, 3)


def test_a_sampled_token_needs_all_earlier_kv() -> None:
    one = sequence([])
    with pytest.raises(AssertionError):
        one.append_token(9)


def test_its_text_for_people_names_it_and_its_progress() -> None:
    assert repr(sequence([8])) == "Sequence('a', 3+1 tokens, 0 computed, blocks [])"
