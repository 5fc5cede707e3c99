#include "attention.hpp"

namespace tf {

namespace {

constexpr int kRun = 8;  // vectors of keys; head_dim is a multiple of what they hold
// PERF: where a product takes its sum along, it waits for the one before; every run then has sums of its own.
constexpr bool kProductsWait = kPieces == 1;

template <int R>
TF_NOINLINE void score_rows(AttentionScratch& s, const Cache& cache, uint8_t* const (&block)[4], int blocks, int row) {
  const int dim = cache.head_dim;
  for (int b = 0; b < blocks; b++) {
    const uint8_t* keys = block[b];
    const int32_t* q = s.query + row / kGroup * (dim / 4 * kPieces * kGroup);
    vi acc[R], total[R];
    for (int r = 0; r < R; r++) acc[r] = total[r] = vi{};
    int run = dim / 4 / kRun;
    do {
      for (int j = 0; j < kRun; j++, q += kPieces * kGroup, keys += 64)
        for (int piece = 0; piece < kPieces; piece++) {
          const vi u = unsigned_piece(load_i(keys), piece);
          for (int r = 0; r < R; r++) acc[r] = add_products(acc[r], u, splat_i(q[piece * kGroup + r]));
        }
      for (int r = 0; kProductsWait && r < R; r++) total[r] = total[r] + acc[r], acc[r] = vi{};
    } while (--run);
    const vf key_scale = load(cache.key_scales(block[b]));
    for (int r = 0; r < R; r++) {
      const vi products = (kProductsWait ? total : acc)[r] + s.query_offset[row + r];
      store(&s.score[row + r][16 * b], to_float(products) * key_scale * s.query_scale[row + r]);
    }
  }
}

// Which tokens of the span that begins at token `start` a query sees.
struct Seen {
  int start, oldest, position;
  TF_INLINE vi mask(int i) const {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, token = lane + (start + 16 * i);
    return (token <= position) & (token >= oldest);
  }
};

// The largest scores of a row, not reduced yet; what it does not see becomes kMasked.
template <bool Whole>
TF_INLINE vf top_scores(float* scores, const Seen& seen) {
  if (!Whole)
    for (int i = 0; i < 4; i++) store(scores + 16 * i, select(seen.mask(i), load(scores + 16 * i), splat(kMasked)));
  return max(max(load(scores), load(scores + 16)), max(load(scores + 32), load(scores + 48)));
}

// The scores of a row become its weights, times the scales of the values. What the weights add up to, and the largest
// with its scale, go to s.lanes.
template <bool Whole>
TF_INLINE void weigh_row(AttentionScratch& s, int row, const Seen& seen, const vf (&value_scale)[4]) {
  const vf top = splat(s.top[row]);
  vf weight[4];
  for (int i = 0; i < 4; i++) {
    weight[i] = exp2_weight(load(&s.score[row][16 * i]) - top);
    if (!Whole) weight[i] = select(seen.mask(i), weight[i], vf{});  // kMasked is not below the range of exp2
  }
  store(s.lanes[0][row % 16], (weight[0] + weight[1]) + (weight[2] + weight[3]));
  for (int i = 0; i < 4; i++) {
    weight[i] = weight[i] * value_scale[i];
    if (!Whole) weight[i] = select(seen.mask(i), weight[i], vf{});  // SAFETY: a free slot may hold any scale
    store(&s.score[row][16 * i], weight[i]);
  }
  store(s.lanes[1][row % 16], max(max(weight[0], weight[1]), max(weight[2], weight[3])));
}

// One softmax update of all rows with the scores of the span that begins at token `start`. Whole: every row sees all
// of it.
// PERF: in passes over 16 rows. One row alone is a chain of operations that wait for each other.
template <bool Whole>
TF_NOINLINE void weigh_rows(AttentionScratch& s, const Tile& tile, int start, const vf (&value_scale)[4]) {
  auto seen = [&](int r) { return Seen{start, tile.oldest(s.position[r]), s.position[r]}; };
  for (int first = 0; first < tile.rows(); first += 16) {
    const int count = std::min(16, tile.rows() - first), end = first + count;
    for (int r = first; r < end; r++) store(s.lanes[0][r % 16], top_scores<Whole>(s.score[r], seen(r)));
    const vf before = load(s.top + first), top = max(max_rows_lanes(s.lanes[0], count), before);
    const vf decay = exp2_weight(before - top);
    store(s.top + first, top);
    store(s.decay + first, decay);
    for (int r = first; r < end; r++) weigh_row<Whole>(s, r, seen(r), value_scale);
    store(s.total + first, load(s.total + first) * decay + sum_rows_lanes(s.lanes[0], count));
    const vf most = max_rows_lanes(s.lanes[1], count);
    alignas(64) float inverse[16];
    store(inverse, select(most > 0x1p-100f, 255.0f / most, vf{}));
    store(s.weight_scale + first, most / 255.0f);
    for (int r = first; r < end; r++) {
      vi rounded[4];
      for (int i = 0; i < 4; i++) rounded[i] = to_int(load(&s.score[r][16 * i]) * inverse[r - first]);
      store_unsigned(s.weight[r], rounded);
    }
  }
}

template <int R>
TF_NOINLINE void sum_rows(AttentionScratch& s, const uint8_t* const (&values)[4], int blocks, int dim, int rows, int row) {
  for (int d = 0; d < dim / 16; d++) {
    vi acc[R];
    for (int r = 0; r < R; r++) acc[r] = vi{};
    for (int b = 0; b < blocks; b++) {
      const uint8_t *value = values[b] + 256 * d, *w = s.weight[row][0] + 16 * b;
      for (int j = 0; j < 4; j++) {
        const vi v = load_i(value + 64 * j);
        for (int piece = 0; piece < kPieces; piece++) {
          const vi p = signed_piece(v, piece);
          for (int r = 0; r < R; r++)
            acc[r] = add_products(acc[r], splat_i(load_word(w + (r * kPieces + piece) * kSpan + 4 * j)), p);
        }
      }
    }
    float* sum = s.sum + (size_t(d) * rows + row) * 16;
    for (int r = 0; r < R; r++) {
      vf kept = load(sum + 16 * r) * s.decay[row + r];
      store(sum + 16 * r, fma(to_float(acc[r] >> kSignedShift), splat(s.weight_scale[row + r]), kept));
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
    // PERF: with AVX2 (Zen 3) the processor fetches blocks well by itself: attention of a step of decode takes 3 to 17 %
    // less time without these.
    for (int b = 0; !TOKENFERRY_AVX2 && b < 4 && start + kSpan + b * kCacheBlock <= last; b++) {
      const uint8_t* next = cache.block(tile.block_table[(start + kSpan) / kCacheBlock + b], tile.kv_head);
      for (size_t line = 0; line < Cache::block_bytes(dim); line += 64) __builtin_prefetch(next + line);
    }
    in_groups(rows, [&]<int R>(int row) { score_rows<R>(s, cache, block, blocks, row); });
    for (int b = blocks; b < 4; b++)
      for (int r = 0; r < rows; r++) store(&s.score[r][16 * b], splat(kMasked));
    const bool whole = tile.oldest(last) <= start && start + kSpan - 1 <= tile.first_position;
    (whole ? weigh_rows<true> : weigh_rows<false>)(s, tile, start, value_scale);
    in_groups(rows, [&]<int R>(int row) { sum_rows<R>(s, values, blocks, dim, rows, row); });
  }
}

}  // namespace tf
