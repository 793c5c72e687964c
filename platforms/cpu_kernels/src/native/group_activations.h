// Activations of codes in groups: int8 with a scale per row and group, and where sums start.
#pragma once
#include "activations.h"
#include "group_codes.h"
#include "linear.h"

namespace dk::DK_LEVEL_NAMESPACE {

constexpr int32_t kStartBits = 0x4b400000;
constexpr float kStart = 12582912.0f;  // 1.5 * 2^23, with these bits

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

// Quantize the existing rows of a tile, `rows`, with these strides of q; numbers of padding rows
// are zero.
DK_INLINE void quantize_tile(const LinearJob& job, int64_t tile, int64_t rows, int8_t* q,
                             int64_t row_stride, int64_t group_stride) {
  const int64_t at = tile * job.num_groups * job.tile_rows;
  for (int64_t r = 0; r < rows; ++r) {
    quantize_row(job, tile * job.tile_rows + r, at + r, q + r * row_stride, group_stride);
  }
  for (int64_t r = rows; r < job.tile_rows; ++r) {
    for (int64_t g = 0; g < job.num_groups; ++g) {
      const int64_t place = at + g * job.tile_rows + r;
      job.scales[place] = job.start_products[place] = job.sums[place] = 0.0f;
      job.starts[place] = kStartBits;
    }
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
