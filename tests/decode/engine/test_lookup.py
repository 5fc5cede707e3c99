"""`decode.engine.lookup`: what is found, and how far ahead it goes."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from decode.engine.lookup import MAX_PAUSE, PromptLookup
from decode.engine.sampling import SamplingParams


def lookup(num_wanted: int = 8, first_len: int = 0, max_len: int = 1000) -> PromptLookup:
    """One that has been right so often that it drafts `num_wanted` tokens."""
    made = PromptLookup(first_len, max_len)
    for _ in range(num_wanted - 1):
        made.learn(1, 1, 0)
    return made


def test_what_followed_the_last_tokens_is_the_draft() -> None:
    assert lookup().draft([1, 2, 3, 4, 5, 6, 9, 1, 2], 3) == (3, 4, 5)


def test_of_equal_places_the_latest_counts() -> None:
    assert lookup().draft([1, 2, 3, 3, 1, 2, 4, 4, 1, 2], 2) == (4, 4)


def test_a_longer_match_counts_before_a_later_one() -> None:
    assert lookup().draft([6, 7, 1, 2, 3, 3, 9, 9, 1, 2, 4, 4, 6, 7, 1, 2], 2) == (3, 3)


@pytest.mark.parametrize("token_ids", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 2]])
def test_without_an_earlier_place_there_is_no_draft(token_ids: list[int]) -> None:
    assert lookup().draft(token_ids, 4) == ()


def test_what_repeats_itself_is_drafted_on_and_on() -> None:
    assert lookup().draft([9, 5, 6, 7, 5, 6], 7) == (7, 5, 6, 7, 5, 6, 7)
    assert lookup().draft([5, 5, 5], 4) == (5, 5, 5, 5)


def test_tokens_that_come_one_by_one_are_found_like_those_of_a_prompt() -> None:
    rng = Random(5)
    token_ids = [rng.randrange(4) for _ in range(200)]
    one_by_one = lookup()
    drafts = [one_by_one.draft(token_ids[:num_tokens], 3) for num_tokens in range(1, 200)]
    assert drafts == [lookup().draft(token_ids[:num_tokens], 3) for num_tokens in range(1, 200)]
    several = lookup()
    for num_tokens in (3, 4, 9, 40, 41, 47, 199):
        assert several.draft(token_ids[:num_tokens], 3) == drafts[num_tokens - 1]
    assert sum(map(bool, drafts)) > 100


def test_asking_twice_gives_the_same() -> None:
    asked = lookup()
    assert asked.draft([1, 2, 3, 1, 2], 2) == asked.draft([1, 2, 3, 1, 2], 2) == (3, 1)


def test_no_draft_is_longer_than_asked_for_or_than_what_is_left() -> None:
    token_ids = [1, 2, 3, 4, 5, 6, 1, 2]
    assert lookup().draft(token_ids, 0) == ()
    assert lookup(max_len=11).draft(token_ids, 4) == (3, 4)
    assert lookup(max_len=10).draft(token_ids, 4) == (3,)
    assert lookup(max_len=9).draft(token_ids, 4) == ()


def test_there_is_no_draft_before_the_first_length() -> None:
    assert lookup(first_len=6).draft([1, 2, 3, 1, 2], 1) == ()
    assert lookup(first_len=5).draft([1, 2, 3, 1, 2], 1) == (3,)


REPEATED = [1, 2, 3, 4, 5, 6, 1, 2]


def test_the_first_draft_is_one_token_and_each_after_a_right_one_is_longer() -> None:
    made = PromptLookup(0, 1000)
    for number in range(1, 5):
        assert len(made.draft(REPEATED, 9)) == number
        made.learn(number, number, 8)


def test_after_a_draft_that_was_right_in_part_the_next_is_as_long_as_that_part() -> None:
    made = lookup(4)
    made.learn(4, 2, 8)
    assert made.draft(REPEATED, 9) == (3, 4)


def test_after_drafts_that_were_wrong_there_is_none_for_twice_as_long_each_time() -> None:
    made, lengths = lookup(4), [8]
    for _ in range(7):
        made.learn(4, 0, lengths[-1])
        lengths.append(next(n for n in range(lengths[-1], 1000) if made.draft([5] * n, 9)))
    assert [later - earlier for earlier, later in pairwise(lengths)] == [1, 2, 4, 8, 16, MAX_PAUSE, MAX_PAUSE]
    assert made.draft([5] * lengths[-1], 9) == (5,)


def test_a_draft_that_was_right_ends_the_pauses() -> None:
    made = lookup()
    for num_right in (0, 0, 0, 1, 0):
        made.learn(2, num_right, 0)
    assert made.draft([1, 1, 1], 1) == (1,)


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": "{}"},
        {"logit_bias": ((5, 1.0),)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"num_logprobs": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_asks_for_more_than_a_plain_choice_is_not_drafted(asked: dict[str, object]) -> None:
    assert PromptLookup.of(SamplingParams(max_tokens=5, **asked), 3, 100) is None  # type: ignore[arg-type]


def test_limits_come_from_the_parameters_and_the_context() -> None:
    prompt = [1, 2, 3, 4, 5, 6]
    made = PromptLookup.of(SamplingParams(max_tokens=5, min_tokens=2, temperature=0.8, top_p=0.9, top_k=3), 6, 100)
    assert made is not None
    assert made.draft([*prompt[:5], 1, 2], 9) == ()
    assert made.draft([*prompt, 1, 2], 9) == (3,)
    made.learn(1, 1, 8)
    made.learn(1, 1, 8)
    assert made.draft([*prompt, 1, 2], 9) == (3, 4)
    for max_tokens, max_len, draft in ((50, 10, (3,)), (50, 9, ()), (4, 50, (3,)), (3, 50, ())):
        made = PromptLookup.of(SamplingParams(max_tokens=max_tokens), 6, max_len)
        assert made is not None
        assert made.draft([*prompt, 1, 2], 9) == draft


class Watched(list[int]):
    """Counts the tokens that are read of it in slices."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found


def test_a_new_token_costs_the_same_behind_a_long_prompt() -> None:
    asked, token_ids = lookup(max_len=5000), Watched(range(1000))
    asked.draft(token_ids, 4)
    assert token_ids.num_read > 1000
    token_ids.num_read = 0
    token_ids.append(7)
    asked.draft(token_ids, 4)
    assert token_ids.num_read < 30
