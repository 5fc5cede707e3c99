"""Choosing the next token of every row from its logits.

Owns greedy choice and sampling by inverse cumulative distribution with the counter-based draws of
`decode.engine.sampling`, and log probabilities. Does not remember anything: a row's token depends on its logits and
its `SampleRow` alone.

Everything that changes logits does so before temperature: first what penalties and biases add, then what may not be
chosen becomes minus infinity. Log probabilities are those of the logits as they came.

Filters never sort tokens, only probabilities: each filter gives a least probability, and all tokens that reach it
stay, those with equal probability included. So equal probabilities cannot make the result depend on a sort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decode.engine.grammar import GrammarMatcher, Mask
from decode.engine.sampling import Chosen, LogitAdjustments, SamplingParams, TokenLogprobs, uniform
from decode.errors import IntegrityError

_FEW = 1024
"""Probabilities looked at before all of them are sorted."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What decides one row besides its logits. `index` is the output index of the token to choose."""

    sampling: SamplingParams
    index: int
    adjustments: LogitAdjustments | None = None
    grammar: GrammarMatcher | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
    """`logits` [len(rows), vocab], float32; may be overwritten. Greedy ties go to the lowest token id.

    Raises IntegrityError when a row has no finite maximum: the weights or the cache are broken.
    """
    if not rows:
        return Chosen([])
    wanted = {i: row.sampling.num_logprobs for i, row in enumerate(rows) if row.sampling.num_logprobs is not None}
    raw = {i: logits[i].clone() for i in wanted}
    for i, row in enumerate(rows):
        _change(logits[i], row)
    best, greedy = logits.max(-1)
    if not bool(torch.isfinite(best).all()):
        raise IntegrityError("logits are not finite: broken weights or a broken cache")
    chosen: list[int] = greedy.tolist()
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if drawn:
        tokens = _draw(logits[drawn] - best[drawn, None], [rows[i] for i in drawn])
        for i, token in zip(drawn, tokens, strict=True):
            chosen[i] = token
    return Chosen(chosen, {i: _logprobs(raw[i], chosen[i], number) for i, number in wanted.items()})


def _change(logits: Tensor, row: SampleRow) -> None:
    """Adjustments, bans and the grammar's mask into the logits of one row, [vocab]."""
    vocab, sampling = logits.shape[0], row.sampling
    if row.adjustments is not None:
        ids, values = np.array(row.adjustments.token_ids), np.array(row.adjustments.values)
        inside = (ids >= 0) & (ids < vocab)
        logits[torch.from_numpy(ids[inside]).long()] += torch.from_numpy(values[inside]).to(logits.device)
    if row.grammar is not None:
        logits.masked_fill_(_forbidden(row.grammar.mask(), vocab).to(logits.device), -torch.inf)
    elif row.index < sampling.min_tokens and sampling.stop_token_ids:
        logits[[token for token in sampling.stop_token_ids if 0 <= token < vocab]] = -torch.inf


def _forbidden(mask: Mask, vocab: int) -> Tensor:
    """[vocab], bool"""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab, bitorder="little")
    return torch.from_numpy(bits == 0)


def _logprobs(logits: Tensor, token: int, number: int) -> TokenLogprobs:
    """`logits` [vocab], as the model gave them. Ties go to the lowest id."""
    logprobs = logits.log_softmax(-1)
    top: list[tuple[int, float]] = []
    if number := min(number, logits.shape[0]):
        candidates = (logits >= logits.topk(number).values[-1]).nonzero()[:, 0]
        order = logits[candidates].sort(descending=True, stable=True).indices[:number]
        ids = candidates[order]
        top = list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token]), tuple(top))


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
