"""How the next token is chosen, as data: the sampling parameters of one request and its random draws.

Owns `SamplingParams` and the counter-based generator. Refuses to know about tensors: `decode.sampler` applies
these to logits. Standard library only, because the web process puts these into a job and must never load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASK64 = (1 << 64) - 1


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
    """A grammar for `decode.grammar` that the output has to follow; empty: none."""


MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities under the model's own distribution (temperature 1, nothing filtered)."""

    logprob: float
    """Of the token that was chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, its log probability) of the likeliest tokens, likeliest first, ties by id."""


def uniform(seed: int, index: int) -> float:
    """A draw in [0, 1) for output token `index` of a request with `seed`.

    The draw depends on nothing but its arguments, so a continued request repeats the draws it would have made.
    The mixing function is SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    """
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1342543DE82EF95) & _MASK64
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
        z ^= z >> 31
    return (z >> 11) / float(1 << 53)
