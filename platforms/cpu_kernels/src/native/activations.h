// Packing of activations: rows of bf16 or quantized int8 into tiles [unit][row], zeros for padding.
//
// Quantization is symmetric: scale = max |x| / 127, rounded up to 16 bits, q = x / scale to nearest
// even. A group whose maximum is below 1e-30 becomes zeros with scale 0. One with a NaN, an
// infinity or a number beyond 1e33 becomes zeros with scale NaN, so that its results are NaN and
// not plausible numbers. A refined group has the same scale, and x / scale is rounded to a multiple
// of 1 / 128: to q + low / 128, a byte each.
#pragma once
#include "linear.h"
#include "simd.h"
#include "word_transpose.h"

namespace dk::DK_LEVEL_NAMESPACE {

struct GroupScale {
  float scale, inverse;
};

DK_INLINE GroupScale scale_of(uint32_t largest_bits) {
  float largest;
  memcpy(&largest, &largest_bits, 4);
  if (largest_bits >= 0x7f800000 || largest > 1e33f) return {__builtin_nanf(""), 0.0f};
  if (largest < 1e-30f) return {0.0f, 0.0f};
  float scale = largest / 127.0f;
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  bits = (bits + 0xff) & ~0xffu;
  memcpy(&scale, &bits, 4);
  return {scale, 1.0f / scale};
}

constexpr int kLowBits = 7;
constexpr float kLowScale = 1.0f / (1 << kLowBits);

// x to nearest even, for |x| < 2^22.
DK_INLINE int32_t nearest(float x) {
  const float shifted = x + 12582912.0f;  // 1.5 * 2^23 leaves the rounded integer in the low bits
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// The largest magnitude of x[0, n), as a bf16 without its sign; NaN and infinities are the largest.
DK_INLINE uint32_t largest_of(const uint16_t* x, int64_t n) {
  uint32_t largest = 0;
  int64_t k = 0;
#if DK_LEVEL >= 1
  const __m256i magnitude = _mm256_set1_epi16(0x7fff);
  __m256i most = _mm256_setzero_si256();
  for (; k + 16 <= n; k += 16) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + k));
    most = _mm256_max_epu16(most, _mm256_and_si256(v, magnitude));
  }
  // The only horizontal instruction finds the minimum: apply it to the complement.
  const __m128i low = _mm256_castsi256_si128(most), high = _mm256_extracti128_si256(most, 1);
  const __m128i complement = _mm_xor_si128(_mm_max_epu16(low, high), _mm_set1_epi16(-1));
  const __m128i least = _mm_minpos_epu16(complement);
  largest = 0xffffu & ~static_cast<uint32_t>(_mm_cvtsi128_si32(least));
#endif
  for (; k < n; ++k) {
    const uint32_t magnitude = x[k] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

#if DK_LEVEL == 1
// Store the low bytes of a, then of b.
DK_INLINE void store_bytes(VI a, VI b, int8_t* q) {
  const __m256i order = _mm256_setr_epi32(0, 4, 0, 0, 1, 5, 0, 0);
  // Packing works within 128-bit halves: 4-byte pieces come out as a0 b0 . . a1 b1 . .
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), zero_int());
  const __m256i sorted = _mm256_permutevar8x32_epi32(bytes, order);
  const __m128i low = _mm256_castsi256_si128(sorted), high = _mm256_extracti128_si256(sorted, 1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm_unpacklo_epi64(low, high));
}
DK_INLINE int32_t sum_of(VI v) {
  int32_t lanes[kWidth], total = 0;
  store_int(lanes, v);
  for (const int32_t each : lanes) total += each;
  return total;
}
#endif

// q[0, n) = x * inverse to nearest even; returns the sum of q. Results are at most 127 in
// magnitude.
DK_INLINE int32_t round_group(const uint16_t* x, int64_t n, float inverse, int8_t* q) {
  int32_t total = 0;
  int64_t k = 0;
#if DK_LEVEL >= 2
  VI sum = zero_int();
  for (; k + 16 <= n; k += 16) {
    const VI v = round_to_int(mul(load_bf16(x + k), set1(inverse)));
    sum = add_int(sum, v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + k), _mm512_cvtepi32_epi8(v));
  }
  total = _mm512_reduce_add_epi32(sum);
#elif DK_LEVEL == 1
  VI sum = zero_int();
  for (; k + 16 <= n; k += 16) {
    const VI a = round_to_int(mul(load_bf16(x + k), set1(inverse)));
    const VI b = round_to_int(mul(load_bf16(x + k + 8), set1(inverse)));
    sum = add_int(sum, add_int(a, b));
    store_bytes(a, b, q + k);
  }
  total = sum_of(sum);
#endif
  for (; k < n; ++k) {
    q[k] = static_cast<int8_t>(nearest(bf16_to_float(x[k]) * inverse));
    total += q[k];
  }
  return total;
}

// 128 q + low = x * inverse * 128 to nearest even; returns the sum of these numbers. q is at most
// 127 in magnitude, low at most 64.
DK_INLINE int32_t round_finely(const uint16_t* x, int64_t n, float inverse, int8_t* q,
                               int8_t* low) {
  constexpr int32_t kHalf = 1 << (kLowBits - 1);
  const float factor = inverse * (1 << kLowBits);
  int32_t total = 0;
  int64_t k = 0;
#if DK_LEVEL >= 2
  VI sum = zero_int();
  for (; k + 16 <= n; k += 16) {
    const VI v = round_to_int(mul(load_bf16(x + k), set1(factor)));
    const VI high = _mm512_srai_epi32(add_int(v, set1_int(kHalf)), kLowBits);
    const VI rest = _mm512_sub_epi32(v, shift_left(high, kLowBits));
    sum = add_int(sum, v);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(q + k), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low + k), _mm512_cvtepi32_epi8(rest));
  }
  total = _mm512_reduce_add_epi32(sum);
#elif DK_LEVEL == 1
  VI sum = zero_int();
  for (; k + 16 <= n; k += 16) {
    VI high[2], rest[2];
    DK_UNROLL for (int i = 0; i < 2; ++i) {
      const VI v = round_to_int(mul(load_bf16(x + k + 8 * i), set1(factor)));
      high[i] = _mm256_srai_epi32(add_int(v, set1_int(kHalf)), kLowBits);
      rest[i] = _mm256_sub_epi32(v, shift_left(high[i], kLowBits));
      sum = add_int(sum, v);
    }
    store_bytes(high[0], high[1], q + k);
    store_bytes(rest[0], rest[1], low + k);
  }
  total = sum_of(sum);
#endif
  for (; k < n; ++k) {
    const int32_t v = nearest(bf16_to_float(x[k]) * factor), high = (v + kHalf) >> kLowBits;
    q[k] = static_cast<int8_t>(high);
    low[k] = static_cast<int8_t>(v - high * (1 << kLowBits));
    total += v;
  }
  return total;
}

// Quantize x[0, n) into q; returns the scale, and the sum of q in `sum`.
DK_INLINE float quantize_group(const uint16_t* x, int64_t n, int8_t* q, int32_t* sum) {
  const GroupScale group = scale_of(largest_of(x, n) << 16);
  if (group.inverse == 0.0f) {
    memset(q, 0, n);
    *sum = 0;
  } else {
    *sum = round_group(x, n, group.inverse, q);
  }
  return group.scale;
}

// Transpose `rows` rows of num_bytes bytes each, `stride` bytes apart, into out[unit][tile_rows]
// words of 4 bytes. Bytes after num_bytes and rows after `rows` (at most tile_rows <= 12) become
// zero.
DK_INLINE void transpose_words(const char* in, int64_t stride, int64_t num_bytes, int64_t rows,
                               uint32_t* out, int64_t tile_rows, int64_t num_units) {
  if (tile_rows == 1) {
    memcpy(out, in, num_bytes);
    memset(reinterpret_cast<char*>(out) + num_bytes, 0, num_units * 4 - num_bytes);
    return;
  }
#if DK_LEVEL >= 2
  const __mmask16 kept = first(tile_rows);
  for (int64_t u = 0; u < num_units; u += 16) {
    const int64_t left = num_bytes - u * 4;
    const __mmask64 bytes = left <= 0 ? 0 : left < 64 ? (1ull << left) - 1 : ~0ull;
    __m512i r[16];
    DK_UNROLL for (int i = 0; i < 16; ++i) {
      r[i] = i < rows ? _mm512_maskz_loadu_epi8(bytes, in + i * stride + u * 4) : zero_int();
    }
    transpose_16(r);
    const int64_t units = num_units - u < 16 ? num_units - u : 16;
    DK_UNROLL for (int i = 0; i < 16; ++i) {
      if (i < units) _mm512_mask_storeu_epi32(out + (u + i) * tile_rows, kept, r[i]);
    }
  }
#else
  for (int64_t r = 0; r < tile_rows; ++r) {
    for (int64_t u = 0; u < num_units; ++u) {
      const int64_t left = r < rows ? num_bytes - u * 4 : 0;
      uint32_t word = 0;
      if (left > 0) memcpy(&word, in + r * stride + u * 4, left < 4 ? left : 4);
      out[u * tile_rows + r] = word;
    }
  }
#endif
}

}  // namespace dk::DK_LEVEL_NAMESPACE
