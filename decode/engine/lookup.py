"""Draft tokens by prompt lookup: what followed the last few tokens when they occurred before in the same sequence.

Owns the index of one sequence and how far ahead it guesses. Does not know how drafts are computed and compared
(`decode.engine.engine`): it is told how many were right. Drafts decide what a step computes, never what a token is.

The method is A. Saxena's ("Prompt Lookup Decoding", 2023). The longest n-gram counts, and of its places the latest.
"""

from __future__ import annotations

from decode.engine.sampling import SamplingParams

NGRAM_SIZES = (4, 2)
"""PERF: computed from 26 answers of SmolLM2-135M: 3 and 2 instead are 1 % slower where text is edited, 4 and 3 are
4 % slower in free text."""
MAX_PAUSE = 32
"""PERF: where every draft is wrong, one in 33 steps has a row too many, which costs 6 to 12 % of that step. In none
of 22 answers did drafts cost more than they brought."""


class PromptLookup:
    """Of one sequence, which has at most `max_len` tokens; there are no drafts before it has `first_len`.

    A draft is one token longer after each that was right, as long as its right part after another, and after one
    without any there is none for a while: twice as long each time, up to MAX_PAUSE tokens.
    """

    __slots__ = ("_followers", "_max_len", "_next_len", "_num_indexed", "_num_wanted", "_pause")

    def __init__(self, first_len: int, max_len: int) -> None:
        self._max_len = max_len
        self._followers: dict[int, dict[tuple[int, ...], int]] = {size: {} for size in NGRAM_SIZES}
        """Where the token stands that followed an n-gram last."""
        self._num_indexed = 0
        self._num_wanted = 1
        self._next_len = first_len
        self._pause = 1

    @staticmethod
    def of(sampling: SamplingParams, num_prompt_tokens: int, max_len: int) -> PromptLookup | None:
        """None where a token depends on more of the output than its logits do, or somebody wants to see them."""
        if (
            sampling.grammar
            or sampling.logit_bias
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.num_logprobs is not None
        ):
            return None
        return PromptLookup(
            num_prompt_tokens + sampling.min_tokens, min(max_len, num_prompt_tokens + sampling.max_tokens)
        )

    def draft(self, token_ids: list[int], max_tokens: int) -> tuple[int, ...]:
        """Up to `max_tokens` tokens that may follow, none that would be beyond the end of the sequence."""
        num_tokens = len(token_ids)
        num_wanted = min(self._num_wanted, max_tokens, self._max_len - num_tokens - 1)
        if num_wanted < 1 or num_tokens < self._next_len:
            return ()
        self._index(token_ids)
        for size, followers in self._followers.items():
            start = followers.get(tuple(token_ids[-size:]))
            if start is not None:
                # What followed may be shorter than the draft: it ends where the sequence ends now. Behind that the
                # sequence would repeat with this period, so the index wraps instead of running off the end.
                period = num_tokens - start
                return tuple(token_ids[start + number % period] for number in range(num_wanted))
        return ()

    def learn(self, num_drafted: int, num_right: int, num_tokens: int) -> None:
        """The first `num_right` of a draft were right, and the sequence has `num_tokens` tokens now."""
        if num_right == num_drafted:
            self._num_wanted += 1
        else:
            self._num_wanted = max(1, num_right)
        if num_right:
            self._pause = 1
        else:
            self._next_len = num_tokens + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)

    def _index(self, token_ids: list[int]) -> None:
        """Every n-gram that a token follows; the last one of the sequence is looked for, not found.

        PERF: 0.6 microseconds and 230 bytes a token of a long prompt, once; with the rest of a draft 3 a step.
        """
        for size, followers in self._followers.items():
            for follower in range(max(size, self._num_indexed), len(token_ids)):
                followers[tuple(token_ids[follower - size : follower])] = follower
        self._num_indexed = len(token_ids)
