// Sixteen-lane vectors: the only place that knows an instruction set.
//
// Owns the operations that the kernels are written in, once with AVX-512 VNNI and once in plain C++ (GCC and Clang
// vector types, compiled for whatever the machine has). Both forms do the same IEEE operations in the same order, so
// every kernel gives the same bits whichever is chosen. Refuses to know what is being computed.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && \
    !defined(TOKENFERRY_PORTABLE)
#define TOKENFERRY_AVX512 1
#include <immintrin.h>
#else
#define TOKENFERRY_AVX512 0
#endif

#define TF_INLINE inline __attribute__((always_inline))

namespace tf {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

TF_INLINE vf splat(float x) { return vf{} + x; }
TF_INLINE vi splat_i(int32_t x) { return vi{} + x; }
TF_INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, 64); return v; }
TF_INLINE vi load_i(const void* p) { vi v; std::memcpy(&v, p, 64); return v; }
TF_INLINE void store(float* p, vf v) { std::memcpy(p, &v, 64); }
TF_INLINE void store_i(void* p, vi v) { std::memcpy(p, &v, 64); }
TF_INLINE int32_t load_word(const void* p) { int32_t w; std::memcpy(&w, p, 4); return w; }
TF_INLINE vf as_float(vi v) { vf f; std::memcpy(&f, &v, 64); return f; }
TF_INLINE vi as_int(vf v) { vi i; std::memcpy(&i, &v, 64); return i; }
// Lanes of `yes` where `mask` is all ones, of `no` where it is zero.
TF_INLINE vf select(vi mask, vf yes, vf no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }

#if TOKENFERRY_AVX512

TF_INLINE vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
// acc[i] + sum over j < 4 of u8(u[i], j) * s8(s[i], j), exact.
TF_INLINE vi dot4(vi acc, vi u, vi s) { return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s); }
TF_INLINE vf to_float(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
// Nearest integer, ties to even.
TF_INLINE vi to_int(vf v) { return (vi)_mm512_cvtps_epi32((__m512)v); }
TF_INLINE vf max(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
TF_INLINE vf min(vf a, vf b) { return (vf)_mm512_min_ps((__m512)a, (__m512)b); }
TF_INLINE vf load_half(const uint16_t* p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
// The low byte of each lane.
TF_INLINE void store_bytes(void* p, vi v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }

#else

// NOTE: lanes are written through arrays. GCC 12 at -O3 loses values when a vector is filled element by element.

TF_INLINE vf fma(vf a, vf b, vf c) {
  float x[16], y[16], z[16];
  store(x, a);
  store(y, b);
  store(z, c);
  for (int i = 0; i < 16; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return load(z);
}
TF_INLINE vi dot4(vi acc, vi u, vi s) {
  uint8_t ub[64];
  int8_t sb[64];
  int32_t a[16];
  std::memcpy(ub, &u, 64);
  std::memcpy(sb, &s, 64);
  std::memcpy(a, &acc, 64);
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) a[i] += int32_t(ub[4 * i + j]) * int32_t(sb[4 * i + j]);
  return load_i(a);
}
TF_INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
TF_INLINE vi to_int(vf v) {
  float x[16];
  int32_t r[16];
  store(x, v);
  for (int i = 0; i < 16; i++) r[i] = int32_t(__builtin_rintf(x[i]));
  return load_i(r);
}
TF_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }
TF_INLINE vf min(vf a, vf b) { return select(a < b, a, b); }
TF_INLINE vf load_half(const uint16_t* p) {
  int32_t bits[16];
  for (int i = 0; i < 16; i++) bits[i] = p[i];
  const vi h = load_i(bits);
  // Exact for every finite half: the exponent is re-biased by a multiplication, which also normalises subnormals.
  vf magnitude = as_float((h & 0x7fff) << 13) * 0x1p112f;
  return as_float(as_int(magnitude) | ((h & 0x8000) << 16));
}
TF_INLINE void store_bytes(void* p, vi v) {
  uint8_t b[16];
  for (int i = 0; i < 16; i++) b[i] = uint8_t(v[i]);
  std::memcpy(p, b, 16);
}

#endif

TF_INLINE vf abs(vf v) { return as_float(as_int(v) & 0x7fffffff); }

// Horizontal reductions, always the same tree: lanes i and i + 8, then i + 4, i + 2, i + 1.
TF_INLINE float sum_lanes(vf v) {
  typedef float f8 __attribute__((vector_size(32)));
  typedef float f4 __attribute__((vector_size(16)));
  f8 a, b;
  std::memcpy(&a, &v, 32);
  std::memcpy(&b, (const char*)&v + 32, 32);
  a = a + b;
  f4 c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, (const char*)&a + 16, 16);
  c = c + d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}
TF_INLINE float max_lanes(vf v) {
#if TOKENFERRY_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
TF_INLINE int32_t sum_lanes_i(vi v) {
#if TOKENFERRY_AVX512
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
#endif
}

// 2^x from the nearest integer n and 2^(x - n) by a polynomial that is exactly 1 at 0; x in [-126, 127].
template <int N>
TF_INLINE vf exp2_by(vf x, const float (&coefficients)[N]) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf t = x + magic, r = x - (t - magic);
  vf p = splat(coefficients[0]);
  for (int i = 1; i < N; i++) p = fma(p, r, splat(coefficients[i]));
  return as_float(as_int(p) + (as_int(t) << 23));
}

// 2^x, x clamped to [-126, 127]; relative error below 1e-7.
TF_INLINE vf exp2(vf x) {
  constexpr float c[] = {0x1.444004p-13f, 0x1.5f0896p-10f, 0x1.3b2a1cp-7f, 0x1.c6af6cp-5f,
                         0x1.ebfbe0p-3f,  0x1.62e430p-1f,  1.0f};
  return exp2_by(min(max(x, splat(-126.0f)), splat(127.0f)), c);
}

// 2^x for x <= 0, relative error below 8e-6: for weights that are rounded to 8 bits anyway.
TF_INLINE vf exp2_weight(vf x) {
  constexpr float c[] = {0x1.3cbf6cp-7f, 0x1.c96d7ep-5f, 0x1.ebfa4ap-3f, 0x1.62e2d2p-1f, 1.0f};
  return exp2_by(max(x, splat(-126.0f)), c);
}

}  // namespace tf
