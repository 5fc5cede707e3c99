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
constexpr int kGroup = TOKENFERRY_AVX2 ? 4 : 12;  // rows that share one load of keys and values
static_assert(kTileRows % kGroup == 0 && kTileRows % 16 == 0);

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
  alignas(64) int32_t query[kTileRows * kMaxHeadDim / 4 * kPieces];  // [row / group][dim / 4][piece][row % group]
  alignas(64) float score[kTileRows][kSpan];
  alignas(64) uint8_t weight[kTileRows][kPieces][kSpan];
  alignas(64) float sum[kTileRows * kMaxHeadDim];            // [dim / 16][row][16]
  alignas(64) float lanes[2][16][16];                        // of 16 rows, not reduced yet
  int32_t position[kTileRows];
  int32_t query_offset[kTileRows];                           // -128 * (sum of the row's query)
  alignas(64) float query_scale[kTileRows], weight_scale[kTileRows];
  alignas(64) float top[kTileRows], total[kTileRows], decay[kTileRows];

  // Take row r's query, int8 [head_dim]; `scale` includes the attention scale and log2(e).
  void set_query(int row, const int8_t* q, float scale, int head_dim) {
    int32_t* to = query + row / kGroup * (head_dim / 4 * kPieces * kGroup) + row % kGroup;
    int total_q = 0;
    for (int i = 0; i < head_dim; i += 16) {
      int32_t words[kPieces][4];
      total_q += split_signed(q + i, words);
      for (int j = 0; j < 4; j++)
        for (int piece = 0; piece < kPieces; piece++, to += kGroup) *to = words[piece][j];
    }
    query_offset[row] = -128 * total_q;
    query_scale[row] = scale;
  }
};

// Attend with every row of the tile, whose queries `s` has. Afterwards row r's output is
// s.sum[(d * rows + r) * 16 ..] / s.total[r] for d < head_dim / 16.
void attend(const Cache& cache, const Tile& tile, AttentionScratch& scratch);

}  // namespace tf
