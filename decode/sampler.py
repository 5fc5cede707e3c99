"""Choosing the next token of every row from its logits.

Owns greedy choice and sampling by inverse cumulative distribution with the counter-based draws of `decode.sampling`.
Refuses to remember anything: a row's token depends on its logits, its parameters and its output index alone.

Filters never sort tokens, only probabilities: each filter gives a least probability, and all tokens that reach it
stay, those with equal probability included. So equal probabilities cannot make the result depend on a sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.errors import IntegrityError
from decode.sampling import SamplingParams, uniform

_FEW = 1024
"""Probabilities looked at before all of them are sorted."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What decides one row besides its logits. `index` is the output index of the token to choose."""

    sampling: SamplingParams
    index: int


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """`logits` [len(rows), vocab], float32; may be overwritten. Greedy ties go to the lowest token id.

    Raises IntegrityError when a row has no finite maximum: the weights or the cache are broken.
    """
    if not rows:
        return []
    _forbid_early_stops(logits, rows)
    best, greedy = logits.max(-1)
    if not bool(torch.isfinite(best).all()):
        raise IntegrityError("logits are not finite: broken weights or a broken cache")
    chosen: list[int] = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        tokens = _draw(logits[drawn] - best[drawn, None], [rows[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            chosen[i] = token
    return chosen


def _forbid_early_stops(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    for i, row in enumerate(rows):
        if row.index < row.sampling.min_tokens and row.sampling.stop_token_ids:
            inside = [token for token in row.sampling.stop_token_ids if 0 <= token < logits.shape[1]]
            logits[i, inside] = -torch.inf


def _draw(logits: Tensor, rows: list[SampleRow]) -> list[int]:
    """`logits` [n, vocab], at most 0. Inverse CDF over the kept tokens in the order of their ids."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32, device=logits.device)
    probabilities = (logits / temperatures[:, None]).softmax(-1)
    for i, row in enumerate(rows):
        if (least := _least_kept(probabilities[i], row.sampling)) is not None:
            probabilities[i].masked_fill_(probabilities[i] < least, 0.0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)  # [n, vocab]
    draws = torch.tensor(
        [[uniform(row.sampling.seed, row.index)] for row in rows], dtype=torch.float64, device=logits.device
    )
    # the first token whose cumulative probability exceeds the draw; a token of probability 0 never does
    tokens: list[int] = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)[:, 0].tolist()
    return tokens


def _least_kept(probabilities: Tensor, sampling: SamplingParams) -> Tensor | None:
    """The least probability that passes top_k, then top_p of what top_k left, then min_p; None if nothing filters."""
    vocab = probabilities.shape[0]
    has_top_k, has_top_p = 0 < sampling.top_k < vocab, sampling.top_p < 1.0
    least = None
    if has_top_k or has_top_p:
        num_sorted = min(sampling.top_k if has_top_k else _FEW, vocab)
        values = probabilities.topk(num_sorted).values
        mass = values.double().cumsum(0)
        if has_top_p and not has_top_k and num_sorted < vocab and mass[-1] < sampling.top_p:
            values = probabilities.sort(descending=True).values
            mass = values.double().cumsum(0)
        least = values[-1] if has_top_k else None
        if has_top_p:
            wanted = mass[-1] * sampling.top_p if has_top_k else sampling.top_p
            last = int((mass < wanted).sum())  # as many as are needed to reach it
            least = values[min(last, len(values) - 1)]
    if sampling.min_p > 0:
        floor = probabilities.max() * sampling.min_p
        least = floor if least is None else torch.maximum(least, floor)
    return least
