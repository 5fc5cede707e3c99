// Sixteen-lane vectors: the only place that knows an instruction set.
//
// Owns the operations that the kernels are written in: with AVX-512 VNNI, with AVX2, and in plain C++ (GCC and Clang
// vector types, compiled for whatever the machine has). All forms do the same IEEE operations in the same order, so
// every kernel gives the same bits whichever is chosen. Refuses to know what is being computed.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && \
    !defined(TOKENFERRY_PORTABLE)
#define TOKENFERRY_AVX512 1
#else
#define TOKENFERRY_AVX512 0
#endif
#if !TOKENFERRY_AVX512 && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(TOKENFERRY_PORTABLE)
#define TOKENFERRY_AVX2 1
#else
#define TOKENFERRY_AVX2 0
#endif
#if TOKENFERRY_AVX512 || TOKENFERRY_AVX2
#include <immintrin.h>
#endif

#define TF_INLINE inline __attribute__((always_inline))
#define TF_LAMBDA __attribute__((always_inline))
#define TF_NOINLINE __attribute__((noinline))  // PERF: a loop nest of its own gets all registers

namespace tf {

#if TOKENFERRY_AVX2

// Two halves of eight lanes. GCC keeps a 64-byte vector type in memory where registers have 32 bytes, a pair it does not.
template <typename H>
struct Pair {
  H a, b;
  using Lane = std::remove_reference_t<decltype(H{}[0])>;
  TF_INLINE Lane operator[](int i) const { return i < 8 ? a[i] : b[i - 8]; }
};
typedef float half_f __attribute__((vector_size(32)));
typedef int32_t half_i __attribute__((vector_size(32)));
typedef int16_t half_s __attribute__((vector_size(32)));
using vf = Pair<half_f>;
using vi = Pair<half_i>;

template <typename H>
TF_INLINE Pair<H> paired(H a, H b) { return Pair<H>{a, b}; }
#define TF_PAIRWISE(op)                                                                                            \
  template <typename H>                                                                                            \
  TF_INLINE auto operator op(Pair<H> x, Pair<H> y) { return paired(x.a op y.a, x.b op y.b); }                      \
  template <typename H>                                                                                            \
  TF_INLINE auto operator op(Pair<H> x, typename Pair<H>::Lane y) { return paired(x.a op y, x.b op y); }           \
  template <typename H>                                                                                            \
  TF_INLINE auto operator op(typename Pair<H>::Lane x, Pair<H> y) { return paired(x op y.a, x op y.b); }
TF_PAIRWISE(+) TF_PAIRWISE(-) TF_PAIRWISE(*) TF_PAIRWISE(/) TF_PAIRWISE(&) TF_PAIRWISE(|)
TF_PAIRWISE(<<) TF_PAIRWISE(>>) TF_PAIRWISE(<) TF_PAIRWISE(<=) TF_PAIRWISE(>) TF_PAIRWISE(>=) TF_PAIRWISE(==) TF_PAIRWISE(!=)
#undef TF_PAIRWISE
template <typename H>
TF_INLINE Pair<H> operator-(Pair<H> x) { return {-x.a, -x.b}; }
TF_INLINE vi operator~(vi x) { return {~x.a, ~x.b}; }

// NOTE: half by half. A copy of 64 bytes would go through the stack in other pieces than it is read back in.
template <typename H>
TF_INLINE H half_at(const void* p) { H h; std::memcpy(&h, p, 32); return h; }
TF_INLINE vf load(const float* p) { return {half_at<half_f>(p), half_at<half_f>(p + 8)}; }
TF_INLINE vi load_i(const void* p) { return {half_at<half_i>(p), half_at<half_i>((const char*)p + 32)}; }
TF_INLINE void store(float* p, vf v) { std::memcpy(p, &v.a, 32); std::memcpy(p + 8, &v.b, 32); }
TF_INLINE void store_i(void* p, vi v) { std::memcpy(p, &v.a, 32); std::memcpy((char*)p + 32, &v.b, 32); }
TF_INLINE vf as_float(vi v) { return {(half_f)v.a, (half_f)v.b}; }
TF_INLINE vi as_int(vf v) { return {(half_i)v.a, (half_i)v.b}; }

#else

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));

TF_INLINE vf load(const float* p) { vf v; std::memcpy(&v, p, 64); return v; }
TF_INLINE vi load_i(const void* p) { vi v; std::memcpy(&v, p, 64); return v; }
TF_INLINE void store(float* p, vf v) { std::memcpy(p, &v, 64); }
TF_INLINE void store_i(void* p, vi v) { std::memcpy(p, &v, 64); }
TF_INLINE vf as_float(vi v) { vf f; std::memcpy(&f, &v, 64); return f; }
TF_INLINE vi as_int(vf v) { vi i; std::memcpy(&i, &v, 64); return i; }

#endif

TF_INLINE vf splat(float x) {
#if TOKENFERRY_AVX512
  return (vf)_mm512_set1_ps(x);
#elif TOKENFERRY_AVX2
  return {(half_f)_mm256_set1_ps(x), (half_f)_mm256_set1_ps(x)};
#else
  return vf{} + x;
#endif
}
TF_INLINE vi splat_i(int32_t x) { return vi{} + x; }
TF_INLINE int32_t load_word(const void* p) { int32_t w; std::memcpy(&w, p, 4); return w; }
#if TOKENFERRY_AVX512

// Lanes of `yes` where `mask` is all ones, of `no` where it is zero.
TF_INLINE vf select(vi mask, vf yes, vf no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }
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


#elif TOKENFERRY_AVX2

TF_INLINE half_f select_half(half_i mask, half_f yes, half_f no) {
  return (half_f)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
}
TF_INLINE vf select(vi mask, vf yes, vf no) {
  return {select_half(mask.a, yes.a, no.a), select_half(mask.b, yes.b, no.b)};
}
TF_INLINE vf fma(vf x, vf y, vf z) {
  return {(half_f)_mm256_fmadd_ps((__m256)x.a, (__m256)y.a, (__m256)z.a),
          (half_f)_mm256_fmadd_ps((__m256)x.b, (__m256)y.b, (__m256)z.b)};
}
TF_INLINE vf to_float(vi v) {
  return {(half_f)_mm256_cvtepi32_ps((__m256i)v.a), (half_f)_mm256_cvtepi32_ps((__m256i)v.b)};
}
TF_INLINE vi to_int(vf v) {
  return {(half_i)_mm256_cvtps_epi32((__m256)v.a), (half_i)_mm256_cvtps_epi32((__m256)v.b)};
}
TF_INLINE vf max(vf x, vf y) {
  return {(half_f)_mm256_max_ps((__m256)x.a, (__m256)y.a), (half_f)_mm256_max_ps((__m256)x.b, (__m256)y.b)};
}
TF_INLINE vf min(vf x, vf y) {
  return {(half_f)_mm256_min_ps((__m256)x.a, (__m256)y.a), (half_f)_mm256_min_ps((__m256)x.b, (__m256)y.b)};
}
TF_INLINE vf load_half(const uint16_t* p) {
  return {(half_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          (half_f)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
TF_INLINE void store_bytes(void* p, vi v) {
  const vi low = v & 0xff;
  __m256i words = _mm256_packus_epi32((__m256i)low.a, (__m256i)low.b);  // a0-3 b0-3 a4-7 b4-7
  words = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#else

// NOTE: lanes are written through arrays. GCC 12 at -O3 loses values when a vector is filled element by element.

// Lanes of `yes` where `mask` is all ones, of `no` where it is zero.
TF_INLINE vf select(vi mask, vf yes, vf no) { return as_float((mask & as_int(yes)) | (~mask & as_int(no))); }
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

// Exact sums of products of bytes, u8 x s8, four to a lane. A ByteSum takes at most 8 calls of `add` (32 products a
// lane) before its total is read, and every operand byte must have been split into kParts parts: one whole byte where
// the machine multiplies bytes into 32 bits, two of four bits where it has 16 bits for the sum.
#if TOKENFERRY_AVX2

constexpr int kParts = 2;
struct ByteSum {
  Pair<half_s> sum = {};
  // SAFETY: |product| <= 2040 a byte: 15 x 127 of an unsigned part, 255 x 8 of a signed one; 16 of them fit in 16 bits.
  TF_INLINE void add(vi u, vi s) {
    sum.a += (half_s)_mm256_maddubs_epi16((__m256i)u.a, (__m256i)s.a);
    sum.b += (half_s)_mm256_maddubs_epi16((__m256i)u.b, (__m256i)s.b);
  }
  // PERF: to be called now and then. GCC would make all products first, put them in memory and add them later.
  TF_INLINE void settle() { asm("" : "+x"(sum.a), "+x"(sum.b)); }
  TF_INLINE vi total(int factor = 1) const {
    const __m256i f = _mm256_set1_epi16(short(factor));
    return {(half_i)_mm256_madd_epi16((__m256i)sum.a, f), (half_i)_mm256_madd_epi16((__m256i)sum.b, f)};
  }
};
// Unsigned bytes are part 0 + 16 part 1, both 0 .. 15.
template <typename T>
TF_INLINE T unsigned_part(T bytes, int part) { return (part ? bytes >> 4 : bytes) & 0x0f0f0f0f; }
TF_INLINE vi total(const ByteSum (&sums)[kParts]) { return sums[0].total() + sums[1].total(16); }

#else

constexpr int kParts = 1;
struct ByteSum {
  vi sum = {};
  TF_INLINE void add(vi u, vi s) { sum = dot4(sum, u, s); }
  TF_INLINE void settle() {}
  TF_INLINE vi total() const { return sum; }
};
template <typename T>
TF_INLINE T unsigned_part(T bytes, int) { return bytes; }
TF_INLINE vi total(const ByteSum (&sums)[kParts]) { return sums[0].total(); }

#endif

// The same for attention, for any number of products: bytes are multiplied piece by piece, and a piece is all bytes, or,
// where the machine multiplies words into 32 bits, every other byte as a word. What many rows share is taken apart when
// it is loaded, at one operation a piece; what belongs to a row lies there in pieces.
#if TOKENFERRY_AVX2

constexpr int kPieces = 2;
TF_INLINE vi unsigned_piece(vi bytes, int piece) {
  if (piece == 0) return bytes & 0x00ff00ff;
  return {(half_i)_mm256_srli_epi16((__m256i)bytes.a, 8), (half_i)_mm256_srli_epi16((__m256i)bytes.b, 8)};
}
// A sum of products with signed_piece is shifted left by this.
// SAFETY: 64 products of 255 x 127 x 256, which attention adds at most, fit in 32 bits.
constexpr int kSignedShift = 8;
TF_INLINE vi signed_piece(vi bytes, int piece) {
  if (piece == 1) return bytes & int32_t(0xff00ff00);
  return {(half_i)_mm256_slli_epi16((__m256i)bytes.a, 8), (half_i)_mm256_slli_epi16((__m256i)bytes.b, 8)};
}
// 16 signed bytes to their pieces, not shifted; returns what the bytes add up to.
TF_INLINE int32_t split_signed(const int8_t* bytes, int32_t (*pieces)[4]) {
  const __m128i all = _mm_loadu_si128((const __m128i*)bytes), odd = _mm_srai_epi16(all, 8);
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16(all, 8), 8);
  _mm_storeu_si128((__m128i*)pieces[0], even);
  _mm_storeu_si128((__m128i*)pieces[1], odd);
  __m128i sum = _mm_madd_epi16(_mm_add_epi16(even, odd), _mm_set1_epi16(1));
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}
// 64 values in 0 .. 255 to their pieces, 64 bytes each.
TF_INLINE void store_unsigned(uint8_t (*pieces)[64], const vi (&values)[4]) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int i = 0; i < 2; i++) {
    const vi x = values[2 * i], y = values[2 * i + 1];
    const __m256i lo = _mm256_packus_epi32((__m256i)x.a, (__m256i)x.b);
    const __m256i hi = _mm256_packus_epi32((__m256i)y.a, (__m256i)y.b);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(lo, hi), order);
    _mm256_store_si256((__m256i*)(pieces[0] + 32 * i), _mm256_and_si256(bytes, _mm256_set1_epi16(0xff)));
    _mm256_store_si256((__m256i*)(pieces[1] + 32 * i), _mm256_srli_epi16(bytes, 8));
  }
}
// sum[i] + the products of one piece in lane i.
// PERF: with a fence, or GCC would make all products first, put them in memory and add them later.
TF_INLINE vi add_products(vi sum, vi u, vi s) {
  half_i a = sum.a + (half_i)_mm256_madd_epi16((__m256i)u.a, (__m256i)s.a);
  half_i b = sum.b + (half_i)_mm256_madd_epi16((__m256i)u.b, (__m256i)s.b);
  asm("" : "+x"(a), "+x"(b));
  return {a, b};
}

#else

constexpr int kPieces = 1;
constexpr int kSignedShift = 0;
TF_INLINE vi unsigned_piece(vi bytes, int) { return bytes; }
TF_INLINE vi signed_piece(vi bytes, int) { return bytes; }
TF_INLINE int32_t split_signed(const int8_t* bytes, int32_t (*pieces)[4]) {
  std::memcpy(pieces[0], bytes, 16);
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) sum += bytes[i];
  return sum;
}
TF_INLINE void store_unsigned(uint8_t (*pieces)[64], const vi (&values)[4]) {
  for (int i = 0; i < 4; i++) store_bytes(pieces[0] + 16 * i, values[i]);
}
TF_INLINE vi add_products(vi sum, vi u, vi s) { return dot4(sum, u, s); }

#endif

TF_INLINE vf abs(vf v) { return as_float(as_int(v) & 0x7fffffff); }

// f.operator()<n>() for 1 <= n <= Most: the kernels are compiled for every number of rows that share a pass.
template <int Most, typename F>
TF_INLINE void with_constant(int n, F&& f) {
  if constexpr (Most > 1)
    if (n < Most) return with_constant<Most - 1>(n, f);
  f.template operator()<Most>();
}

// f.operator()<i>() for 0 <= i < N.
// PERF: what a plain loop indexes GCC keeps in memory as well, even if it unrolls the loop and has the registers.
template <int N, typename F>
TF_INLINE void each(F&& f) {
  [&]<int... I>(std::integer_sequence<int, I...>) TF_LAMBDA { (f.template operator()<I>(), ...); }
  (std::make_integer_sequence<int, N>{});
}

// Horizontal reductions, always the same tree: lanes i and i + 8, then i + 4, i + 2, i + 1.
TF_INLINE float sum_lanes(vf v) {
  typedef float f8 __attribute__((vector_size(32)));
  typedef float f4 __attribute__((vector_size(16)));
#if TOKENFERRY_AVX2
  const f8 a = v.a + v.b;
  f4 c = (f4)_mm256_castps256_ps128((__m256)a);
  const f4 d = (f4)_mm256_extractf128_ps((__m256)a, 1);
#else
  f8 a, b;
  std::memcpy(&a, &v, 32);
  std::memcpy(&b, (const char*)&v + 32, 32);
  a = a + b;
  f4 c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, (const char*)&a + 16, 16);
#endif
  c = c + d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}
TF_INLINE float max_lanes(vf v) {
#if TOKENFERRY_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#elif TOKENFERRY_AVX2
  const __m256 a = _mm256_max_ps((__m256)v.a, (__m256)v.b);
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
#else
  float m = v[0];
  for (int i = 1; i < 16; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}
TF_INLINE int32_t sum_lanes_i(vi v) {
#if TOKENFERRY_AVX512
  return _mm512_reduce_add_epi32((__m512i)v);
#elif TOKENFERRY_AVX2
  typedef int32_t i4 __attribute__((vector_size(16)));
  const half_i a = v.a + v.b;
  const i4 b = (i4)_mm256_castsi256_si128((__m256i)a) + (i4)_mm256_extracti128_si256((__m256i)a, 1);
  return (b[0] + b[2]) + (b[1] + b[3]);
#else
  int32_t s = 0;
  for (int i = 0; i < 16; i++) s += v[i];
  return s;
#endif
}

// Reductions of up to sixteen rows at once: lane i < count is what sum_lanes or max_lanes gives for rows[i], bit for
// bit.
#if TOKENFERRY_AVX2
template <typename F>
TF_INLINE half_f reduce_eight(const float (*rows)[16], F&& f) {
  __m256 v[8], c[4];
  for (int r = 0; r < 8; r++) v[r] = f(_mm256_load_ps(rows[r]), _mm256_load_ps(rows[r] + 8));
  for (int r = 0; r < 4; r++)  // rows r and r + 4
    c[r] = f(_mm256_permute2f128_ps(v[r], v[r + 4], 0x20), _mm256_permute2f128_ps(v[r], v[r + 4], 0x31));
  const __m256 d = f(_mm256_unpacklo_ps(c[0], c[1]), _mm256_unpackhi_ps(c[0], c[1]));
  const __m256 e = f(_mm256_unpacklo_ps(c[2], c[3]), _mm256_unpackhi_ps(c[2], c[3]));
  return (half_f)f(_mm256_shuffle_ps(d, e, 0x44), _mm256_shuffle_ps(d, e, 0xee));
}
template <typename F>
TF_INLINE vf reduce_rows(const float (*rows)[16], int count, F&& f) {
  return {reduce_eight(rows, f), count > 8 ? reduce_eight(rows + 8, f) : half_f{}};
}
TF_INLINE vf sum_rows_lanes(const float (*rows)[16], int count) {
  return reduce_rows(rows, count, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
}
TF_INLINE vf max_rows_lanes(const float (*rows)[16], int count) {
  return reduce_rows(rows, count, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
}
#else
template <typename F>
TF_INLINE vf reduce_rows(const float (*rows)[16], int count, F&& f) {
  float reduced[16] = {};
  for (int i = 0; i < count; i++) reduced[i] = f(load(rows[i]));
  return load(reduced);
}
TF_INLINE vf sum_rows_lanes(const float (*rows)[16], int count) {
  return reduce_rows(rows, count, [](vf v) { return sum_lanes(v); });
}
TF_INLINE vf max_rows_lanes(const float (*rows)[16], int count) {
  return reduce_rows(rows, count, [](vf v) { return max_lanes(v); });
}
#endif

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
