"""Attention of the scheduled tokens over the paged cache: a reference that is the specification, and a batched path.

Owns the order in which a token's attention is summed: positions in chunks of `CHUNK` counted from position 0, the
maximum over all of them, the sum inside a chunk by one product of fixed size, then chunk after chunk. So the bits
depend on the sequence alone, not on its neighbours or on how it was cut into steps. Planning (`decode.oracle.batch`
calls `plan_attention`) happens once per step; `PagedAttention` then runs per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decode.oracle.kv_cache import KvCache

CHUNK = 128
"""Positions of the cache that one product covers."""
PREFILL_TILE = 32
"""Query positions of one sequence that share a gathered chunk."""
_MAX_SCORES = 8_000_000
"""Scores in memory at once; more work than that runs in several parts."""

Ints = npt.NDArray[np.int64]


def reference_attention(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int) -> Tensor:
    """The specification, for one sequence. Float32 throughout; query heads share key heads in consecutive groups.

    `q` [tokens, num_heads, head_dim], scaled already; `keys`, `values` [context, num_kv_heads, head_dim] from
    position 0; `positions` [tokens]; a `window` of 0 means none. Returns [tokens, num_heads, head_dim].
    """
    group = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(group, 1)  # [context, num_heads, head_dim]
    values = values.float().repeat_interleave(group, 1)
    scores = torch.einsum("thd,chd->htc", q.float(), keys)
    context = torch.arange(keys.shape[0], device=q.device)
    visible = context <= positions[:, None]  # [tokens, context]
    if window:
        visible &= context > positions[:, None] - window
    return torch.einsum("htc,chd->thd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What of a model the plan depends on. `decode_rows`: rows of a product for one query position per sequence."""

    num_heads: int
    num_kv_heads: int
    decode_rows: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def decode_tile(self) -> int:
        """Query positions that `decode_rows` can hold: 1 if it is just enough for that."""
        return PREFILL_TILE if self.decode_rows == PREFILL_TILE * self.group else 1


@dataclass(frozen=True, slots=True)
class AttentionPart:
    """Tiles of query positions that run together: every (tile, chunk it can see) is a pair, tile after tile."""

    num_tiles: int
    num_rows: int
    """Rows of a product: (query position, head of the group), position by position, then padding."""
    query_rows: Tensor
    """[num_kv_heads * pairs * num_rows] into q as [tokens * num_heads, head_dim]."""
    blocks: Tensor
    """[pairs * CHUNK / block_size]"""
    mask: Tensor
    """[pairs, num_rows, CHUNK], 0 or -inf."""
    tile_of_pair: Tensor
    """[pairs]"""
    pairs_of_tile: Tensor
    """[max chunks, num_tiles]; a tile with fewer chunks points to the pair behind the last, which is neutral."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    parts: tuple[AttentionPart, ...]
    output_rows: Tensor
    """[tokens * num_heads] into the parts' results, one behind the other, as [.., head_dim]."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in this step."""

    first_row: int
    """Row of the first of them among all tokens of the step."""
    first_position: int
    num_tokens: int
    block_table: Sequence[int]


def plan_attention(
    spans: Sequence[Span], shape: AttentionShape, window: int, block_size: int, num_rows: int, device: torch.device
) -> AttentionPlan:
    """`num_rows`: rows of q, those after the spans being padding (they repeat row 0's result)."""
    width = -(-max(len(span.block_table) for span in spans) * block_size // CHUNK) * CHUNK // block_size
    tables = np.zeros((len(spans), width), np.int64)
    for row, span in zip(tables, spans, strict=True):
        row[: len(span.block_table)] = span.block_table
    output_rows = np.zeros(num_rows * shape.num_heads, np.int64)
    parts, offset = [], 0
    for tile, selected in _by_tile(spans, shape):
        for tiles in _cut(_tiles(spans, selected, tile), tile * shape.group, window, shape):
            part = _part(tiles, tile, tables, shape, window, block_size)
            _place_outputs(output_rows, offset, tiles, part, shape)
            offset += shape.num_kv_heads * part.num_tiles * part.num_rows
            parts.append(_to_device(part, device))
    return AttentionPlan(tuple(parts), torch.from_numpy(output_rows).to(device))


def _by_tile(spans: Sequence[Span], shape: AttentionShape) -> list[tuple[int, list[int]]]:
    single = [i for i, span in enumerate(spans) if span.num_tokens <= shape.decode_tile]
    longer = [i for i, span in enumerate(spans) if span.num_tokens > shape.decode_tile]
    return [(tile, chosen) for tile, chosen in ((shape.decode_tile, single), (PREFILL_TILE, longer)) if chosen]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """[n] each: the span, the first row and position, and the number of query positions of every tile."""

    span: Ints
    row: Ints
    position: Ints
    count: Ints

    def slice(self, start: int, stop: int) -> _Tiles:
        return _Tiles(*(values[start:stop] for values in (self.span, self.row, self.position, self.count)))

    def first_chunks(self, window: int) -> Ints:
        oldest = np.maximum(self.position - window + 1, 0) if window else np.zeros_like(self.position)
        return oldest // CHUNK

    def num_chunks(self, window: int) -> Ints:
        return (self.position + self.count - 1) // CHUNK - self.first_chunks(window) + 1


def _tiles(spans: Sequence[Span], selected: list[int], tile: int) -> _Tiles:
    table = [
        (i, spans[i].first_row + start, spans[i].first_position + start, min(tile, spans[i].num_tokens - start))
        for i in selected
        for start in range(0, spans[i].num_tokens, tile)
    ]
    return _Tiles(*np.asarray(table, np.int64).T)


def _cut(tiles: _Tiles, num_rows: int, window: int, shape: AttentionShape) -> list[_Tiles]:
    """Into parts whose scores fit in memory; a tile is never cut."""
    scores = np.cumsum(tiles.num_chunks(window)) * (shape.num_kv_heads * num_rows * CHUNK)
    edges = [0]
    for end in range(1, len(scores)):
        before = scores[edges[-1] - 1] if edges[-1] else 0
        if scores[end] - before > _MAX_SCORES:
            edges.append(end)
    return [tiles.slice(start, stop) for start, stop in zip(edges, [*edges[1:], len(scores)], strict=True)]


def _part(
    tiles: _Tiles, tile: int, tables: Ints, shape: AttentionShape, window: int, block_size: int
) -> AttentionPart:
    num_tiles, group = len(tiles.span), shape.group
    num_rows = shape.decode_rows if tile == shape.decode_tile else PREFILL_TILE * group
    num_chunks = tiles.num_chunks(window)
    ends = np.cumsum(num_chunks)
    tile_of_pair = np.repeat(np.arange(num_tiles), num_chunks)
    chunk = np.arange(ends[-1]) - (ends - num_chunks - tiles.first_chunks(window))[tile_of_pair]  # [pairs]
    # Which query position of its tile a row belongs to. Padding repeats the first: a row that saw nothing would have
    # the maximum -inf and become NaN. The shape is the same however many positions a tile has, and with it the order
    # of the sums: so bits do not depend on the neighbours.
    step = np.arange(num_rows) // group
    step = np.where((np.arange(num_rows) < tile * group) & (step < tiles.count[:, None]), step, 0)  # [tiles, rows]
    heads = np.arange(shape.num_kv_heads)[:, None, None] * group + np.arange(num_rows) % group
    query_rows = (tiles.row[:, None] + step) * shape.num_heads + heads  # [kv_heads, tiles, rows]
    positions = (tiles.position[:, None] + step)[tile_of_pair][..., None]  # [pairs, rows, 1]
    context = (chunk[:, None] * CHUNK + np.arange(CHUNK))[:, None]  # [pairs, 1, CHUNK]
    visible = context <= positions
    if window:
        visible &= context > positions - window
    per_chunk = CHUNK // block_size
    blocks = tables[tiles.span[tile_of_pair][:, None], chunk[:, None] * per_chunk + np.arange(per_chunk)]
    order = np.arange(num_chunks.max())[:, None]
    return AttentionPart(
        num_tiles=num_tiles,
        num_rows=num_rows,
        query_rows=torch.from_numpy(query_rows[:, tile_of_pair].reshape(-1)),
        blocks=torch.from_numpy(blocks.reshape(-1)),
        mask=torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))),
        tile_of_pair=torch.from_numpy(tile_of_pair),
        pairs_of_tile=torch.from_numpy(np.where(order < num_chunks, ends - num_chunks + order, ends[-1])),
    )


def _place_outputs(output_rows: Ints, offset: int, tiles: _Tiles, part: AttentionPart, shape: AttentionShape) -> None:
    """Fill in where the result of every (token, head) will be: [kv_heads, tiles, rows] from `offset` on."""
    group = shape.group
    for index, (row, count) in enumerate(zip(tiles.row, tiles.count, strict=True)):
        head = np.arange(shape.num_heads)
        start = offset + (head // group * part.num_tiles + index) * part.num_rows + head % group  # [num_heads]
        places = start + np.arange(count)[:, None] * group  # [count, num_heads]
        output_rows[row * shape.num_heads : (row + count) * shape.num_heads] = places.reshape(-1)


def _to_device(part: AttentionPart, device: torch.device) -> AttentionPart:
    if device.type == "cpu":
        return part
    tensors = (part.query_rows, part.blocks, part.mask, part.tile_of_pair, part.pairs_of_tile)
    return AttentionPart(part.num_tiles, part.num_rows, *(tensor.to(device) for tensor in tensors))


def paged_attention(q: Tensor, cache: KvCache, layer: int, plan: AttentionPlan) -> Tensor:
    """`q` [tokens, num_heads, head_dim], scaled, in the cache's type. Returns the same shape and type."""
    flat = q.reshape(-1, q.shape[-1])
    outputs = [_run(flat, cache, layer, part) for part in plan.parts]
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.index_select(0, plan.output_rows).to(q.dtype).view(q.shape)


def _run(flat: Tensor, cache: KvCache, layer: int, part: AttentionPart) -> Tensor:
    """[kv_heads * tiles * rows, head_dim], float32. In comments: h kv heads, p pairs, t tiles, r rows, d head_dim."""
    num_pairs, num_rows, _ = part.mask.shape
    keys, values = cache.gather(layer, part.blocks)  # [h, p * CHUNK, d]
    heads, _, dim = keys.shape
    query = flat.index_select(0, part.query_rows).view(-1, num_rows, dim)  # [h * p, r, d]
    scores = torch.bmm(query, keys.view(-1, CHUNK, dim).transpose(1, 2)).view(heads, num_pairs, num_rows, CHUNK)
    scores = scores + part.mask  # float32
    is_single = part.pairs_of_tile.shape[0] == 1
    peak = scores.amax(-1)  # [h, p, r]
    if not is_single:
        none = peak.new_full((heads, 1, num_rows), -torch.inf)
        by_tile = torch.cat((peak, none), 1).index_select(1, part.pairs_of_tile.view(-1))
        by_tile = by_tile.view(heads, -1, part.num_tiles, num_rows).amax(1)  # [h, t, r]
        peak = by_tile.index_select(1, part.tile_of_pair)
    weights = scores.sub_(peak[..., None]).exp_()
    total = weights.sum(-1, keepdim=True)  # [h, p, r, 1]
    mixed = torch.bmm(weights.to(flat.dtype).view(-1, num_rows, CHUNK), values.view(-1, CHUNK, dim))
    mixed = mixed.view(heads, num_pairs, num_rows, dim).float()  # [h, p, r, d]
    if not is_single:
        mixed, total = _add_chunks(mixed, part), _add_chunks(total, part)
    return (mixed / total).view(-1, dim)


def _add_chunks(values: Tensor, part: AttentionPart) -> Tensor:
    """Sum the pairs of every tile in the order of their chunks: [h, p, r, n] -> [h, t, r, n]."""
    heads, _, num_rows, size = values.shape
    extended = torch.cat((values, values.new_zeros(heads, 1, num_rows, size)), 1)
    total = extended.index_select(1, part.pairs_of_tile[0])
    for pairs in part.pairs_of_tile[1:]:
        total = total + extended.index_select(1, pairs)
    return total
