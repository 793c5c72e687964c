// Vectors of 16 floats and of 16 words (pairs of bf16) at the level that a source is compiled for.
//
// Only for level sources (see dispatch.h): attention, the small operations, sampling. Each
// operation has one name at all levels, so that a kernel is written once. A result may differ
// between levels, never between two uses at one level: every function here is a fixed sequence of
// operations, fused only where stated. Independent of attention.
#pragma once
#include <cstdint>
#include <cstring>

#include "dispatch.h"

#if DK_LEVEL >= 1
// The headers of GCC 12 leave the ignored operand of masked intrinsics undefined, and then warn of
// it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define DK_UNROLL _Pragma("GCC unroll 16")

namespace dk::DK_LEVEL_NAMESPACE {

static constexpr int kLanes = 16;

static DK_INLINE float float_of_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest even; NaN stays NaN.
static DK_INLINE uint16_t bf16_of_float(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static DK_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

#if DK_LEVEL >= 2

using Vec = __m512;
using Words = __m512i;

static DK_INLINE Vec zero() { return _mm512_setzero_ps(); }
static DK_INLINE Vec set(float x) { return _mm512_set1_ps(x); }
static DK_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
static DK_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
static DK_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
static DK_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
static DK_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
static DK_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
static DK_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
static DK_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
static DK_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
static DK_INLINE Vec round_even(Vec a) { return _mm512_roundscale_ps(a, 8); }
static DK_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
static DK_INLINE float reduce_add(Vec a) { return _mm512_reduce_add_ps(a); }

// x where first <= lane < end, elsewhere `other`.
static DK_INLINE Vec keep_lanes(Vec x, int first, int end, Vec other) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 kept = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) &
                         _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
  return _mm512_mask_mov_ps(other, kept, x);
}
// p * 2^r; exactly 0 where x < -126; elsewhere x is NaN or at least -126.
static DK_INLINE Vec scale_by_power(Vec p, Vec r, Vec x) {
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, r);
}

static DK_INLINE Words load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
static DK_INLINE Words set_words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
static DK_INLINE Vec load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
static DK_INLINE Vec load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Integers from -127 to 127.
static DK_INLINE void store_int8(int8_t* p, Vec x) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

#if DK_LEVEL >= 3
// a . b over the two halves of each word, added to c.
static DK_INLINE Vec dot(Vec c, Words a, Words b) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
static DK_INLINE __m256i to_bf16(Vec x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }
static DK_INLINE void store_bf16_pair(uint16_t* p, Vec first, Vec second) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
}
#else
static DK_INLINE Vec dot(Vec c, Words a, Words b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const Vec even_a = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  const Vec even_b = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
  const Vec odd_a = _mm512_castsi512_ps(_mm512_and_si512(a, high));
  const Vec odd_b = _mm512_castsi512_ps(_mm512_and_si512(b, high));
  return fma(odd_a, odd_b, fma(even_a, even_b, c));
}
static DK_INLINE __m256i to_bf16(Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i rounded = _mm512_mask_or_epi32(
      _mm512_add_epi32(bits, bias), nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
static DK_INLINE void store_bf16_pair(uint16_t* p, Vec first, Vec second) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(first));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kLanes), to_bf16(second));
}
#endif
static DK_INLINE void store_bf16(uint16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(x));
}

#elif DK_LEVEL == 1

struct Vec {
  __m256 low, high;
};
struct Words {
  __m256i low, high;
};

static DK_INLINE Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static DK_INLINE Vec set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static DK_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static DK_INLINE void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.low);
  _mm256_storeu_ps(p + 8, x.high);
}
#define DK_BOTH_HALVES(name, intrinsic)                                \
  static DK_INLINE Vec name(Vec a, Vec b) {                            \
    return {intrinsic(a.low, b.low), intrinsic(a.high, b.high)};       \
  }
DK_BOTH_HALVES(add, _mm256_add_ps)
DK_BOTH_HALVES(sub, _mm256_sub_ps)
DK_BOTH_HALVES(mul, _mm256_mul_ps)
DK_BOTH_HALVES(div, _mm256_div_ps)
DK_BOTH_HALVES(max, _mm256_max_ps)
DK_BOTH_HALVES(min, _mm256_min_ps)
#undef DK_BOTH_HALVES
static DK_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static DK_INLINE Vec round_even(Vec a) {
  return {_mm256_round_ps(a.low, 8), _mm256_round_ps(a.high, 8)};
}
static DK_INLINE float reduce_max(Vec a) {
  const __m256 both = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
static DK_INLINE float reduce_add(Vec a) {
  const __m256 both = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static DK_INLINE __m256 keep_eight(__m256 x, __m256i lane, int first, int end, __m256 other) {
  const __m256i before = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  const __m256i within = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
  return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_andnot_si256(before, within)));
}
static DK_INLINE Vec keep_lanes(Vec x, int first, int end, Vec other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {keep_eight(x.low, lane, first, end, other.low),
          keep_eight(x.high, lane, first - 8, end - 8, other.high)};
}
static DK_INLINE __m256 scale_eight(__m256 p, __m256 r, __m256 x) {
  const __m256 kept = _mm256_cmp_ps(x, _mm256_set1_ps(-126.f), _CMP_NLT_UQ);
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(r), _mm256_set1_epi32(127));
  const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  return _mm256_and_ps(kept, _mm256_mul_ps(p, power));
}
static DK_INLINE Vec scale_by_power(Vec p, Vec r, Vec x) {
  return {scale_eight(p.low, r.low, x.low), scale_eight(p.high, r.high, x.high)};
}

static DK_INLINE Words load_words(const uint32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
static DK_INLINE Words set_words(uint32_t x) {
  const __m256i eight = _mm256_set1_epi32(static_cast<int>(x));
  return {eight, eight};
}
static DK_INLINE __m256 eight_bf16(const uint16_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
static DK_INLINE Vec load_bf16(const uint16_t* p) { return {eight_bf16(p), eight_bf16(p + 8)}; }
static DK_INLINE Vec load_int8(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static DK_INLINE void store_int8(int8_t* p, Vec x) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
static DK_INLINE __m256 dot_eight(__m256 c, __m256i a, __m256i b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256 even_a = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16));
  const __m256 even_b = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  const __m256 odd_a = _mm256_castsi256_ps(_mm256_and_si256(a, high));
  const __m256 odd_b = _mm256_castsi256_ps(_mm256_and_si256(b, high));
  return _mm256_fmadd_ps(odd_a, odd_b, _mm256_fmadd_ps(even_a, even_b, c));
}
static DK_INLINE Vec dot(Vec c, Words a, Words b) {
  return {dot_eight(c.low, a.low, b.low), dot_eight(c.high, a.high, b.high)};
}
static DK_INLINE __m256i round_eight(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 rounded = _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_add_epi32(bits, bias)),
                                          _mm256_castsi256_ps(quiet), nan);
  return _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
}
static DK_INLINE void store_bf16(uint16_t* p, Vec x) {
  const __m256i mixed = _mm256_packus_epi32(round_eight(x.low), round_eight(x.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
static DK_INLINE void store_bf16_pair(uint16_t* p, Vec first, Vec second) {
  store_bf16(p, first);
  store_bf16(p + kLanes, second);
}

#else

struct Vec {
  float lane[kLanes];
};
struct Words {
  uint32_t lane[kLanes];
};

#define DK_EACH_LANE(expression)                       \
  {                                                    \
    Vec y;                                             \
    for (int i = 0; i < kLanes; ++i) y.lane[i] = expression; \
    return y;                                          \
  }
static DK_INLINE float power_of_two(float exponent) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(exponent) + 127) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static DK_INLINE Vec zero() DK_EACH_LANE(0.f)
static DK_INLINE Vec set(float x) DK_EACH_LANE(x)
static DK_INLINE Vec load(const float* p) DK_EACH_LANE(p[i])
static DK_INLINE void store(float* p, Vec x) { memcpy(p, x.lane, sizeof x.lane); }
static DK_INLINE Vec add(Vec a, Vec b) DK_EACH_LANE(a.lane[i] + b.lane[i])
static DK_INLINE Vec sub(Vec a, Vec b) DK_EACH_LANE(a.lane[i] - b.lane[i])
static DK_INLINE Vec mul(Vec a, Vec b) DK_EACH_LANE(a.lane[i] * b.lane[i])
static DK_INLINE Vec div(Vec a, Vec b) DK_EACH_LANE(a.lane[i] / b.lane[i])
static DK_INLINE Vec fma(Vec a, Vec b, Vec c) DK_EACH_LANE(a.lane[i] * b.lane[i] + c.lane[i])
static DK_INLINE Vec max(Vec a, Vec b) DK_EACH_LANE(a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i])
static DK_INLINE Vec min(Vec a, Vec b) DK_EACH_LANE(a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i])
// For |a| < 2^22, undefined beyond; NaN stays NaN.
static DK_INLINE Vec round_even(Vec a) DK_EACH_LANE((a.lane[i] + 12582912.f) - 12582912.f)
static DK_INLINE float reduce_max(Vec a) {
  float best = a.lane[0];
  for (int i = 1; i < kLanes; ++i) best = a.lane[i] > best ? a.lane[i] : best;
  return best;
}
static DK_INLINE float reduce_add(Vec a) {
  float sum = a.lane[0];
  for (int i = 1; i < kLanes; ++i) sum += a.lane[i];
  return sum;
}
static DK_INLINE Vec keep_lanes(Vec x, int first, int end, Vec other)
    DK_EACH_LANE(i >= first && i < end ? x.lane[i] : other.lane[i])
static DK_INLINE Vec scale_by_power(Vec p, Vec r, Vec x)
    DK_EACH_LANE(x.lane[i] < -126.f   ? 0.f
                 : x.lane[i] <= 127.f ? p.lane[i] * power_of_two(r.lane[i])
                                      : p.lane[i] + x.lane[i])
static DK_INLINE Words load_words(const uint32_t* p) {
  Words y;
  memcpy(y.lane, p, sizeof y.lane);
  return y;
}
static DK_INLINE Words set_words(uint32_t x) {
  Words y;
  for (int i = 0; i < kLanes; ++i) y.lane[i] = x;
  return y;
}
static DK_INLINE Vec load_bf16(const uint16_t* p) DK_EACH_LANE(float_of_bf16(p[i]))
static DK_INLINE Vec load_int8(const int8_t* p) DK_EACH_LANE(static_cast<float>(p[i]))
static DK_INLINE void store_int8(int8_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(x.lane[i]);
}
static DK_INLINE float high_half(uint32_t x) {
  return float_of_bf16(static_cast<uint16_t>(x >> 16));
}
static DK_INLINE float low_half(uint32_t x) { return float_of_bf16(static_cast<uint16_t>(x)); }
static DK_INLINE Vec dot(Vec c, Words a, Words b)
    DK_EACH_LANE(c.lane[i] + low_half(a.lane[i]) * low_half(b.lane[i]) +
                 high_half(a.lane[i]) * high_half(b.lane[i]))
static DK_INLINE void store_bf16(uint16_t* p, Vec x) {
  for (int i = 0; i < kLanes; ++i) p[i] = bf16_of_float(x.lane[i]);
}
static DK_INLINE void store_bf16_pair(uint16_t* p, Vec first, Vec second) {
  store_bf16(p, first);
  store_bf16(p + kLanes, second);
}
#undef DK_EACH_LANE

#endif

// 2^x for x <= 127, exactly 0 below -126 (also -infinity); NaN stays NaN. Relative error 2e-7, half
// of which is rounding; the polynomial of degree 5 is the best on [-1/2, 1/2] that is 1 at 0.
static DK_INLINE Vec exp2_of(Vec x) {
  const Vec r = round_even(x);
  const Vec f = sub(x, r);
  Vec p = set(1.32647273e-3f);
  p = fma(p, f, set(9.67151299e-3f));
  p = fma(p, f, set(5.55073358e-2f));
  p = fma(p, f, set(2.40222424e-1f));
  p = fma(p, f, set(6.93147004e-1f));
  p = fma(p, f, set(1.f));
  return scale_by_power(p, r, x);
}
static constexpr float kLog2E = 1.44269504f;

// 1 / (1 + exp(-x)); saturates at 0 and 1; NaN stays NaN.
static DK_INLINE Vec sigmoid_of(Vec x) {
  const Vec bounded = min(set(80.f), max(set(-80.f), x));
  return div(set(1.f), add(set(1.f), exp2_of(mul(bounded, set(-kLog2E)))));
}
static DK_INLINE Vec tanh_of(Vec x) {
  return sub(mul(set(2.f), sigmoid_of(mul(set(2.f), x))), set(1.f));
}

}  // namespace dk::DK_LEVEL_NAMESPACE
