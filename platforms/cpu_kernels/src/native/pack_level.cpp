// Packing of weights: row-major bf16 [N, K] into the panels of linear.h, with quantization.
//
// Rounds to nearest even. int8: symmetric, scale = max |w| / 127 per output column. int4: a bf16
// scale of either sign per column and group, by least squares. Levels give the same bytes: every
// step is a single rounded operation. Plain loops that compilers vectorize, because packing
// happens once.
#include "activations.h"
#include "linear.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

// The weight row in column n of a panel, or null for padding.
DK_INLINE const uint16_t* column_row(const dk_pack_linear_args& args, int64_t panel, int64_t n) {
  const auto* const weight = static_cast<const uint16_t*>(args.weight);
  if (!(args.flags & DK_GATE_UP)) {
    const int64_t row = panel * kColumns + n;
    return row < args.N ? weight + row * args.ld : nullptr;
  }
  const int64_t half = args.N / 2, row = panel * 16 + (n & 15);
  if (row >= half) return nullptr;
  return weight + (n < 16 ? row : half + row) * args.ld;
}

DK_INLINE int64_t count_nonfinite(const uint16_t* row, int64_t K) {
  int32_t found = 0;
  for (int64_t k = 0; k < K; ++k) found += (row[k] & 0x7f80) == 0x7f80;
  return found;
}

// Transpose 32 rows of num_words words each into out[word][32].
void transpose_panel(const uint32_t* const* rows, int64_t num_words, uint32_t* out) {
  constexpr int64_t kBlock = 16;
  for (int64_t w = 0; w < num_words; w += kBlock) {
    const int64_t n = num_words - w < kBlock ? num_words - w : kBlock;
#if DK_LEVEL >= 2
    const __mmask16 kept = first(n);
    for (int64_t half = 0; half < 2; ++half) {
      __m512i r[16];
      DK_UNROLL for (int i = 0; i < 16; ++i) {
        r[i] = _mm512_maskz_loadu_epi32(kept, rows[half * 16 + i] + w);
      }
      transpose_16(r);
      DK_UNROLL for (int i = 0; i < 16; ++i) {
        if (i < n) _mm512_storeu_si512(out + (w + i) * kColumns + half * 16, r[i]);
      }
    }
#else
    for (int64_t column = 0; column < kColumns; ++column) {
      for (int64_t i = 0; i < n; ++i) out[(w + i) * kColumns + column] = rows[column][w + i];
    }
#endif
  }
}

// Rows of a panel as words, copied and padded with zeros into scratch of `row_bytes` a column.
struct PanelRows {
  char* bytes;
  int64_t row_bytes;
  const uint32_t* words[kColumns];

  explicit PanelRows(int64_t row_bytes_) : row_bytes(row_bytes_) {
    bytes = scratch(kRegionScratch, row_bytes * kColumns);
    for (int64_t n = 0; n < kColumns; ++n) {
      words[n] = reinterpret_cast<const uint32_t*>(bytes + n * row_bytes);
    }
  }
  char* row(int64_t n) { return bytes + n * row_bytes; }
};

int64_t pack_bf16_panels(const dk_pack_linear_args& args, int64_t first_panel, int64_t end_panel) {
  const PackedShape shape = packed_shape(DK_BF16, args.N, args.K, 0);
  PanelRows rows(shape.num_units * 4);
  int64_t nonfinite = 0;
  for (int64_t p = first_panel; p < end_panel; ++p) {
    for (int64_t n = 0; n < kColumns; ++n) {
      const uint16_t* const row = column_row(args, p, n);
      const int64_t filled = row ? args.K * 2 : 0;
      if (row) memcpy(rows.row(n), row, filled);
      memset(rows.row(n) + filled, 0, rows.row_bytes - filled);
      if (row) nonfinite += count_nonfinite(row, args.K);
    }
    char* const out = static_cast<char*>(args.packed) + p * shape.panel_bytes;
    transpose_panel(rows.words, shape.num_units, reinterpret_cast<uint32_t*>(out));
  }
  return nonfinite;
}

int64_t pack_int8_panels(const dk_pack_linear_args& args, int64_t first_panel, int64_t end_panel) {
  const PackedShape shape = packed_shape(DK_INT8, args.N, args.K, 0);
  PanelRows rows(shape.num_units * 4);
  int64_t nonfinite = 0;
  for (int64_t p = first_panel; p < end_panel; ++p) {
    char* const out = static_cast<char*>(args.packed) + p * shape.panel_bytes;
    auto* const scales = reinterpret_cast<float*>(out + shape.num_units * kUnitBytes);
    for (int64_t n = 0; n < kColumns; ++n) {
      const uint16_t* const row = column_row(args, p, n);
      auto* const q = reinterpret_cast<int8_t*>(rows.row(n));
      memset(q, 0, rows.row_bytes);
      int32_t sum;
      scales[n] = row ? quantise_group(row, args.K, q, &sum) : 0.0f;
      if (row) nonfinite += count_nonfinite(row, args.K);
      for (int64_t k = 0; k < rows.row_bytes; ++k) q[k] = static_cast<int8_t>(q[k] ^ -128);
    }
    transpose_panel(rows.words, shape.num_units, reinterpret_cast<uint32_t*>(out));
  }
  return nonfinite;
}

// Candidates for the scaled value of a group's greatest magnitude. Its sign is the scale's, so that
// all of -8..7 is used; beyond -8 it is clipped and the other weights get a finer resolution.
constexpr float kGreatest[] = {-7.5f, -8.0f, -8.6f};
constexpr float kSteps = 2048.0f;
constexpr int64_t kMaxGroup = 128;

// Quantize a group of n weights to q + 8 in 0..15; returns the bits of its bf16 scale.
//
// Of three roundings the one with the least squared error is used, each with its best scale:
// sum(w q) / sum(q q). The weights are whole 2,048ths of the greatest one, so that sums are exact
// in any order.
uint16_t quantise_int4(const uint16_t* w, int64_t n, uint8_t* q) {
  const uint32_t largest = largest_of(w, n);
  int64_t place = 0;
  while (place < n - 1 && (w[place] & 0x7fffu) != largest) ++place;
  const float greatest = bf16_to_float(w[place]);
  if (largest >= 0x7f80 || bf16_to_float(static_cast<uint16_t>(largest)) < 1e-29f) {
    memset(q, 8, n);
    return largest >= 0x7f80 ? static_cast<uint16_t>(largest) : 0;
  }
  int16_t steps[kMaxGroup];
  const float inverse = kSteps / greatest;
  for (int64_t k = 0; k < n; ++k) {
    steps[k] = static_cast<int16_t>(nearest(bf16_to_float(w[k]) * inverse));
  }
  double best = -1.0, scale = 0.0;
  for (const float target : kGreatest) {
    uint8_t rounded[kMaxGroup];
    int32_t sum_wq = 0, sum_qq = 0;
    for (int64_t k = 0; k < n; ++k) {
      int32_t value = nearest(static_cast<float>(steps[k]) * (target / kSteps));
      value = value < -8 ? -8 : value > 7 ? 7 : value;
      sum_wq += steps[k] * value;
      sum_qq += value * value;
      rounded[k] = static_cast<uint8_t>(value + 8);
    }
    const double gain = static_cast<double>(sum_wq) * sum_wq / sum_qq;
    if (gain > best) {
      best = gain;
      scale = static_cast<double>(sum_wq) / sum_qq;
      memcpy(q, rounded, n);
    }
  }
  return float_to_bf16(static_cast<float>(scale * (static_cast<double>(greatest) / kSteps)));
}

int64_t pack_int4_panels(const dk_pack_linear_args& args, int64_t first_panel, int64_t end_panel) {
  const PackedShape shape = packed_shape(DK_INT4, args.N, args.K, args.group);
  const int64_t group = args.group, num_groups = shape.num_units * 8 / group;
  const int64_t group_units = group / 8, group_bytes = group_units * kUnitBytes + kColumns * 2;
  PanelRows rows(shape.num_units * 4);
  auto* const q = reinterpret_cast<uint8_t*>(scratch(kOtherScratch, group));
  int64_t nonfinite = 0;
  for (int64_t p = first_panel; p < end_panel; ++p) {
    char* const out = static_cast<char*>(args.packed) + p * shape.panel_bytes;
    for (int64_t n = 0; n < kColumns; ++n) {
      const uint16_t* const row = column_row(args, p, n);
      if (row) nonfinite += count_nonfinite(row, args.K);
      for (int64_t g = 0; g < num_groups; ++g) {
        const int64_t left = row ? args.K - g * group : 0, filled = left < group ? left : group;
        const uint16_t scale = row ? quantise_int4(row + g * group, filled, q) : 0;
        memset(q + filled, 8, group - filled);
        auto* const scales =
            reinterpret_cast<uint16_t*>(out + g * group_bytes + group_units * kUnitBytes);
        scales[n] = scale;
        auto* const nibbles = reinterpret_cast<uint8_t*>(rows.row(n)) + g * group / 2;
        for (int64_t u = 0; u < group_units; ++u) {
          for (int64_t b = 0; b < 4; ++b) {
            nibbles[u * 4 + b] = static_cast<uint8_t>(q[u * 8 + b] | q[u * 8 + 4 + b] << 4);
          }
        }
      }
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint32_t* words[kColumns];
      for (int64_t n = 0; n < kColumns; ++n) words[n] = rows.words[n] + g * group_units;
      transpose_panel(words, group_units, reinterpret_cast<uint32_t*>(out + g * group_bytes));
    }
  }
  return nonfinite;
}

}  // namespace

const PackKernels pack_bf16 = {pack_bf16_panels};
const PackKernels pack_int8 = {pack_int8_panels};
const PackKernels pack_int4 = {pack_int4_panels};

}  // namespace dk::DK_LEVEL_NAMESPACE
