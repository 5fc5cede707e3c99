"""Batched paged attention against the reference, and that a token's bits depend on its own sequence alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from decode.oracle import attention
from decode.oracle.attention import AttentionShape, Span, paged_attention, plan_attention, reference_attention
from decode.oracle.kv_cache import KvCache

BLOCK = 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CPU = torch.device("cpu")


@dataclass
class Context:
    """A sequence whose first `length` positions have K and V in scattered blocks of the cache."""

    length: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    """For every position."""
    blocks: list[int] = field(default_factory=list)


@dataclass
class Memory:
    shape: AttentionShape
    head_dim: int
    dtype: torch.dtype
    rng: random.Random
    cache: KvCache
    free: list[int]

    def context(self, length: int) -> Context:
        generator = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        kv = torch.randn(2, length, self.shape.num_kv_heads, self.head_dim, generator=generator).to(self.dtype)
        q = torch.randn(length, self.shape.num_heads, self.head_dim, generator=generator) * self.head_dim**-0.5
        context = Context(length, kv[0], kv[1], q.to(self.dtype))
        self.place(context)
        return context

    def place(self, context: Context) -> None:
        context.blocks = [self.free.pop() for _ in range(-(-context.length // BLOCK))]
        slots = torch.tensor([context.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(context.length)])
        self.cache.write(0, slots, context.keys, context.values)

    def attend(self, work: Sequence[tuple[Context, int, int]], window: int) -> list[Tensor]:
        """For every (context, first, stop): the attention of its positions first .. stop."""
        spans, row = [], 0
        for context, first, stop in work:
            spans.append(Span(row, first, stop - first, context.blocks))
            row += stop - first
        q = torch.cat([context.queries[first:stop] for context, first, stop in work])
        q = torch.cat((q, q.new_zeros(3, *q.shape[1:])))  # three rows of padding
        plan = plan_attention(spans, self.shape, window, BLOCK, len(q), CPU)
        output = paged_attention(q, self.cache, 0, plan)
        return list(torch.split(output[:row], [stop - first for _, first, stop in work]))


def memory(seed: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, decode_rows: int = 0) -> Memory:
    rng = random.Random(seed)
    free = list(range(1, 400))
    rng.shuffle(free)
    rows = decode_rows or -(-(heads // kv_heads) // 4) * 4
    cache = KvCache(1, kv_heads, head_dim, 400, BLOCK, dtype, CPU)
    return Memory(AttentionShape(heads, kv_heads, rows), head_dim, dtype, rng, cache, free)


def reference(context: Context, first: int, stop: int, window: int) -> Tensor:
    positions = torch.arange(first, stop)
    return reference_attention(context.queries[first:stop], context.keys, context.values, positions, window)


@pytest.mark.parametrize("window", [0, 1, 40, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
def test_decode_and_chunks_together_equal_the_reference(heads: int, kv_heads: int, window: int) -> None:
    mem = memory(1, heads, kv_heads, 16, torch.float32)
    work = [
        (mem.context(1), 0, 1),
        (mem.context(17), 0, 17),
        (mem.context(129), 128, 129),
        (mem.context(400), 300, 400),
        (mem.context(128), 127, 128),
        (mem.context(600), 599, 600),
        (mem.context(257), 100, 140),
    ]
    for (context, first, stop), got in zip(work, mem.attend(work, window), strict=True):
        torch.testing.assert_close(got, reference(context, first, stop, window), atol=2e-6, rtol=1e-5)


def test_bf16_is_near_the_reference() -> None:
    mem = memory(2, 6, 2, 32, torch.bfloat16)
    work = [(mem.context(300), 250, 300), (mem.context(70), 69, 70)]
    for (context, first, stop), got in zip(work, mem.attend(work, 0), strict=True):
        torch.testing.assert_close(got.float(), reference(context, first, stop, 0), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("decode_rows", [0, 96], ids=["few decode rows", "full tiles"])
def test_bits_depend_on_the_sequence_alone(dtype: torch.dtype, window: int, decode_rows: int) -> None:
    mem = memory(3, 6, 2, 16, dtype, decode_rows)
    subject = mem.context(280)
    alone = torch.cat([mem.attend([(subject, p, p + 1)], window)[0] for p in range(280)])
    for _ in range(6):
        cuts = sorted({0, 280, *(mem.rng.randrange(280) for _ in range(mem.rng.randrange(8)))})
        got = []
        for first, stop in itertools.pairwise(cuts):
            neighbours = []
            for _ in range(mem.rng.randrange(4)):
                length = mem.rng.choice([1, 20, 140, 300])
                neighbours.append((mem.context(length), mem.rng.randrange(length), length))
            mine = mem.rng.randrange(len(neighbours) + 1)
            work = [*neighbours[:mine], (subject, first, stop), *neighbours[mine:]]
            got.append(mem.attend(work, window)[mine])
            for context, _, _ in neighbours:
                mem.free = [*context.blocks, *mem.free]
        assert torch.equal(torch.cat(got), alone), cuts


def test_work_beyond_the_score_limit_runs_in_parts_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    mem = memory(4, 6, 2, 16, torch.float32)
    work = [(mem.context(200), 0, 200), (mem.context(90), 89, 90), (mem.context(300), 299, 300)]
    whole = mem.attend(work, 0)
    monkeypatch.setattr(attention, "_MAX_SCORES", 1)
    spans = [Span(0, 0, 200, work[0][0].blocks)]
    assert len(plan_attention(spans, mem.shape, 0, BLOCK, 200, CPU).parts) == 7
    for one, other in zip(whole, mem.attend(work, 0), strict=True):
        assert torch.equal(one, other)


def test_a_window_gathers_only_the_chunks_it_can_see() -> None:
    mem = memory(5, 6, 2, 16, torch.float32)
    context = mem.context(600)
    plan = plan_attention([Span(0, 599, 1, context.blocks)], mem.shape, 100, BLOCK, 1, CPU)
    assert len(plan.parts[0].mask) == 2  # positions 500 to 599 lie in chunks 384 to 511 and 512 to 639
    assert len(plan_attention([Span(0, 599, 1, context.blocks)], mem.shape, 0, BLOCK, 1, CPU).parts[0].mask) == 5
