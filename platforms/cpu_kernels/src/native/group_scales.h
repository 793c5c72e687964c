// Scales and minima of the groups of a panel (formats: linear.h).
#pragma once
#include "linear.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {

// Those of one group of a panel.
struct Scales {
  const GroupFormat& format;
  const char *own, *upper;  // upper: of two levels
  int64_t left;             // groups in this part of 256 k, of two levels

  DK_INLINE Scales(const GroupFormat& format_, const char* panel, int64_t group)
      : format(format_), own(nullptr), upper(nullptr), left(0) {
    if (format.two_levels()) {
      const int64_t each = kSuperK / format.group;
      upper = panel + group / each * format.super_bytes();
      own = upper + format.upper_bytes() + group % each * format.scale_bytes();
      left = each - group % each;
    } else {
      own = panel + group * format.group_stride() + format.code_bytes();
    }
  }
  // Go to the next group. Returns whether it is the first one after another header.
  DK_INLINE bool next() {
    if (!format.two_levels()) {
      own += format.group_stride();
    } else if (--left) {
      own += format.scale_bytes();
    } else {
      upper += format.super_bytes();
      own = upper + format.upper_bytes();
      left = kSuperK / format.group;
      return true;
    }
    return false;
  }
  // Load the header, if there is one, and prefetch the next one and what follows this one. Its
  // numbers are then read while codes are: with two streams of loads that miss the caches, memory
  // has a third of the bandwidth of one (Zen 4). Loads, unlike prefetches, train its prefetcher.
  DK_INLINE void load_header() const {
    for (int64_t i = 0; i < format.header_bytes() / 64; ++i) {
      asm volatile("" : : "r"(*reinterpret_cast<const volatile char*>(upper + i * 64)));
      __builtin_prefetch(upper + format.super_bytes() + i * 64, 0, 2);
      prefetch_stream(upper, static_cast<int>(i));
    }
  }
  // kWidth numbers from `place`: a column's scale, or 32 + a column for its minimum.
  template <ScaleKind kKind>
  DK_INLINE VF load(int64_t place) const {
    const auto* const numbers = reinterpret_cast<const uint16_t*>(own) + place;
    if constexpr (kKind == kBf16Scales) return load_bf16(numbers);
    if constexpr (kKind == kHalfScales) return load_half(numbers);
    const auto* const factors = reinterpret_cast<const int8_t*>(own) + place;
    return mul(load_half(reinterpret_cast<const uint16_t*>(upper) + place), load_int8(factors));
  }
};

}  // namespace dk::DK_LEVEL_NAMESPACE
