// The block types of GGUF files: codes, scales and minima of one block, without rounding.
//
// A block has 32 values (Q4_0 ... Q8_0) or 256 (Q4_K ... Q6_K, "super-blocks").
// Source: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (layouts)
#pragma once
#include "linear.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {

// One group, or the groups of 256 k of a format with two levels. Codes have their offset.
struct Piece {
  uint8_t codes[kSuperK];
  uint16_t scale, minimum;         // bits of bf16 or float16
  int8_t scales[16], minima[16];   // lower level, by group
};

DK_INLINE uint16_t read_half(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
DK_INLINE int64_t is_not_finite(uint16_t half) { return (half & 0x7c00) == 0x7c00; }

// Q4_0: scale, 16 bytes: low nibbles are values 0..15, high ones 16..31. Q4_1: scale and minimum.
inline int64_t read_q4(const uint8_t* block, bool has_minimum, Piece& piece) {
  piece.scale = read_half(block);
  piece.minimum = has_minimum ? read_half(block + 2) : 0;
  const uint8_t* const q = block + (has_minimum ? 4 : 2);
  for (int k = 0; k < 16; ++k) {
    piece.codes[k] = q[k] & 15;
    piece.codes[16 + k] = q[k] >> 4;
  }
  return is_not_finite(piece.scale) + is_not_finite(piece.minimum);
}

// Q5_0 and Q5_1: as Q4, with the fifth bits of all values in 4 bytes before the nibbles.
inline int64_t read_q5(const uint8_t* block, bool has_minimum, Piece& piece) {
  piece.scale = read_half(block);
  piece.minimum = has_minimum ? read_half(block + 2) : 0;
  const uint8_t* const high = block + (has_minimum ? 4 : 2);
  const int offset = has_minimum ? 128 : 128 - 16;
  for (int k = 0; k < 32; ++k) {
    const int low = k < 16 ? high[4 + k] & 15 : high[4 + k - 16] >> 4;
    piece.codes[k] = static_cast<uint8_t>((low | (high[k / 8] >> k % 8 & 1) << 4) + offset);
  }
  return is_not_finite(piece.scale) + is_not_finite(piece.minimum);
}

inline int64_t read_q8_0(const uint8_t* block, Piece& piece) {
  piece.scale = read_half(block);
  for (int k = 0; k < 32; ++k) piece.codes[k] = block[2 + k] ^ 128;
  return is_not_finite(piece.scale);
}

// Q4_K and Q5_K: scale, factor of the minima, 12 bytes with 6 bits per scale and minimum of 8
// groups; Q5_K: fifth bits, of value k of group g in bit g of byte k; nibbles of groups 2 g and
// 2 g + 1.
inline int64_t read_k(const uint8_t* block, bool has_fifth, Piece& piece) {
  piece.scale = read_half(block);
  piece.minimum = read_half(block + 2) ^ 0x8000;  // it is subtracted
  const uint8_t *const packed = block + 4, *const fifth = block + 16;
  const uint8_t* const q = fifth + (has_fifth ? 32 : 0);
  for (int g = 0; g < 4; ++g) {
    piece.scales[g] = packed[g] & 63;
    piece.minima[g] = packed[4 + g] & 63;
    piece.scales[4 + g] = static_cast<int8_t>((packed[8 + g] & 15) | packed[g] >> 6 << 4);
    piece.minima[4 + g] = static_cast<int8_t>(packed[8 + g] >> 4 | packed[4 + g] >> 6 << 4);
  }
  for (int g = 0; g < 8; ++g) {
    for (int k = 0; k < 32; ++k) {
      const int low = q[g / 2 * 32 + k] >> g % 2 * 4 & 15;
      const int high = has_fifth ? (fifth[k] >> g & 1) * 16 + 128 : 0;
      piece.codes[g * 32 + k] = static_cast<uint8_t>(low + high);
    }
  }
  return is_not_finite(piece.scale) + is_not_finite(piece.minimum);
}

// Q6_K: low nibbles, upper two bits, 16 signed scales, scale. Of each half of 128 values, the four
// quarters share bytes: nibbles of quarters 0 and 2, and 1 and 3; two bits each of all quarters.
inline int64_t read_q6_k(const uint8_t* block, Piece& piece) {
  piece.scale = read_half(block + 208);
  memcpy(piece.scales, block + 192, 16);
  for (int k = 0; k < 256; ++k) {
    const int half = k / 128, quarter = k % 128 / 32, place = k % 32;
    const int low = block[half * 64 + quarter % 2 * 32 + place] >> quarter / 2 * 4 & 15;
    const int high = block[128 + half * 32 + place] >> quarter * 2 & 3;
    piece.codes[k] = static_cast<uint8_t>(low | high << 4);
  }
  return is_not_finite(piece.scale);
}

// Read block number `index` of a row; returns the number of scales and minima that are not finite.
DK_INLINE int64_t read_block(int64_t kind, const char* row, int64_t index, Piece& piece) {
  const auto* const blocks = reinterpret_cast<const uint8_t*>(row);
  switch (kind) {
    case DK_Q4_0: return read_q4(blocks + index * 18, false, piece);
    case DK_Q4_1: return read_q4(blocks + index * 20, true, piece);
    case DK_Q5_0: return read_q5(blocks + index * 22, false, piece);
    case DK_Q5_1: return read_q5(blocks + index * 24, true, piece);
    case DK_Q8_0: return read_q8_0(blocks + index * 34, piece);
    case DK_Q4_K: return read_k(blocks + index * 144, false, piece);
    case DK_Q5_K: return read_k(blocks + index * 176, true, piece);
    default: return read_q6_k(blocks + index * 210, piece);
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
