#include "linear.hpp"

#include <algorithm>

namespace tf {

namespace {

// PERF: bytes of weights fetched ahead of their use; 16 rows of SmolLM2 take 18.7 ms with it, 22.7 without.
constexpr int kAhead = 2048;

// Rows that share one unpacking of the weights: what the registers hold.
// PERF: with AVX-512 eight rows are 2 % slower than twelve.
constexpr int kMostRows4 = TOKENFERRY_AVX2 ? 4 : 12, kMostRows8 = TOKENFERRY_AVX2 ? 2 : 12;

// out[r] = bias + panel . row r, for R rows.
template <int R>
TF_INLINE void panel_q4(const uint8_t* tile, const float* bias, const Rows& x, vf (&out)[R]) {
  // PERF: few rows would wait for the product before; integer sums may have any order.
  constexpr bool two_sums = kParts == 1 && R <= 8;
  const int blocks = x.k / kBlock;
  for (int r = 0; r < R; r++) out[r] = bias ? load(bias) : vf{};
  for (int b = 0; b < blocks; b++, tile += tile_bytes(kQ4)) {
    for (int line = 0; line < 5; line++) __builtin_prefetch(tile + kAhead + 64 * line);
    ByteSum sums[R], more[R];
    for (int j = 0; j < 4; j++) {
      const vi packed = load_i(tile + 64 * j), lo = packed & 0x0f0f0f0f, hi = (packed >> 4) & 0x0f0f0f0f;
      const int8_t* q = x.q + b * kBlock + 4 * j;
      for (int r = 0; r < R; r++) sums[r].add(lo, splat_i(load_word(q + r * x.k)));
      for (int r = 0; r < R; r++) (two_sums ? more : sums)[r].add(hi, splat_i(load_word(q + r * x.k + 16)));
      for (int r = 0; r < R; r++) sums[r].settle();
    }
    const vf d = load_half((const uint16_t*)(tile + 256)), m = load_half((const uint16_t*)(tile + 288));
    for (int r = 0; r < R; r++) {
      const vi sum = two_sums ? sums[r].total() + more[r].total() : sums[r].total();
      out[r] = fma(to_float(sum), d * x.scale[r * blocks + b], out[r]);
      out[r] = fma(m, splat(x.sum[r * blocks + b]), out[r]);
    }
  }
}

template <int R>
TF_INLINE void panel_q8(const uint8_t* tile, const float* bias, const Rows& x, vf (&out)[R]) {
  const int blocks = x.k / kBlock;
  for (int r = 0; r < R; r++) out[r] = bias ? load(bias) : vf{};
  for (int b = 0; b < blocks; b++, tile += tile_bytes(kQ8)) {
    for (int line = 0; line < 9; line++) __builtin_prefetch(tile + kAhead + 64 * line);
    ByteSum sums[R][kParts];
    for (int j = 0; j < 8; j++) {
      const vi w = load_i(tile + 64 * j);
      for (int part = 0; part < kParts; part++)
        for (int r = 0; r < R; r++) {
          sums[r][part].add(unsigned_part(w, part), splat_i(load_word(x.q + r * x.k + b * kBlock + 4 * j)));
          sums[r][part].settle();
        }
    }
    const vf d = load_half((const uint16_t*)(tile + 512));
    for (int r = 0; r < R; r++)
      out[r] = fma(to_float(total(sums[r]) + x.offset[r * blocks + b]), d * x.scale[r * blocks + b], out[r]);
  }
}

template <int R>
TF_INLINE void panel_rows(const Linear& w, int panel, const Rows& x, float* out, size_t stride) {
  const float* bias = w.bias ? w.bias + panel * kPanel : nullptr;
  vf sums[R];
  if constexpr (R <= kMostRows4)
    if (w.kind == kQ4) panel_q4<R>(w.panel(panel), bias, x, sums);
  if constexpr (R <= kMostRows8)
    if (w.kind == kQ8) panel_q8<R>(w.panel(panel), bias, x, sums);
  for (int r = 0; r < R; r++) store(out + r * stride, sums[r]);
}

}  // namespace

void panel_product(const Linear& w, int panel, const Rows& x, int first, int count, float* out, size_t stride) {
  const int most = w.kind == kQ4 ? kMostRows4 : kMostRows8;
  while (count > 0) {
    // The last two groups share evenly what is left.
    const int step = count >= 2 * most ? most : count > most ? (count + 1) / 2 : count;
    with_constant<std::max(kMostRows4, kMostRows8)>(
        step, [&]<int R>() { panel_rows<R>(w, panel, x.from(first), out, stride); });
    first += step;
    count -= step;
    out += step * stride;
  }
}

void dequantize_channel(const Linear& w, int channel, float factor, float* out) {
  const uint8_t* tile = w.panel(channel / kPanel);
  const int lane = channel % kPanel;
  float d[kPanel], m[kPanel] = {};
  for (int b = 0; b < w.blocks(); b++, tile += tile_bytes(w.kind)) {
    const uint16_t* scales = (const uint16_t*)(tile + (w.kind == kQ4 ? 256 : 512));
    store(d, load_half(scales));
    if (w.kind == kQ4) store(m, load_half(scales + kPanel));
    for (int i = 0; i < kBlock; i++) {
      int vector = i / 4, byte = lane * 4 + i % 4;
      int q = w.kind == kQ8  ? tile[64 * vector + byte] - 128
              : vector < 4   ? tile[64 * vector + byte] & 15
                             : tile[64 * (vector - 4) + byte] >> 4;
      out[b * kBlock + i] = (d[lane] * float(q) + m[lane]) * factor;
    }
  }
}

}  // namespace tf
