#include "attention.hpp"

namespace tf {

namespace {

constexpr int kRun = 8;  // calls of ByteSum::add

template <int R>
TF_NOINLINE void score_rows(AttentionScratch& s, const uint8_t* keys, const float* scales, int dim, int row, int column) {
  vi acc[R];
  for (int r = 0; r < R; r++) acc[r] = splat_i(s.query_offset[row + r]);
  const int32_t* q = s.query + row / kGroup * (dim / 4 * kParts * kGroup);
  for (int first = 0; first < dim / 4; first += kRun) {
    ByteSum sums[R][kParts];
    for (int j = first; j < first + kRun; j++) {
      const vi k = load_i(keys + 64 * j);
      const int32_t* words = q + j * (kParts * kGroup);
      for (int part = 0; part < kParts; part++)
        for (int r = 0; r < R; r++) {
          sums[r][part].add(k, splat_i(words[part * kGroup + r]));
          sums[r][part].settle();
        }
    }
    for (int r = 0; r < R; r++) acc[r] = acc[r] + total(sums[r]);
  }
  vf key_scale = load(scales);
  for (int r = 0; r < R; r++)
    store(&s.score[row + r][column], to_float(acc[r]) * key_scale * s.query_scale[row + r]);
}

// Which tokens of a span a query sees.
struct Seen {
  int start, oldest, position;
  bool whole() const { return oldest <= start && position >= start + kSpan - 1; }
  TF_INLINE vi mask(int i) const {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, token = lane + (start + 16 * i);
    return (token <= position) & (token >= oldest);
  }
};

// The largest score of a row; what it does not see becomes kMasked.
TF_INLINE float top_score(float* scores, const Seen& seen) {
  if (!seen.whole())
    for (int i = 0; i < 4; i++) store(scores + 16 * i, select(seen.mask(i), load(scores + 16 * i), splat(kMasked)));
  return max_lanes(max(max(load(scores), load(scores + 16)), max(load(scores + 32), load(scores + 48))));
}

// The weights of a row from its scores, and what they add up to.
TF_INLINE void weigh_row(AttentionScratch& s, int row, const Seen& seen, const vf (&value_scale)[4]) {
  const vf top = splat(s.top[row]);
  vf weight[4];
  for (int i = 0; i < 4; i++) {
    weight[i] = exp2_weight(load(&s.score[row][16 * i]) - top);
    if (!seen.whole()) weight[i] = select(seen.mask(i), weight[i], vf{});  // kMasked is not below the range of exp2
  }
  s.total[row] = s.total[row] * s.decay[row] + sum_lanes((weight[0] + weight[1]) + (weight[2] + weight[3]));
  for (int i = 0; i < 4; i++) {
    weight[i] = weight[i] * value_scale[i];
    if (!seen.whole()) weight[i] = select(seen.mask(i), weight[i], vf{});  // SAFETY: a free slot may hold any scale
  }
  const float most = max_lanes(max(max(weight[0], weight[1]), max(weight[2], weight[3])));
  const float inverse = most > 0x1p-100f ? 255.0f / most : 0.0f;
  s.weight_scale[row] = most / 255.0f;
  for (int i = 0; i < 4; i++) {
    const vi rounded = to_int(weight[i] * inverse);
    for (int part = 0; part < kParts; part++) store_bytes(&s.weight[row][part][16 * i], unsigned_part(rounded, part));
  }
}

// One softmax update of all rows with the scores of the span that begins at token `start`.
TF_NOINLINE void weigh_rows(AttentionScratch& s, const Tile& tile, int start, const vf (&value_scale)[4]) {
  const int rows = tile.rows();
  auto seen = [&](int r) { return Seen{start, tile.oldest(s.position[r]), s.position[r]}; };
  alignas(64) float before[kTileRows];
  std::copy(s.top, s.top + rows, before);
  for (int r = 0; r < rows; r++) s.top[r] = std::max(s.top[r], top_score(s.score[r], seen(r)));
  for (int r = 0; r < rows; r += 16) store(s.decay + r, exp2_weight(load(before + r) - load(s.top + r)));
  for (int r = 0; r < rows; r++) weigh_row(s, r, seen(r), value_scale);
}

// acc[r] += the weights of row r, from `weight` on, times 16 dimensions of the values of 16 tokens in each block.
template <int R, int Blocks>
TF_INLINE void sum_blocks(const uint8_t (*weight)[kParts][kSpan], const uint8_t* const* values, int first, int d,
                          vi (&acc)[R]) {
  ByteSum sums[R][kParts];
  for (int b = 0; b < Blocks; b++) {
    const uint8_t *value = values[first + b] + 256 * d, *w = weight[0][0] + 16 * (first + b);
    for (int j = 0; j < 4; j++) {
      const vi v = load_i(value + 64 * j);
      for (int part = 0; part < kParts; part++)
        for (int r = 0; r < R; r++) {
          sums[r][part].add(splat_i(load_word(w + (r * kParts + part) * kSpan + 4 * j)), v);
          sums[r][part].settle();
        }
    }
  }
  for (int r = 0; r < R; r++) acc[r] = acc[r] + total(sums[r]);
}

template <int R>
TF_NOINLINE void sum_rows(AttentionScratch& s, const uint8_t* const (&values)[4], int blocks, int dim, int rows, int row) {
  for (int d = 0; d < dim / 16; d++) {
    vi acc[R];
    for (int r = 0; r < R; r++) acc[r] = vi{};
    int b = 0;
    for (; b + 2 <= blocks; b += 2) sum_blocks<R, 2>(s.weight + row, values, b, d, acc);
    if (b < blocks) sum_blocks<R, 1>(s.weight + row, values, b, d, acc);
    float* sum = s.sum + (size_t(d) * rows + row) * 16;
    for (int r = 0; r < R; r++) {
      vf kept = load(sum + 16 * r) * s.decay[row + r];
      store(sum + 16 * r, fma(to_float(acc[r]), splat(s.weight_scale[row + r]), kept));
    }
  }
}

// f.template operator()<R>(row) over groups of at most kGroup rows that never straddle a multiple of it.
template <typename F>
TF_INLINE void in_groups(int rows, F&& f) {
  for (int row = 0; row < rows; row += kGroup)
    with_constant<kGroup>(std::min(kGroup, rows - row), [&]<int R>() { f.template operator()<R>(row); });
}

}  // namespace

void attend(const Cache& cache, const Tile& tile, AttentionScratch& s) {
  const int rows = tile.rows(), dim = cache.head_dim, last = tile.position(rows - 1);
  for (int r = 0; r < rows; r++) s.position[r] = tile.position(r);
  std::fill(s.top, s.top + rows, kMasked);
  std::fill(s.total, s.total + rows, 0.0f);
  std::fill(s.sum, s.sum + size_t(rows) * dim, 0.0f);
  for (int start = tile.oldest(tile.first_position) / kSpan * kSpan; start <= last; start += kSpan) {
    const int blocks = std::min(kSpan, last - start + kCacheBlock) / kCacheBlock;
    uint8_t* block[4];
    const uint8_t* values[4];
    vf value_scale[4] = {};
    for (int b = 0; b < blocks; b++) {
      block[b] = cache.block(tile.block_table[start / kCacheBlock + b], tile.kv_head);
      values[b] = cache.values(block[b]);
      value_scale[b] = load(cache.value_scales(block[b]));
    }
    for (int b = 0; b < 4 && start + kSpan + b * kCacheBlock <= last; b++) {
      const uint8_t* next = cache.block(tile.block_table[(start + kSpan) / kCacheBlock + b], tile.kv_head);
      for (size_t line = 0; line < Cache::block_bytes(dim); line += 64) __builtin_prefetch(next + line);
    }
    for (int b = 0; b < 4; b++) {
      if (b < blocks)
        in_groups(rows, [&]<int R>(int row) {
          score_rows<R>(s, block[b], cache.key_scales(block[b]), dim, row, 16 * b);
        });
      else
        for (int r = 0; r < rows; r++) store(&s.score[r][16 * b], splat(kMasked));
    }
    weigh_rows(s, tile, start, value_scale);
    in_groups(rows, [&]<int R>(int row) { sum_rows<R>(s, values, blocks, dim, rows, row); });
  }
}

}  // namespace tf
