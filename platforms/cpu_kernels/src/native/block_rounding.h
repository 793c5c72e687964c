// Rounding of bf16 weights to the blocks of Q4_1 and Q4_K, with codes from 0 to 15, scales and
// minima, and to those of Q6_K, with codes from -32 to 31 and scales.
//
// Candidates for the range of a group's codes are refined by least squares, and the one with the
// least squared error is used. Weights are whole 2,048ths of the group's range, so that sums are
// exact in any order and levels give the same bytes.
#pragma once
#include "activations.h"
#include "gguf_blocks.h"
#include "linear.h"

namespace dk::DK_LEVEL_NAMESPACE {

// Round to float16, ties to even; too large numbers become infinities.
inline uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x47800000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves multiples of 2^-24 in the low bits
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  bits += 0xc8000fff + (bits >> 13 & 1);
  return static_cast<uint16_t>(sign | bits >> 13);
}

constexpr int64_t kRoundedGroup = 32;
constexpr float kUnits = 2048.0f;
constexpr int32_t kHighestCode = 15;
// Candidates for the number of steps between the least and the greatest weight.
constexpr float kSpans[] = {13.5f, 14.0f, 14.4f, 14.8f, 15.2f, 15.6f, 16.0f, 16.5f};

// The grid of a group: weights are about scale * code + minimum; the minimum is at most 0.
struct CodeRange {
  float scale, minimum;
};

inline CodeRange fit_range(const uint16_t* w) {
  float least = 0.0f, greatest = bf16_to_float(w[0]);
  for (int64_t k = 0; k < kRoundedGroup; ++k) {
    const float x = bf16_to_float(w[k]);
    least = x < least ? x : least;
    greatest = x > greatest ? x : greatest;
  }
  const float range = greatest - least;
  if (!(range > 1e-30f)) return {0.0f, least};
  if (!(range < 1e30f)) return {range, least};  // does not fit a float16
  const float unit = range / kUnits, inverse = kUnits / range;
  int32_t units[kRoundedGroup];
  int32_t sum_u = 0;
  for (int64_t k = 0; k < kRoundedGroup; ++k) {
    units[k] = nearest((bf16_to_float(w[k]) - least) * inverse);
    sum_u += units[k];
  }
  constexpr double kCount = kRoundedGroup;
  const double most_minimum = -static_cast<double>(least) * inverse;
  double best = 1e300, best_scale = kUnits / kHighestCode, best_minimum = 0.0;
  for (const float span : kSpans) {
    int32_t sum_q = 0, sum_qq = 0, sum_uq = 0;
    for (int64_t k = 0; k < kRoundedGroup; ++k) {
      int32_t q = nearest(static_cast<float>(units[k]) * (span / kUnits));
      q = q > kHighestCode ? kHighestCode : q;
      sum_q += q;
      sum_qq += q * q;
      sum_uq += units[k] * q;
    }
    const double q = sum_q, qq = sum_qq, uq = sum_uq, u = sum_u;
    const double determinant = kCount * qq - q * q;
    if (determinant <= 0.0) continue;
    double scale = (kCount * uq - u * q) / determinant;
    double minimum = (qq * u - q * uq) / determinant;
    if (minimum > most_minimum) {
      minimum = most_minimum;
      scale = (uq - minimum * q) / qq;
    }
    // The squared error without the part that does not depend on the codes.
    const double error = scale * (scale * qq + 2.0 * (minimum * q - uq)) +
                         minimum * (minimum * kCount - 2.0 * u);
    if (scale > 0.0 && error < best) {
      best = error;
      best_scale = scale;
      best_minimum = minimum;
    }
  }
  return {static_cast<float>(best_scale * unit),
          static_cast<float>(best_minimum * unit + static_cast<double>(least))};
}

inline void round_codes(const uint16_t* w, float scale, float minimum, uint8_t* codes) {
  const float inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
  for (int64_t k = 0; k < kRoundedGroup; ++k) {
    const float scaled = (bf16_to_float(w[k]) - minimum) * inverse;
    const float kept = scaled < 0.0f ? 0.0f : scaled > 15.0f ? 15.0f : scaled;
    codes[k] = static_cast<uint8_t>(nearest(kept));
  }
}

// The number from 0 to 63 for a scale or a minimum, in steps of `factor`.
inline int8_t second_level(float value, float factor) {
  const float scaled = factor > 0.0f ? value / factor : 0.0f;
  return static_cast<int8_t>(nearest(scaled > 63.0f ? 63.0f : scaled));
}

constexpr int64_t kSixBitGroup = 16;
constexpr int32_t kMostScale = 127;
// Candidates for the code of the weight with the greatest magnitude.
constexpr float kTopCodes[] = {-31.0f, -31.4f, -31.8f, -32.2f, -32.6f, -33.0f};

inline int32_t six_bit_code(float scaled) {
  const int32_t code = nearest(scaled < -32.0f ? -32.0f : scaled);
  return code > 31 ? 31 : code;
}

// The scale, of either sign, of a group of Q6_K.
inline float fit_scale(const uint16_t* w) {
  float greatest = 0.0f, magnitude = 0.0f;
  for (int64_t k = 0; k < kSixBitGroup; ++k) {
    const float x = bf16_to_float(w[k]), size = x < 0.0f ? -x : x;
    greatest = size > magnitude ? x : greatest;
    magnitude = size > magnitude ? size : magnitude;
  }
  if (!(magnitude > 1e-30f)) return 0.0f;
  const float inverse = kUnits / greatest;
  double best = 0.0, scale = 0.0;
  for (const float top : kTopCodes) {
    int32_t sum_uq = 0, sum_qq = 0;
    for (int64_t k = 0; k < kSixBitGroup; ++k) {
      const int32_t unit = nearest(bf16_to_float(w[k]) * inverse);
      const int32_t q = six_bit_code(static_cast<float>(unit) * (top / kUnits));
      sum_uq += unit * q;
      sum_qq += q * q;
    }
    // What the best scale for these codes removes of the squared weights.
    const double uq = sum_uq, removed = uq * uq / sum_qq;
    if (removed > best) {
      best = removed;
      scale = uq / sum_qq;
    }
  }
  return static_cast<float>(scale * (static_cast<double>(greatest) / static_cast<double>(kUnits)));
}

inline int64_t round_q6_k(const uint16_t* w, Piece& piece) {
  constexpr int64_t kGroups = kSuperK / kSixBitGroup;
  float scales[kGroups], largest = 0.0f;
  for (int64_t g = 0; g < kGroups; ++g) {
    scales[g] = fit_scale(w + g * kSixBitGroup);
    const float size = scales[g] < 0.0f ? -scales[g] : scales[g];
    largest = size > largest ? size : largest;
  }
  piece.scale = float_to_half(largest / kMostScale);
  // A scale that is rounded down, by up to a half if it is subnormal, would clip the largest.
  if (half_to_float(piece.scale) * kMostScale < largest) ++piece.scale;
  const float factor = half_to_float(piece.scale);
  for (int64_t g = 0; g < kGroups; ++g) {
    const int32_t number = factor > 0.0f ? nearest(scales[g] / factor) : 0;
    piece.scales[g] = static_cast<int8_t>(number);
    const float scale = factor * static_cast<float>(number);
    const float inverse = number ? 1.0f / scale : 0.0f;
    for (int64_t k = g * kSixBitGroup; k < (g + 1) * kSixBitGroup; ++k) {
      piece.codes[k] = static_cast<uint8_t>(six_bit_code(bf16_to_float(w[k]) * inverse) + 32);
    }
  }
  return is_not_finite(piece.scale);
}

// Round the weights of block number `index`; returns how many scales do not fit a float16.
inline int64_t round_block(int64_t kind, const char* row, int64_t index, Piece& piece) {
  const auto* const first = reinterpret_cast<const uint16_t*>(row);
  if (kind == DK_Q6_K) return round_q6_k(first + index * kSuperK, piece);
  if (kind == DK_Q4_1) {
    const uint16_t* const w = first + index * kRoundedGroup;
    const CodeRange range = fit_range(w);
    piece.scale = float_to_half(range.scale);
    piece.minimum = float_to_half(range.minimum);
    round_codes(w, half_to_float(piece.scale), half_to_float(piece.minimum), piece.codes);
    return is_not_finite(piece.scale) + is_not_finite(piece.minimum);
  }
  constexpr int64_t kGroups = kSuperK / kRoundedGroup;
  const uint16_t* const w = first + index * kSuperK;
  CodeRange ranges[kGroups];
  float scale = 0.0f, minimum = 0.0f;
  for (int64_t g = 0; g < kGroups; ++g) {
    ranges[g] = fit_range(w + g * kRoundedGroup);
    scale = ranges[g].scale > scale ? ranges[g].scale : scale;
    minimum = -ranges[g].minimum > minimum ? -ranges[g].minimum : minimum;
  }
  piece.scale = float_to_half(scale / 63.0f);
  piece.minimum = float_to_half(-minimum / 63.0f);
  const float factor = half_to_float(piece.scale), offset = half_to_float(piece.minimum);
  for (int64_t g = 0; g < kGroups; ++g) {
    piece.scales[g] = second_level(ranges[g].scale, factor);
    piece.minima[g] = second_level(-ranges[g].minimum, -offset);
    round_codes(w + g * kRoundedGroup, factor * static_cast<float>(piece.scales[g]),
                offset * static_cast<float>(piece.minima[g]), piece.codes + g * kRoundedGroup);
  }
  return is_not_finite(piece.scale) + is_not_finite(piece.minimum);
}

}  // namespace dk::DK_LEVEL_NAMESPACE
