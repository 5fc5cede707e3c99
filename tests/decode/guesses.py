"""Drafts that a test has in its hand, in place of those that a lookup finds, and a model that a lookup knows."""

from __future__ import annotations

from collections.abc import Callable

from decode.engine.lookup import PromptLookup
from decode.engine.sampling import Chosen
from decode.engine.scheduler import StepPlan
from decode.engine.sequence import Sequence


class Guesses(PromptLookup):
    """`guess` gives the draft, of what has been generated so far and the number of tokens that are wanted.

    Other than the real ones these may go beyond the end of the sequence.
    """

    def __init__(self, guess: Callable[[list[int], int], list[int]]) -> None:
        super().__init__(0, 1 << 30)
        self._guess = guess
        self.learned: list[tuple[int, int, int]] = []
        """(number of tokens drafted, how many were right, tokens of the sequence after that) of every draft."""

    def draft(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        return tuple(self._guess(token_ids, max_tokens)[:max_tokens])

    def learn(self, num_drafted: int, num_right: int, num_tokens: int) -> None:
        self.learned.append((num_drafted, num_right, num_tokens))


def guesses_of(
    sequence: Sequence, text: list[int], *, is_wrong_at: frozenset[int] = frozenset(), first_len: int = 0
) -> Guesses:
    """Drafts `text`, the sequence's output, with a token that it will not be at the given output indices.

    Not before the sequence has `first_len` tokens.
    """
    known = [token ^ (index in is_wrong_at) for index, token in enumerate(text)]

    def guess(token_ids: list[int], max_tokens: int) -> list[int]:
        first = len(token_ids) - sequence.num_prompt_tokens
        if len(token_ids) < first_len:
            return []
        return (known + [1] * max_tokens)[first : first + max_tokens]

    return Guesses(guess)


def repeated(plan: StepPlan) -> Chosen:
    """What a model chooses that repeats the last four tokens for ever."""
    return Chosen(
        [
            [*scheduled.sequence.token_ids, *scheduled.draft_token_ids[:number]][-4]
            for scheduled in plan.scheduled
            for number in range(scheduled.samples + len(scheduled.draft_token_ids))
        ]
    )
