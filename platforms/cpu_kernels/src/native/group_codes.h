// Integer sums of codes times activations: sums[row][vector] += code * x, over a part of a group.
//
// A part has kUnits units of 4 k: 4 or 8; codes of 4 bits always 8, codes of 6 bits 4. x:
// [unit][row], 4 signed bytes each, from -127 to 127. Codes are unsigned: the caller corrects sums
// for their offset.
#pragma once
#include "linear.h"
#include "simd.h"
#include "six_bits.h"

namespace dk::DK_LEVEL_NAMESPACE {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define DK_HAS_VNNI 1
#else
#define DK_HAS_VNNI 0
#endif

constexpr bool kUnpacks = DK_HAS_VNNI && DK_LEVEL >= 2;  // tiles read codes of 4 bits as bytes
// Without VNNI, bytes are read as signed numbers, without their offset: 16 bit sums of two products
// would saturate.
constexpr int32_t kByteOffset = DK_LEVEL == 0 || DK_HAS_VNNI ? 128 : 0;

#if DK_HAS_VNNI && DK_LEVEL >= 2
// With few rows there are registers for a second set of sums, which hides the instruction's
// latency.
template <int kRows, int kUnits>
DK_INLINE void add_bytes(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  constexpr bool kTwoSets = kRows <= 4;
  VI others[kTwoSets ? kRows : 1][2];
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) others[r][0] = others[r][1] = zero_int();
  }
  DK_UNROLL for (int u = 0; u < kUnits; ++u) {
    const VI w0 = _mm512_load_si512(codes + u * kUnitBytes);
    const VI w1 = _mm512_load_si512(codes + u * kUnitBytes + 64);
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = set1_int(static_cast<int>(x[u * kRows + r]));
      VI* const into = kTwoSets && u % 2 ? others[kTwoSets ? r : 0] : sums[r];
      into[0] = _mm512_dpbusd_epi32(into[0], w0, a);
      into[1] = _mm512_dpbusd_epi32(into[1], w1, a);
    }
  }
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < 2; ++v) sums[r][v] = add_int(sums[r][v], others[r][v]);
    }
  }
}

// The second set uses the high nibbles in place, as 16 times their value.
template <int kRows>
DK_INLINE void add_nibbles(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  constexpr bool kTwoSets = kRows <= 4;
  const VI low_mask = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8(static_cast<char>(0xf0));
  VI high_sums[kTwoSets ? kRows : 1][2];
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) high_sums[r][0] = high_sums[r][1] = zero_int();
  }
  DK_UNROLL for (int u = 0; u < 4; ++u) {
    VI low[2], high[2];
    DK_UNROLL for (int v = 0; v < 2; ++v) {
      const VI both = _mm512_load_si512(codes + u * kUnitBytes + v * 64);
      low[v] = _mm512_and_si512(both, low_mask);
      high[v] = kTwoSets ? _mm512_and_si512(both, high_mask)
                         : _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
    }
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = set1_int(static_cast<int>(x[2 * u * kRows + r]));
      DK_UNROLL for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], low[v], a);
    }
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = set1_int(static_cast<int>(x[(2 * u + 1) * kRows + r]));
      VI* const into = kTwoSets ? high_sums[kTwoSets ? r : 0] : sums[r];
      DK_UNROLL for (int v = 0; v < 2; ++v) into[v] = _mm512_dpbusd_epi32(into[v], high[v], a);
    }
  }
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < 2; ++v) {
        sums[r][v] = add_int(sums[r][v], _mm512_srai_epi32(high_sums[r][v], 4));
      }
    }
  }
}

DK_INLINE VI add_products(VI sums, VI codes, uint32_t x) {
  return _mm512_dpbusd_epi32(sums, codes, set1_int(static_cast<int>(x)));
}

// Codes to bytes, in the order of add_bytes: those of 6 bits, a group, and those of 4 bits.
DK_INLINE void unpack_six_bits(const char* codes, char* out) {
  DK_UNROLL for (int half = 0; half < 2; ++half) {
    VI units[4];
    read_six_bits(codes + half * 64, units);
    DK_UNROLL for (int u = 0; u < 4; ++u) {
      _mm512_store_si512(out + u * kUnitBytes + half * 64, units[u]);
    }
  }
}
DK_INLINE void unpack_nibbles(const char* codes, int64_t num_bytes, char* out) {
  const VI mask = _mm512_set1_epi8(15);
  for (int64_t i = 0; i < num_bytes / 64; ++i) {
    const VI both = _mm512_load_si512(codes + i * 64);
    char* const to = out + i / 2 * 256 + i % 2 * 64;
    _mm512_store_si512(to, _mm512_and_si512(both, mask));
    _mm512_store_si512(to + 128, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
  }
}
#elif DK_HAS_VNNI
DK_INLINE VI add_products(VI sums, VI codes, uint32_t x) {
  return _mm256_dpbusd_avx_epi32(sums, codes, set1_int(static_cast<int>(x)));
}

template <int kRows, int kUnits>
DK_INLINE void add_bytes(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* words = reinterpret_cast<const int32_t*>(codes);
  DK_UNROLL for (int u = 0; u < kUnits; ++u) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const VI code = load_int(words + u * kColumns + v * kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][v] = add_products(sums[r][v], code, x[u * kRows + r]);
      }
    }
  }
}

template <int kRows>
DK_INLINE void add_nibbles(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* words = reinterpret_cast<const int32_t*>(codes);
  DK_UNROLL for (int u = 0; u < 4; ++u) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const VI both = load_int(words + u * kColumns + v * kWidth);
      const VI low = low_nibbles(both), high = high_nibbles(both);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][v] = add_products(sums[r][v], low, x[2 * u * kRows + r]);
        sums[r][v] = add_products(sums[r][v], high, x[(2 * u + 1) * kRows + r]);
      }
    }
  }
}
#elif DK_LEVEL >= 1
// Without DK_IN_REGISTER, compilers compute all products of a part first, store them, and add them
// later.

// The product of magnitudes has the right sign if the activation takes the code's sign.
template <int kRows, int kUnits>
DK_INLINE void add_bytes(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* words = reinterpret_cast<const int32_t*>(codes);
  DK_UNROLL for (int u = 0; u < kUnits; ++u) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const VI code = flip_signs(load_int(words + u * kColumns + v * kWidth));
      const VI magnitude = magnitudes(code);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        const VI a = with_sign(code, set1_int(static_cast<int>(x[u * kRows + r])));
        const VI pairs = multiply_pairs(multiply_bytes(magnitude, a), set1_int(0x10001));
        sums[r][v] = add_int(sums[r][v], pairs);
        DK_IN_REGISTER(sums[r][v]);
      }
    }
  }
}

// 16 bit sums hold 32 k: 8 products of pairs, each at most 2 * 15 * 127, stay below 2^15.
template <int kRows>
DK_INLINE void add_nibbles(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* words = reinterpret_cast<const int32_t*>(codes);
  VI pairs[kRows][kVectorsPerPanel];
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) pairs[r][v] = zero_int();
  }
  DK_UNROLL for (int u = 0; u < 4; ++u) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const VI both = load_int(words + u * kColumns + v * kWidth);
      const VI low = low_nibbles(both), high = high_nibbles(both);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        const VI a = set1_int(static_cast<int>(x[2 * u * kRows + r]));
        const VI b = set1_int(static_cast<int>(x[(2 * u + 1) * kRows + r]));
        pairs[r][v] = add_halves(pairs[r][v], multiply_bytes(low, a));
        pairs[r][v] = add_halves(pairs[r][v], multiply_bytes(high, b));
        DK_IN_REGISTER(pairs[r][v]);
      }
    }
  }
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      sums[r][v] = add_int(sums[r][v], multiply_pairs(pairs[r][v], set1_int(0x10001)));
    }
  }
}

template <int kRows>
DK_INLINE void add_six_bits(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
    VI units[4];
    read_six_bits(codes + v * kWidth * 4, units);
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int u = 0; u < 4; u += 2) {  // 16 bit sums stay below 4 * 63 * 127 < 2^15
        const VI a = set1_int(static_cast<int>(x[u * kRows + r]));
        const VI b = set1_int(static_cast<int>(x[(u + 1) * kRows + r]));
        const VI pairs = add_halves(multiply_bytes(units[u], a), multiply_bytes(units[u + 1], b));
        sums[r][v] = add_int(sums[r][v], multiply_pairs(pairs, set1_int(0x10001)));
        DK_IN_REGISTER(sums[r][v]);
      }
    }
  }
}
#else
// The codes of byte k of a unit, in kWidth columns.
DK_INLINE VI byte_of(const char* unit, int v, int k) {
  const auto* const c = reinterpret_cast<const uint8_t*>(unit) + v * kWidth * 4 + k;
  return VI{c[0], c[4], c[8], c[12]};
}
DK_INLINE int32_t input_of(uint32_t word, int k) { return static_cast<int8_t>(word >> (8 * k)); }

template <int, int kUnits>
DK_INLINE void add_bytes(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  for (int u = 0; u < kUnits; ++u, codes += kUnitBytes) {
    for (int k = 0; k < 4; ++k) {
      const int32_t a = input_of(x[u], k);
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) sums[0][v] += byte_of(codes, v, k) * a;
    }
  }
}

template <int>
DK_INLINE void add_nibbles(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  for (int u = 0; u < 4; ++u, codes += kUnitBytes) {
    for (int k = 0; k < 4; ++k) {
      const int32_t a = input_of(x[2 * u], k), b = input_of(x[2 * u + 1], k);
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        const VI both = byte_of(codes, v, k);
        sums[0][v] += (both & 15) * a + (both >> 4) * b;
      }
    }
  }
}

template <int>
DK_INLINE void add_six_bits(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  for (int k = 0; k < 4; ++k) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      VI last{};
      DK_UNROLL for (int u = 0; u < 3; ++u) {
        const VI packed = byte_of(codes + u * kUnitBytes, v, k);
        sums[0][v] += (packed & 63) * input_of(x[u], k);
        last |= packed >> 6 << (2 * u);
      }
      sums[0][v] += last * input_of(x[3], k);
    }
  }
}
#endif

#if DK_HAS_VNNI
template <int kRows>
DK_INLINE void add_six_bits(const char* codes, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
    VI units[4];
    read_six_bits(codes + v * kWidth * 4, units);
    DK_UNROLL for (int u = 0; u < 4; ++u) {
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        sums[r][v] = add_products(sums[r][v], units[u], x[u * kRows + r]);
      }
    }
  }
}
#endif

}  // namespace dk::DK_LEVEL_NAMESPACE
