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
TF_NOINLINE void panel_rows(const Linear& w, int panel, const Rows& x, float* out, size_t stride) {
  const float* bias = w.bias ? w.bias + panel * kPanel : nullptr;
  vf sums[R];
  if constexpr (R <= kMostRows4)
    if (w.kind == kQ4) panel_q4<R>(w.panel(panel), bias, x, sums);
  if constexpr (R <= kMostRows8)
    if (w.kind == kQ8) panel_q8<R>(w.panel(panel), bias, x, sums);
  for (int r = 0; r < R; r++) store(out + r * stride, sums[r]);
}

// f.operator()<n>(first) over groups of at most Most rows; the last two share evenly what is left.
template <int Most, typename F>
TF_INLINE void in_groups(int first, int count, F&& f) {
  while (count > 0) {
    const int step = count >= 2 * Most ? Most : count > Most ? (count + 1) / 2 : count;
    with_constant<Most>(step, [&]<int R>() { f.template operator()<R>(first); });
    first += step;
    count -= step;
  }
}

// A tile of weights spread out, one operand of ByteSum::add after the other.
template <int Kind>
struct Spread {
  static constexpr int kSums = Kind == kQ4 ? 1 : kParts;
  alignas(64) uint8_t quant[kSums][8][64];
  float d[kPanel], m[kPanel];

  void take(const uint8_t* tile) {
    for (int j = 0; j < 8; j++)
      for (int part = 0; part < kSums; part++) {
        const vi w = Kind == kQ4 ? (load_i(tile + 64 * (j % 4)) >> (j < 4 ? 0 : 4)) & 0x0f0f0f0f
                                 : unsigned_part(load_i(tile + 64 * j), part);
        store_i(quant[part][j], w);
      }
    const uint16_t* scales = (const uint16_t*)(tile + tile_bytes(Kind)) - (Kind == kQ4 ? 2 : 1) * kPanel;
    store(d, load_half(scales));
    if (Kind == kQ4) store(m, load_half(scales + kPanel));
  }
};

// out[r] += tiles . row r from input `block` x 32 on, for R rows, as panel_q4 and panel_q8 do it.
template <int Kind, int R>
TF_NOINLINE void spread_rows(const Spread<Kind>* tiles, int num_tiles, const Rows& x, int block, float* out,
                             size_t stride) {
  const int blocks = x.k / kBlock;
  vf total_of[R];
  for (int r = 0; r < R; r++) total_of[r] = load(out + r * stride);
  for (int b = block; b < block + num_tiles; b++, tiles++) {
    ByteSum sums[R][Spread<Kind>::kSums];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      for (int part = 0; part < Spread<Kind>::kSums; part++) {
        const vi w = load_i(tiles->quant[part][j]);
        for (int r = 0; r < R; r++) {
          sums[r][part].add(w, splat_i(load_word(x.q + r * x.k + b * kBlock + 4 * j)));
          sums[r][part].settle();
        }
      }
    const vf d = load(tiles->d), m = load(tiles->m);
    for (int r = 0; r < R; r++) {
      const vf scale = d * x.scale[r * blocks + b];
      if constexpr (Kind == kQ4) {
        total_of[r] = fma(to_float(sums[r][0].total()), scale, total_of[r]);
        total_of[r] = fma(m, splat(x.sum[r * blocks + b]), total_of[r]);
      } else {
        total_of[r] = fma(to_float(total(sums[r]) + x.offset[r * blocks + b]), scale, total_of[r]);
      }
    }
  }
  for (int r = 0; r < R; r++) store(out + r * stride, total_of[r]);
}

// PERF: with AVX2 splitting the weights again for every four rows costs 10 % of a product of 128 rows, 3 % of 32.
constexpr int kManyRows = 24;
template <int Kind, int Most>
void spread_product(const Linear& w, int panel, const Rows& x, int first, int count, float* out, size_t stride) {
  constexpr int most_tiles = 16;
  Spread<Kind> tiles[most_tiles];
  const vf start = w.bias ? load(w.bias + panel * kPanel) : vf{};
  for (int r = 0; r < count; r++) store(out + r * stride, start);
  for (int block = 0; block < w.blocks(); block += most_tiles) {
    const int num_tiles = std::min(most_tiles, w.blocks() - block);
    for (int i = 0; i < num_tiles; i++) {
      const uint8_t* tile = w.panel(panel) + (block + i) * tile_bytes(Kind);
      for (size_t line = 0; line < tile_bytes(Kind); line += 64) __builtin_prefetch(tile + 2 * kAhead + line);
      tiles[i].take(tile);
    }
    in_groups<Most>(0, count, [&]<int R>(int row) {
      spread_rows<Kind, R>(tiles, num_tiles, x.from(first + row), block, out + row * stride, stride);
    });
  }
}

}  // namespace

void panel_product(const Linear& w, int panel, const Rows& x, int first, int count, float* out, size_t stride) {
  if constexpr (kParts > 1)
    if (count >= kManyRows)
      return w.kind == kQ4 ? spread_product<kQ4, 6>(w, panel, x, first, count, out, stride)
                           : spread_product<kQ8, 3>(w, panel, x, first, count, out, stride);
  auto run = [&]<int R>(int row) { panel_rows<R>(w, panel, x.from(first + row), out + row * stride, stride); };
  if (w.kind == kQ4)
    in_groups<kMostRows4>(0, count, run);
  else
    in_groups<kMostRows8>(0, count, run);
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
