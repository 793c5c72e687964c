// Vectors of a level: one set of names over AVX-512, AVX2 and plain C++, for sources `*_level.cpp`.
//
// VF holds kWidth floats, VI kWidth 32 bit integers. Loads and stores take any alignment. `_n`
// forms touch the first n elements only (0 <= n; beyond kWidth counts as kWidth) and read zeros
// for the rest. multiply_pairs multiplies signed 16 bit halves and adds the two products of each
// 32 bit lane, multiply_bytes unsigned by signed bytes to 16 bit sums of two; add_halves adds 16
// bit halves. with_sign negates the bytes of its second operand where the first is negative; it may
// return anything where the first is 0. bf16 is rounded to nearest even; NaN stays NaN.
#pragma once
#include <cstdint>
#include <cstring>

#include "dispatch.h"

#if DK_LEVEL >= 1
#include <immintrin.h>
#endif

#define DK_UNROLL _Pragma("GCC unroll 16")

// Marks a vector as held in a register. At the end of a loop body it keeps compilers from copying
// and spilling sums that would fit.
#if DK_LEVEL >= 2
#define DK_IN_REGISTER(v) asm("" : "+v"(v))
#elif DK_X86
#define DK_IN_REGISTER(v) asm("" : "+x"(v))
#else
#define DK_IN_REGISTER(v) static_cast<void>(v)
#endif

namespace dk::DK_LEVEL_NAMESPACE {

// Prefetch what follows line number `line` of data that is read once per step, in a single pass.
DK_INLINE void prefetch_stream(const char* from, int line) {
  constexpr int kAhead = 8192, kSecondLevelAhead = 2048;  // bytes
  const char* const address = from + line * 64;
  if (stream_prefetch == StreamPrefetch::kPastLastLevel) {
    __builtin_prefetch(address + kAhead, 0, 0);
  } else if (stream_prefetch == StreamPrefetch::kIntoAllLevels) {
    __builtin_prefetch(address + kAhead, 0, 3);
  } else if (stream_prefetch == StreamPrefetch::kIntoSecondLevel && line % 2 == 0) {
    __builtin_prefetch(address + kSecondLevelAhead, 0, 2);
  }
}

DK_INLINE float bf16_to_float(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

DK_INLINE uint16_t float_to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The value of a float16.
DK_INLINE float half_to_float(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  uint32_t bits = static_cast<uint32_t>(value & 0x7fff) << 13;
  if ((value & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  if ((value & 0x7c00) != 0x7c00) magnitude *= 5.192296858534828e33f;  // 2^112, exact
  memcpy(&bits, &magnitude, 4);
  bits |= sign;
  memcpy(&magnitude, &bits, 4);
  return magnitude;
}

#if DK_LEVEL >= 2  // ------------------------------------------------------------------- AVX-512

constexpr int kWidth = 16;
using VF = __m512;
using VI = __m512i;

DK_INLINE __mmask16 first(int64_t n) {
  return static_cast<__mmask16>(n < kWidth ? (1u << n) - 1 : 0xffffu);
}
DK_INLINE VF zero() { return _mm512_setzero_ps(); }
DK_INLINE VF set1(float value) { return _mm512_set1_ps(value); }
DK_INLINE VF load(const float* p) { return _mm512_loadu_ps(p); }
DK_INLINE void store(float* p, VF v) { _mm512_storeu_ps(p, v); }
DK_INLINE void store_n(float* p, VF v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
DK_INLINE VF add(VF a, VF b) { return _mm512_add_ps(a, b); }
DK_INLINE VF sub(VF a, VF b) { return _mm512_sub_ps(a, b); }
DK_INLINE VF mul(VF a, VF b) { return _mm512_mul_ps(a, b); }
DK_INLINE VF div(VF a, VF b) { return _mm512_div_ps(a, b); }
DK_INLINE VF sqrt(VF v) { return _mm512_sqrt_ps(v); }
DK_INLINE VF max(VF a, VF b) { return _mm512_max_ps(a, b); }
DK_INLINE VF min(VF a, VF b) { return _mm512_min_ps(a, b); }
DK_INLINE VF fma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
DK_INLINE VF from_bf16(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
DK_INLINE VF load_bf16(const uint16_t* p) {
  return from_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
DK_INLINE VF load_bf16_n(const uint16_t* p, int64_t n) {
  return from_bf16(_mm256_maskz_loadu_epi16(first(n), p));
}
DK_INLINE __m256i to_bf16(VF v) {
#if DK_LEVEL >= 3
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v));
#else
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
DK_INLINE void store_bf16(uint16_t* p, VF v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(v));
}
DK_INLINE void store_bf16_n(uint16_t* p, VF v, int64_t n) {
  _mm256_mask_storeu_epi16(p, first(n), to_bf16(v));
}
DK_INLINE VI zero_int() { return _mm512_setzero_si512(); }
DK_INLINE VI set1_int(int32_t value) { return _mm512_set1_epi32(value); }
DK_INLINE VI load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
DK_INLINE void store_int(int32_t* p, VI v) { _mm512_storeu_si512(p, v); }
DK_INLINE VI add_int(VI a, VI b) { return _mm512_add_epi32(a, b); }
DK_INLINE VI shift_left(VI v, int bits) { return _mm512_slli_epi32(v, bits); }
DK_INLINE VF to_float(VI v) { return _mm512_cvtepi32_ps(v); }
DK_INLINE VI round_to_int(VF v) { return _mm512_cvtps_epi32(v); }
DK_INLINE VI upper_half(VI v) { return _mm512_and_si512(v, _mm512_set1_epi32(-65536)); }
DK_INLINE VI multiply_pairs(VI a, VI b) { return _mm512_madd_epi16(a, b); }
DK_INLINE VI multiply_bytes(VI a, VI b) { return _mm512_maddubs_epi16(a, b); }
DK_INLINE VI add_halves(VI a, VI b) { return _mm512_add_epi16(a, b); }
DK_INLINE VI low_nibbles(VI v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
DK_INLINE VI high_nibbles(VI v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
DK_INLINE VF as_float(VI v) { return _mm512_castsi512_ps(v); }
DK_INLINE VI flip_signs(VI v) { return _mm512_xor_si512(v, _mm512_set1_epi8(-128)); }
DK_INLINE VI magnitudes(VI v) { return _mm512_abs_epi8(v); }
DK_INLINE VI with_sign(VI sign, VI v) {
  return _mm512_mask_sub_epi8(v, _mm512_movepi8_mask(sign), zero_int(), v);
}
DK_INLINE VF load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
DK_INLINE VF load_int8(const int8_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return to_float(_mm512_cvtepi8_epi32(v));
}

#elif DK_LEVEL == 1  // ------------------------------------------------------------------- AVX2

constexpr int kWidth = 8;
using VF = __m256;
using VI = __m256i;

DK_INLINE VF zero() { return _mm256_setzero_ps(); }
DK_INLINE VF set1(float value) { return _mm256_set1_ps(value); }
DK_INLINE VF load(const float* p) { return _mm256_loadu_ps(p); }
DK_INLINE void store(float* p, VF v) { _mm256_storeu_ps(p, v); }
DK_INLINE VF add(VF a, VF b) { return _mm256_add_ps(a, b); }
DK_INLINE VF sub(VF a, VF b) { return _mm256_sub_ps(a, b); }
DK_INLINE VF mul(VF a, VF b) { return _mm256_mul_ps(a, b); }
DK_INLINE VF div(VF a, VF b) { return _mm256_div_ps(a, b); }
DK_INLINE VF sqrt(VF v) { return _mm256_sqrt_ps(v); }
DK_INLINE VF max(VF a, VF b) { return _mm256_max_ps(a, b); }
DK_INLINE VF min(VF a, VF b) { return _mm256_min_ps(a, b); }
DK_INLINE VF fma(VF a, VF b, VF c) { return _mm256_fmadd_ps(a, b, c); }
DK_INLINE VF load_bf16(const uint16_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
DK_INLINE void store_bf16(uint16_t* p, VF v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), nan);
  const __m256i upper = _mm256_srli_epi32(_mm256_castps_si256(chosen), 16);
  const __m128i low = _mm256_castsi256_si128(upper), high = _mm256_extracti128_si256(upper, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(low, high));
}
DK_INLINE VI zero_int() { return _mm256_setzero_si256(); }
DK_INLINE VI set1_int(int32_t value) { return _mm256_set1_epi32(value); }
DK_INLINE VI load_int(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
DK_INLINE void store_int(int32_t* p, VI v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
}
DK_INLINE VI add_int(VI a, VI b) { return _mm256_add_epi32(a, b); }
DK_INLINE VI shift_left(VI v, int bits) { return _mm256_slli_epi32(v, bits); }
DK_INLINE VF to_float(VI v) { return _mm256_cvtepi32_ps(v); }
DK_INLINE VI round_to_int(VF v) { return _mm256_cvtps_epi32(v); }
DK_INLINE VI upper_half(VI v) { return _mm256_and_si256(v, _mm256_set1_epi32(-65536)); }
DK_INLINE VI multiply_pairs(VI a, VI b) { return _mm256_madd_epi16(a, b); }
DK_INLINE VI multiply_bytes(VI a, VI b) { return _mm256_maddubs_epi16(a, b); }
DK_INLINE VI add_halves(VI a, VI b) { return _mm256_add_epi16(a, b); }
DK_INLINE VI low_nibbles(VI v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
DK_INLINE VI high_nibbles(VI v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
DK_INLINE VF as_float(VI v) { return _mm256_castsi256_ps(v); }
DK_INLINE VI flip_signs(VI v) { return _mm256_xor_si256(v, _mm256_set1_epi8(-128)); }
DK_INLINE VI magnitudes(VI v) { return _mm256_abs_epi8(v); }
DK_INLINE VI with_sign(VI sign, VI v) { return _mm256_sign_epi8(v, sign); }
DK_INLINE VF load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
DK_INLINE VF load_int8(const int8_t* p) {
  const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return to_float(_mm256_cvtepi8_epi32(v));
}

#else  // ------------------------------------------------------------------------------ portable

constexpr int kWidth = 4;
using VF = float __attribute__((vector_size(16)));
using VI = int32_t __attribute__((vector_size(16)));

DK_INLINE VF zero() { return VF{}; }
DK_INLINE VF set1(float value) { return VF{value, value, value, value}; }
DK_INLINE VF load(const float* p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}
DK_INLINE void store(float* p, VF v) { memcpy(p, &v, sizeof v); }
DK_INLINE VF add(VF a, VF b) { return a + b; }
DK_INLINE VF sub(VF a, VF b) { return a - b; }
DK_INLINE VF mul(VF a, VF b) { return a * b; }
DK_INLINE VF div(VF a, VF b) { return a / b; }
DK_INLINE VF sqrt(VF v) {
  for (int i = 0; i < kWidth; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
}
DK_INLINE VF max(VF a, VF b) { return a > b ? a : b; }
DK_INLINE VF min(VF a, VF b) { return a < b ? a : b; }
DK_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }
DK_INLINE VF load_bf16(const uint16_t* p) {
  return VF{bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
}
DK_INLINE void store_bf16(uint16_t* p, VF v) {
  for (int i = 0; i < kWidth; ++i) p[i] = float_to_bf16(v[i]);
}
DK_INLINE VI zero_int() { return VI{}; }
DK_INLINE VI set1_int(int32_t value) { return VI{value, value, value, value}; }
DK_INLINE VI load_int(const int32_t* p) {
  VI v;
  memcpy(&v, p, sizeof v);
  return v;
}
DK_INLINE void store_int(int32_t* p, VI v) { memcpy(p, &v, sizeof v); }
DK_INLINE VI add_int(VI a, VI b) { return a + b; }
DK_INLINE VI shift_left(VI v, int bits) { return v << bits; }
DK_INLINE VF to_float(VI v) { return __builtin_convertvector(v, VF); }
DK_INLINE VF as_float(VI v) { return reinterpret_cast<VF>(v); }
DK_INLINE VF load_half(const uint16_t* p) {
  return VF{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])};
}
DK_INLINE VF load_int8(const int8_t* p) { return to_float(VI{p[0], p[1], p[2], p[3]}); }
DK_INLINE VI upper_half(VI v) { return v & -65536; }
// Adding 1.5 * 2^23 leaves the integer, rounded to nearest even, in the low bits: |v| < 2^22.
DK_INLINE VI round_to_int(VF v) {
  const VF magic = set1(12582912.0f);
  return reinterpret_cast<VI>(v + magic) - reinterpret_cast<VI>(magic);
}

#endif

constexpr int kPanel = 32;                          // output columns that are computed together
constexpr int kVectorsPerPanel = kPanel / kWidth;

#if DK_LEVEL < 2
DK_INLINE void store_n(float* p, VF v, int64_t n) {
  float values[kWidth];
  store(values, v);
  for (int i = 0; i < kWidth && i < n; ++i) p[i] = values[i];
}
DK_INLINE VF load_bf16_n(const uint16_t* p, int64_t n) {
  uint16_t values[kWidth] = {};
  for (int i = 0; i < kWidth && i < n; ++i) values[i] = p[i];
  return load_bf16(values);
}
DK_INLINE void store_bf16_n(uint16_t* p, VF v, int64_t n) {
  uint16_t values[kWidth];
  store_bf16(values, v);
  for (int i = 0; i < kWidth && i < n; ++i) p[i] = values[i];
}
#endif

// e to the power of each element, relative error below 2e-7 in [-87, 88]; clamped outside, so
// never 0 and never infinite; NaN gives a finite number. 2^n times a polynomial of the remainder
// (the Cephes scheme).
DK_INLINE VF exp(VF x) {
  x = min(max(x, set1(-87.3f)), set1(88.3f));
  const VI n_int = round_to_int(mul(x, set1(1.44269504f)));
  const VF n = to_float(n_int);
  const VF r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
  VF p = fma(r, set1(1.9875691500e-4f), set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(mul(r, r), p, r), set1(1.0f));
  return mul(p, as_float(shift_left(add_int(n_int, set1_int(127)), 23)));
}

}  // namespace dk::DK_LEVEL_NAMESPACE
