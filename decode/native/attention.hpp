// Paged attention over an int8 K/V cache.
//
// A cache block holds 16 tokens of one key/value head, contiguous: K as bytes + 128, 4 dimensions of 16 tokens to a
// vector; V as bytes, 4 tokens of 16 dimensions to a vector; then a float scale per token for each. Scores and weighted
// sums are exact integers; the softmax runs over spans of 64 tokens that begin at multiples of 64. A query therefore
// reduces in an order that its own position decides, whether it comes alone, in a chunk or after a restored prefix:
// a span that is wholly masked for a query changes none of its bits.
// Source: Dao et al., "FlashAttention", 2022 (online softmax); Kwon et al., "PagedAttention", 2023 (block tables).
#pragma once

#include <algorithm>

#include "linear.hpp"

namespace tf {

constexpr int kCacheBlock = 16;  // tokens
constexpr int kSpan = 64;        // tokens of one softmax update
constexpr int kTileRows = 48;    // query rows (tokens x heads of the group) that share one pass over the cache
constexpr int kMaxHeadDim = 256;
constexpr float kMasked = -1e30f;

struct Cache {
  uint8_t* data;  // one layer: [num_blocks, num_kv_heads, block_bytes]
  int kv_heads, head_dim;

  static size_t block_bytes(int head_dim) { return size_t(kCacheBlock) * head_dim * 2 + 2 * kCacheBlock * 4; }
  uint8_t* block(int block, int head) const { return data + (size_t(block) * kv_heads + head) * block_bytes(head_dim); }
  uint8_t* values(uint8_t* block) const { return block + kCacheBlock * head_dim; }
  float* key_scales(uint8_t* block) const { return (float*)(block + 2 * kCacheBlock * head_dim); }
  float* value_scales(uint8_t* block) const { return key_scales(block) + kCacheBlock; }
};

// x[head_dim] ~ q * (returned scale), q in -127 .. 127. head_dim is a multiple of 16.
inline float quantize_head(const float* x, int head_dim, int8_t* q) {
  vf amax = vf{};
  for (int i = 0; i < head_dim; i += 16) amax = max(amax, abs(load(x + i)));
  float top = max_lanes(amax), inverse = top > 0x1p-100f ? 127.0f / top : 0.0f;
  for (int i = 0; i < head_dim; i += 16) store_bytes(q + i, to_int(load(x + i) * inverse));
  return top / 127.0f;
}

// Write one token's key and value of one head (float, [head_dim]) at `slot` of a cache block.
inline void append_token(const Cache& cache, uint8_t* block, int slot, const float* key, const float* value) {
  int8_t q[kMaxHeadDim];
  const int dim = cache.head_dim;
  cache.key_scales(block)[slot] = quantize_head(key, dim, q);
  for (int i = 0; i < dim; i += 4) {
    const int32_t biased = load_word(q + i) ^ int32_t(0x80808080);
    std::memcpy(block + i * 16 + slot * 4, &biased, 4);
  }
  cache.value_scales(block)[slot] = quantize_head(value, dim, q);
  uint8_t* v = cache.values(block) + (slot / 4) * 64 + slot % 4;
  for (int i = 0; i < dim; i++) v[(i / 16) * 256 + (i % 16) * 4] = uint8_t(q[i]);
}

// Rows of one tile: `tokens` consecutive query tokens of one sequence, times the `group` heads that share a K/V head.
// Row r is head r % group of token r / group, whose position is first_position + r / group.
struct Tile {
  const int32_t* block_table;
  int first_position, tokens, group, window, kv_head;

  int rows() const { return tokens * group; }
  int position(int row) const { return first_position + row / group; }
  int oldest(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// What one thread needs for one tile.
struct AttentionScratch {
  alignas(64) int32_t query[kTileRows * kMaxHeadDim / 4];    // [row / 8][dim / 4][row % 8], 4 int8 each
  alignas(64) float score[kTileRows][kSpan];
  alignas(64) uint8_t weight[kTileRows][kSpan];
  alignas(64) float sum[kTileRows * kMaxHeadDim];            // [dim / 16][row][16]
  int32_t query_offset[kTileRows];                           // -128 * (sum of the row's query)
  float query_scale[kTileRows], top[kTileRows], total[kTileRows], decay[kTileRows], weight_scale[kTileRows];

  // Take row r's query, int8 [head_dim]; `scale` includes the attention scale and log2(e).
  void set_query(int row, const int8_t* q, float scale, int head_dim) {
    int32_t* to = query + (row / 8) * head_dim / 4 * 8 + row % 8;
    int total_q = 0;
    for (int i = 0; i < head_dim; i++) total_q += q[i];
    for (int j = 0; j < head_dim / 4; j++) to[j * 8] = load_word(q + 4 * j);
    query_offset[row] = -128 * total_q;
    query_scale[row] = scale;
  }
};

template <int R>
TF_INLINE void score_rows(AttentionScratch& s, const uint8_t* keys, const float* scales, int dim, int row, int column) {
  vi acc[R];
  for (int r = 0; r < R; r++) acc[r] = splat_i(s.query_offset[row + r]);
  const int32_t* q = s.query + row / 8 * (dim / 4) * 8 + row % 8;
  for (int j = 0; j < dim / 4; j++) {
    vi k = load_i(keys + 64 * j);
    for (int r = 0; r < R; r++) acc[r] = dot4(acc[r], k, splat_i(q[j * 8 + r]));
  }
  vf key_scale = load(scales);
  for (int r = 0; r < R; r++)
    store(&s.score[row + r][column], to_float(acc[r]) * key_scale * s.query_scale[row + r]);
}

// One softmax update of `row` with the scores of the span that begins at token `start`.
TF_INLINE void weigh_row(AttentionScratch& s, int row, int start, int oldest, int position, const vf (&value_scale)[4]) {
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const bool whole = oldest <= start && position >= start + kSpan - 1;
  vf score[4], weight[4];
  vi seen[4];
  for (int i = 0; i < 4; i++) {
    score[i] = load(&s.score[row][16 * i]);
    if (!whole) {
      vi token = lane + (start + 16 * i);
      seen[i] = (token <= position) & (token >= oldest);
      score[i] = select(seen[i], score[i], splat(kMasked));
    }
  }
  float top = std::max(s.top[row], max_lanes(max(max(score[0], score[1]), max(score[2], score[3]))));
  for (int i = 0; i < 4; i++) {
    weight[i] = exp2_weight(score[i] - top);
    if (!whole) weight[i] = select(seen[i], weight[i], vf{});  // a masked score is not below the range of exp2
  }
  float decay = s.top[row] == top ? 1.0f : exp2_weight(splat(s.top[row] - top))[0];
  s.total[row] = s.total[row] * decay + sum_lanes((weight[0] + weight[1]) + (weight[2] + weight[3]));
  s.top[row] = top;
  s.decay[row] = decay;
  for (int i = 0; i < 4; i++) {
    weight[i] = weight[i] * value_scale[i];
    if (!whole) weight[i] = select(seen[i], weight[i], vf{});  // SAFETY: a slot not written yet may hold any scale
  }
  float most = max_lanes(max(max(weight[0], weight[1]), max(weight[2], weight[3])));
  float inverse = most > 0x1p-100f ? 255.0f / most : 0.0f;
  s.weight_scale[row] = most / 255.0f;
  for (int i = 0; i < 4; i++) store_bytes(&s.weight[row][16 * i], to_int(weight[i] * inverse));
}

template <int R>
TF_INLINE void sum_rows(AttentionScratch& s, const uint8_t* const (&values)[4], int blocks, int dim, int rows, int row) {
  for (int d = 0; d < dim / 16; d++) {
    vi acc[R];
    for (int r = 0; r < R; r++) acc[r] = vi{};
    for (int b = 0; b < blocks; b++)
      for (int j = 0; j < 4; j++) {
        vi v = load_i(values[b] + 256 * d + 64 * j);
        for (int r = 0; r < R; r++) acc[r] = dot4(acc[r], splat_i(load_word(&s.weight[row + r][16 * b + 4 * j])), v);
      }
    float* sum = s.sum + (size_t(d) * rows + row) * 16;
    for (int r = 0; r < R; r++) {
      vf kept = load(sum + 16 * r) * s.decay[row + r];
      store(sum + 16 * r, fma(to_float(acc[r]), splat(s.weight_scale[row + r]), kept));
    }
  }
}

// f.template operator()<R>(row) over groups of at most 8 rows that never straddle a multiple of 8.
template <typename F>
TF_INLINE void in_groups(int rows, F&& f) {
  int row = 0;
  for (; row + 8 <= rows; row += 8) f.template operator()<8>(row);
  switch (rows - row) {
    case 1: f.template operator()<1>(row); break;
    case 2: f.template operator()<2>(row); break;
    case 3: f.template operator()<3>(row); break;
    case 4: f.template operator()<4>(row); break;
    case 5: f.template operator()<5>(row); break;
    case 6: f.template operator()<6>(row); break;
    case 7: f.template operator()<7>(row); break;
    default: break;
  }
}

// Attend with every row of the tile, whose queries `s` has. Afterwards row r's output is
// s.sum[(d * rows + r) * 16 ..] / s.total[r] for d < head_dim / 16.
inline void attend(const Cache& cache, const Tile& tile, AttentionScratch& s) {
  const int rows = tile.rows(), dim = cache.head_dim, last = tile.position(rows - 1);
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
    for (int r = 0; r < rows; r++) {
      int position = tile.position(r);
      weigh_row(s, r, start, tile.oldest(position), position, value_scale);
    }
    in_groups(rows, [&]<int R>(int row) { sum_rows<R>(s, values, blocks, dim, rows, row); });
  }
}

}  // namespace tf
