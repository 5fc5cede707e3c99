#include "linear.hpp"

namespace tf {

namespace {

// PERF: bytes of weights fetched ahead of their use; 16 rows of SmolLM2 take 18.7 ms with it, 22.7 without.
constexpr int kAhead = 2048;

// Rows that share one unpacking of the weights: what the registers hold.
// PERF: with AVX-512 eight rows are 2 % slower than twelve; with AVX2 four rows of q4 8 % slower than six; with
// neither, four are as fast as twelve and compile in 7 s instead of 60.
constexpr int kMostRows4 = TOKENFERRY_AVX512 ? 12 : TOKENFERRY_AVX2 ? 6 : 4, kMostRows8 = TOKENFERRY_AVX512 ? 12 : 4;

// out[r] = bias + panel . row r, for R rows.
template <int R>
TF_INLINE void panel_q4(const uint8_t* tile, const float* bias, const Rows& x, vf (&out)[R]) {
  // PERF: few rows would wait for the product before; integer sums may have any order.
  constexpr bool two_sums = kParts == 1 && R <= 8;
  const int k = x.k, blocks = k / kBlock;
  each<R>([&]<int r>() TF_LAMBDA { out[r] = bias ? load(bias) : vf{}; });
  const int8_t* row = x.q;
  const float *scale = x.scale, *row_sum = x.sum;
  for (int b = 0; b < blocks; b++, tile += tile_bytes(kQ4), row += kBlock, scale++, row_sum++) {
    for (int line = 0; line < 5; line++) __builtin_prefetch(tile + kAhead + 64 * line);
    ByteSum sums[R], more[R];
    each<4>([&]<int j>() TF_LAMBDA {
      const vi packed = load_i(tile + 64 * j), lo = packed & 0x0f0f0f0f, hi = (packed >> 4) & 0x0f0f0f0f;
      const int8_t* q = row + 4 * j;
      each<R>([&]<int r>() TF_LAMBDA {
        sums[r].add(lo, splat_i(load_word(q + r * k)));
        sums[r].settle();
      });
      each<R>([&]<int r>() TF_LAMBDA {
        (two_sums ? more : sums)[r].add(hi, splat_i(load_word(q + r * k + 16)));
        sums[r].settle();
      });
    });
    const vf d = load_half((const uint16_t*)(tile + 256)), m = load_half((const uint16_t*)(tile + 288));
    each<R>([&]<int r>() TF_LAMBDA {
      const vi sum = two_sums ? sums[r].total() + more[r].total() : sums[r].total();
      out[r] = fma(to_float(sum), d * scale[r * blocks], out[r]);
      out[r] = fma(m, splat(row_sum[r * blocks]), out[r]);
    });
  }
}

template <int R>
TF_INLINE void panel_q8(const uint8_t* tile, const float* bias, const Rows& x, vf (&out)[R]) {
  const int k = x.k, blocks = k / kBlock;
  each<R>([&]<int r>() TF_LAMBDA { out[r] = bias ? load(bias) : vf{}; });
  const int8_t* row = x.q;
  const float* scale = x.scale;
  const int32_t* offset = x.offset;
  for (int b = 0; b < blocks; b++, tile += tile_bytes(kQ8), row += kBlock, scale++, offset++) {
    for (int line = 0; line < 9; line++) __builtin_prefetch(tile + kAhead + 64 * line);
    ByteSum sums[R][kParts];
    each<8>([&]<int j>() TF_LAMBDA {
      const vi w = load_i(tile + 64 * j);
      each<kParts>([&]<int part>() TF_LAMBDA {
        each<R>([&]<int r>() TF_LAMBDA {
          sums[r][part].add(unsigned_part(w, part), splat_i(load_word(row + r * k + 4 * j)));
          sums[r][part].settle();
        });
      });
    });
    const vf d = load_half((const uint16_t*)(tile + 512));
    each<R>([&]<int r>() TF_LAMBDA {
      out[r] = fma(to_float(total(sums[r]) + offset[r * blocks]), d * scale[r * blocks], out[r]);
    });
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
  each<R>([&]<int r>() TF_LAMBDA { store(out + r * stride, sums[r]); });
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

}  // namespace

void panel_product(const Linear& w, int panel, const Rows& x, int first, int count, float* out, size_t stride) {
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
