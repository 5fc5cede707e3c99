"""How the next token is chosen, as data: the sampling parameters of one request and its random draws.

Owns `SamplingParams`, what biases and penalties come to, and the counter-based generator. Does not know about
tensors: `decode.oracle.sampler` applies these to logits. Standard library only, because the web process puts these
into a job and must never load torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MAX_TOKEN_ID = 1 << 31


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything about one request that decides its next token, besides the token history.

    `temperature` 0 means greedy. `top_k` 0 and `min_p` 0 switch those filters off. `seed` is always set by the
    time a job is made (the web process draws one when the client gave none), so that a request that moves to
    another worker continues with the same draws. `max_tokens` counts output tokens, including a final EOS.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output with reason "stop": the checkpoint's EOS ids, put here by the web process."""
    ignore_eos: bool = False
    """Do not stop at `stop_token_ids` (for benchmarks)."""
    min_tokens: int = 0
    """`stop_token_ids` cannot be chosen before this many output tokens exist."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that is in the output already."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as many times as the token is in the output already."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens to report beside each output token; None: no log probabilities at all."""
    grammar: str = ""
    """A grammar for `decode.engine.grammar` that the output has to follow; empty: none."""


MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own distribution (temperature 1, nothing filtered)."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, its log probability) of the likeliest tokens, likeliest first, ties by id."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a step chose, in the order of the sampling sequences of its plan."""

    token_ids: list[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """By place in `token_ids`; only of the sequences that asked."""


class LogitAdjustments:
    """What biases and penalties add to the logits of one row, before temperature: one sum for each token concerned.

    The sums depend on the parameters and the output tokens alone: bias - count * frequency_penalty, less the
    presence_penalty where the count is above 0 (OpenAI's formula, over the output and not the prompt). They are kept
    up to date token by token, so that a step copies them instead of counting.
    """

    __slots__ = ("_bias", "_counts", "_sampling", "_slots", "token_ids", "values")

    def __init__(self, sampling: SamplingParams, output_token_ids: Iterable[int]) -> None:
        self._sampling = sampling
        self._bias = {token: bias for token, bias in sampling.logit_bias if 0 <= token < _MAX_TOKEN_ID}
        self._counts: dict[int, int] = {}
        self._slots = {token: slot for slot, token in enumerate(self._bias)}
        self.token_ids = array("i", self._bias)
        """Each id once; some may be outside the vocabulary, which nobody minds."""
        self.values = array("f", self._bias.values())
        for token_id in output_token_ids:
            self.count(token_id)

    @staticmethod
    def of(sampling: SamplingParams, output_token_ids: Iterable[int]) -> LogitAdjustments | None:
        """None where the parameters change no logit."""
        if sampling.logit_bias or sampling.presence_penalty or sampling.frequency_penalty:
            return LogitAdjustments(sampling, output_token_ids)
        return None

    def count(self, token_id: int) -> None:
        """One more output token."""
        sampling = self._sampling
        if not sampling.presence_penalty and not sampling.frequency_penalty:
            return
        count = self._counts[token_id] = self._counts.get(token_id, 0) + 1
        penalty = count * sampling.frequency_penalty + sampling.presence_penalty
        value = self._bias.get(token_id, 0.0) - penalty
        slot = self._slots.setdefault(token_id, len(self.token_ids))
        if slot == len(self.token_ids):
            self.token_ids.append(token_id)
            self.values.append(value)
        else:
            self.values[slot] = value


def uniform(seed: int, index: int) -> float:
    """A draw in [0, 1) for output token `index` of a request with `seed`.

    The draw depends on nothing but its arguments, so a continued request repeats the draws it would have made.
    """
    z = split_mix(split_mix(seed * GOLDEN_GAMMA + (index + 1) * 0xD1342543DE82EF95))
    return (z >> 11) / float(1 << 53)


def split_mix(state: int) -> int:
    """SplitMix64 of `state` (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    z = (state + GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
