// Codes of 6 bits (linear.h) as bytes: the four units of a group of 16 k.
#pragma once
#include "linear.h"
#include "simd.h"

#if DK_LEVEL >= 1
namespace dk::DK_LEVEL_NAMESPACE {

// The bits `kBits` of each byte; join_bits adds those of another vector.
template <int kBits>
DK_INLINE VI keep_bits(VI v) {
#if DK_LEVEL >= 2
  return _mm512_and_si512(v, _mm512_set1_epi8(kBits));
#else
  return _mm256_and_si256(v, _mm256_set1_epi8(kBits));
#endif
}
template <int kBits>
DK_INLINE VI join_bits(VI v, VI more) {
#if DK_LEVEL >= 2
  return _mm512_ternarylogic_epi32(v, more, _mm512_set1_epi8(kBits), 0xf8);  // v | more & bits
#else
  return _mm256_or_si256(v, keep_bits<kBits>(more));
#endif
}

DK_INLINE VI shift_right(VI v, int bits) {
#if DK_LEVEL >= 2
  return _mm512_srli_epi32(v, bits);
#else
  return _mm256_srli_epi32(v, bits);
#endif
}

// codes: of a group, from a column on. units: the bytes of its units, in kWidth columns.
DK_INLINE void read_six_bits(const char* codes, VI (&units)[4]) {
  const auto* const words = reinterpret_cast<const int32_t*>(codes);
  VI packed[3];
  DK_UNROLL for (int u = 0; u < 3; ++u) {
    packed[u] = load_int(words + u * kColumns);
    units[u] = keep_bits<0x3f>(packed[u]);
  }
  const VI low = keep_bits<0x03>(shift_right(packed[0], 6));
  const VI more = join_bits<0x0c>(low, shift_right(packed[1], 4));
  units[3] = join_bits<0x30>(more, shift_right(packed[2], 2));
}

}  // namespace dk::DK_LEVEL_NAMESPACE
#endif
