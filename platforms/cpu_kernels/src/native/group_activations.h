// Activations of codes in groups: int8 with a scale per row and group, their low parts if groups
// are refined, and where sums start.
#pragma once
#include "activations.h"
#include "group_codes.h"
#include "linear.h"

namespace dk::DK_LEVEL_NAMESPACE {

constexpr int32_t kStartBits = 0x4b400000;
constexpr float kStart = 12582912.0f;  // 1.5 * 2^23, with these bits
// Removes kStartBits from a sum that is shifted for low parts.
constexpr int32_t kLowStart = -static_cast<int32_t>(static_cast<uint32_t>(kStartBits) << kLowBits);

// stride: from one group of q to the next.
DK_INLINE void quantize_row(const LinearJob& job, int64_t row, int64_t at, int8_t* q,
                            int64_t stride) {
  const GroupFormat& format = job.format;
  const int32_t offset = format.bits == 8 ? kByteOffset : static_cast<int32_t>(format.offset());
  const int64_t K = job.args->K, group = format.group;
  const uint16_t* const x = job.x + row * job.args->ldx;
  for (int64_t k = 0; k < K; k += group, q += stride, at += job.tile_rows) {
    const int64_t n = K - k < group ? K - k : group;
    int32_t sum;
    job.scales[at] = quantize_group(x + k, n, q, &sum);
    job.starts[at] = kStartBits - offset * sum;
    job.start_products[at] = -kStart * job.scales[at];
    if (format.has_minima) job.sums[at] = job.scales[at] * static_cast<float>(sum);
    if (n < group) memset(q + n, 0, group - n);
  }
}

// Write the scales of a row, x, and return the scale above which its groups are refined. at: of its
// first group in the arrays of the job.
DK_INLINE float write_scales(const LinearJob& job, const uint16_t* x, int64_t at) {
  const int64_t K = job.args->K, group = job.format.group;
  float total = 0.0f;
  for (int64_t k = 0; k < K; k += group, at += job.tile_rows) {
    job.scales[at] = scale_of(largest_of(x + k, K - k < group ? K - k : group) << 16).scale;
    total += job.scales[at];
  }
  return total * (job.refined_from / static_cast<float>(job.num_groups));
}

// The same for row r of a tile, and the low parts of groups with a large scale; all of `low` is
// written. It has the strides of q.
DK_INLINE void refine_row(const LinearJob& job, int64_t tile, int64_t r, int64_t at, int8_t* q,
                          int8_t* low, int64_t stride) {
  const GroupFormat& format = job.format;
  const int32_t offset = format.bits == 8 ? kByteOffset : static_cast<int32_t>(format.offset());
  const int64_t K = job.args->K, group = format.group;
  const uint16_t* const x = job.x + (tile * job.tile_rows + r) * job.args->ldx;
  const float least = write_scales(job, x, at);
  uint8_t* has_low = job.has_low + tile * job.num_groups;
  for (int64_t k = 0; k < K; k += group, q += stride, low += stride, at += job.tile_rows) {
    const int64_t n = K - k < group ? K - k : group;
    const float scale = job.scales[at], inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const bool is_refined = scale > least;
    int32_t sum = 0, all = 0;
    if (is_refined) {
      all = round_finely(x + k, n, inverse, q, low);
      for (int64_t i = 0; i < n; ++i) sum += q[i];
      memset(low + n, 0, group - n);
      *has_low |= static_cast<uint8_t>(1 << r % 8);
    } else {
      if (inverse > 0.0f) {
        sum = round_group(x + k, n, inverse, q);
      } else {
        memset(q, 0, n);
      }
      all = sum * (1 << kLowBits);
      memset(low, 0, group);
    }
    memset(q + n, 0, group - n);
    ++has_low;
    job.starts[at] = kStartBits - offset * sum;
    job.start_products[at] = -kStart * scale;
    job.low_starts[at] = kLowStart - offset * (all - sum * (1 << kLowBits));
    if (format.has_minima) job.sums[at] = scale * kLowScale * static_cast<float>(all);
  }
}

// Quantize the existing rows of a tile, `rows`, with these strides of q and low; numbers of padding
// rows are zero. low: null unless groups are refined.
DK_INLINE void quantize_tile(const LinearJob& job, int64_t tile, int64_t rows, int8_t* q,
                             int8_t* low, int64_t row_stride, int64_t group_stride) {
  const int64_t at = tile * job.num_groups * job.tile_rows;
  if (low) memset(job.has_low + tile * job.num_groups, 0, job.num_groups);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = r * row_stride;
    if (low) {
      refine_row(job, tile, r, at + r, q + offset, low + offset, group_stride);
    } else {
      quantize_row(job, tile * job.tile_rows + r, at + r, q + offset, group_stride);
    }
  }
  for (int64_t r = rows; r < job.tile_rows; ++r) {
    for (int64_t g = 0; g < job.num_groups; ++g) {
      const int64_t place = at + g * job.tile_rows + r;
      job.scales[place] = job.start_products[place] = job.sums[place] = 0.0f;
      job.starts[place] = kStartBits;
      if (low) job.low_starts[place] = kLowStart;
    }
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
