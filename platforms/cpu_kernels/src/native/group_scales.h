// Scales and minima of the groups of a panel (formats: linear.h).
#pragma once
#include "linear.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {

// Those of one group of a panel; `next` goes to the next group.
struct Scales {
  const GroupFormat& format;
  const char *own, *upper;  // upper: of two levels
  int64_t left;             // groups in this part of 256 k, of two levels

  DK_INLINE Scales(const GroupFormat& format_, const char* panel, int64_t K, int64_t group)
      : format(format_), own(nullptr), upper(nullptr), left(0) {
    if (format.two_levels()) {
      const int64_t each = kSuperK / format.group;
      upper = panel + format.all_groups_bytes(K) + group / each * format.super_stride();
      own = upper + format.upper_bytes() + group % each * format.scale_bytes();
      left = each - group % each;
    } else {
      own = panel + group * format.group_stride() + format.code_bytes();
    }
  }
  DK_INLINE void next() {
    if (!format.two_levels()) {
      own += format.group_stride();
    } else if (--left) {
      own += format.scale_bytes();
    } else {
      upper += format.super_stride();
      own = upper + format.upper_bytes();
      left = kSuperK / format.group;
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
