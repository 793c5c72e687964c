// Codes of 6 bits (linear.h) as bytes: the four units of a group of 16 k.
#pragma once
#include "linear.h"
#include "simd.h"

#if DK_LEVEL >= 1
namespace dk::DK_LEVEL_NAMESPACE {

// Low bits of `low`, four of each byte, and above them two bits of `high`.
DK_INLINE VI join_bits(VI low, VI high) {
#if DK_LEVEL >= 2
  const VI upper = _mm512_and_si512(high, _mm512_set1_epi8(0x30));
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(15), low, upper, 0xca);  // bits of low or upper
#else
  return _mm256_or_si256(low_nibbles(low), _mm256_and_si256(high, _mm256_set1_epi8(0x30)));
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
  const VI low = load_int(words), next = load_int(words + kColumns);
  const VI upper = load_int(words + 2 * kColumns);
  units[0] = join_bits(low, shift_left(upper, 4));
  units[1] = join_bits(shift_right(low, 4), shift_left(upper, 2));
  units[2] = join_bits(next, upper);
  units[3] = join_bits(shift_right(next, 4), shift_right(upper, 2));
}

}  // namespace dk::DK_LEVEL_NAMESPACE
#endif
