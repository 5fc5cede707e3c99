// Quantised linear layers: packed weights x int8 activations.
//
// Weights lie in panels of 16 output channels; a panel is a run of tiles of 32 inputs. A tile holds the quants of its
// 16 x 32 weights so that one 64-byte vector has 4 consecutive inputs of each of the 16 channels, then the scales:
//   q4: 4 vectors (inputs 4j.. in the low nibbles, 16 + 4j.. in the high ones), 16 half d, 16 half m; w = d * q + m
//   q8: 8 vectors of w + 128, 16 half d;                                                              w = d * q
// Activations are int8 with one float scale per row and block of 32 (see Rows). A block's product is an exact integer;
// blocks are added in float, in order, with the same operations whatever the number of rows: rows are independent bits.
#pragma once

#include "simd.hpp"

namespace tf {

constexpr int kPanel = 16;  // output channels
constexpr int kBlock = 32;  // inputs that share a scale
// Rows that share one pass over the weights.
// PERF: with AVX2 4 % faster than 128, whose activations do not fit the first-level cache.
constexpr int kRowBlock = 48;

enum Kind : int32_t { kQ4 = 4, kQ8 = 8 };

constexpr size_t tile_bytes(int kind) { return kind == kQ4 ? 4 * 64 + 2 * 32 : 8 * 64 + 32; }

struct Linear {
  const uint8_t* data;  // nullptr: absent
  const float* bias;    // [n rounded up to 16] or nullptr
  int32_t kind, n, k;   // n output channels, k inputs (a multiple of 32)

  int panels() const { return (n + kPanel - 1) / kPanel; }
  int blocks() const { return k / kBlock; }
  const uint8_t* panel(int p) const { return data + size_t(p) * blocks() * tile_bytes(kind); }
};

// Quantised activations: value[row][i] ~ q[row][i] * scale[row][i / 32].
struct Rows {
  int8_t* q;        // [rows, k]
  float* scale;     // [rows, k / 32]
  float* sum;       // [rows, k / 32]: scale * (sum of q in the block)
  int32_t* offset;  // [rows, k / 32]: -128 * (sum of q in the block)
  int k;

  Rows from(int row) const {
    size_t b = size_t(row) * (k / kBlock);
    return Rows{q + size_t(row) * k, scale + b, sum + b, offset + b, k};
  }
};

// One block of 32 values to row.q[block]; all zero stays all zero.
TF_INLINE void quantize_block(vf lo, vf hi, const Rows& row, int block) {
  float amax = max_lanes(max(abs(lo), abs(hi)));
  float inverse = amax > 0x1p-100f ? 127.0f / amax : 0.0f;
  vi a = to_int(lo * inverse), b = to_int(hi * inverse);
  store_bytes(row.q + block * kBlock, a);
  store_bytes(row.q + block * kBlock + 16, b);
  int32_t sum = sum_lanes_i(a + b);
  float scale = amax / 127.0f;
  row.scale[block] = scale;
  row.sum[block] = scale * float(sum);
  row.offset[block] = -128 * sum;
}

// The 16 channels of `panel` for rows first .. first + count, to out[i * stride ..].
void panel_product(const Linear& w, int panel, const Rows& x, int first, int count, float* out, size_t stride);

// Output channel `channel` of w, times `factor`, to out[k]: a row of an embedding table.
void dequantize_channel(const Linear& w, int channel, float factor, float* out);

}  // namespace tf
