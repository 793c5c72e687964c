// The interface from linear.cpp, which distributes a packed linear over the team, to the kernels of
// a level, which compute some panels: linear_level.cpp, linear_groups_level.cpp,
// wide_groups_level.cpp, those with matrix tiles, and pack_level.cpp.
//
// Packed weights: panels of 32 columns.
//     bf16     [panel][unit][32 columns][2 k]             K padded to 8
//     groups   [panel][group]{ codes, scales, minima }
//     groups with scales of two levels
//              [panel][256 k]{ scales, minima, [group]{ scales, minima }, [group]{ codes } }
// Codes of 8 bits are [unit of 4 k][32][4 k] of q + 128. Codes of 4 bits are [8 k][32][4 bytes];
// low nibbles are k 0..3 and high ones k 4..7, of q + 8, or of q if there are minima. Codes of 6
// bits are q + 32 in groups of 16, [3][32][4 bytes]: byte b of word w has k 4 w + b in its lower
// bits, and above them two bits of k 12 + b, of which word 0 has the lowest. Scales and minima are
// [32] numbers of 16 bits; those of a group on the lower level [32] int8.
// With DK_GATE_UP columns 0..15 of a panel are gates and 16..31 the ups of the same 16 outputs.
// Packed activations: [tile of rows][unit][row], zero for padded rows and k; kernels choose the
// bytes of a unit. Groups have a scale and other numbers in separate arrays. With DK_REFINE or
// DK_REFINE_MOST, groups with a large scale have low parts: [row][k] or as the kernels choose.
#pragma once
#include "dispatch.h"

namespace dk {

constexpr int64_t kColumns = 32;
constexpr int64_t kUnitBytes = kColumns * 4;
// Rows of a pass: its packed activations fit the L2 cache, its sums and a block of weights the L1.
// Since each pass reads all weights, it should be long enough to be compute-bound.
constexpr int64_t kFewestRows = 96, kMostRows = 240;
constexpr int64_t kKeptBytes = 768 << 10;
constexpr int64_t kSuperK = 256;  // k of a scale of the upper level

enum ScaleKind { kBf16Scales, kHalfScales, kTwoLevelScales };

// A format with groups.
struct GroupFormat {
  int64_t bits;   // of a code: 4, 6 or 8
  int64_t group;  // number of k
  ScaleKind scales;
  bool has_minima;

  DK_INLINE bool two_levels() const { return scales == kTwoLevelScales; }
  // What is added to a code to store it unsigned.
  DK_INLINE int64_t offset() const { return has_minima && bits == 4 ? 0 : 1 << (bits - 1); }
  DK_INLINE int64_t code_bytes() const { return group * bits / 8 * kColumns; }
  // Of the scales and minima of a group; of one level, of 256 k.
  DK_INLINE int64_t scale_bytes() const {
    return kColumns * (two_levels() ? 1 : 2) * (has_minima ? 2 : 1);
  }
  DK_INLINE int64_t upper_bytes() const { return kColumns * 2 * (has_minima ? 2 : 1); }
  DK_INLINE int64_t group_stride() const {
    return code_bytes() + (two_levels() ? 0 : scale_bytes());
  }
  // Of what precedes the codes of 256 k: their scales and minima of two levels.
  DK_INLINE int64_t header_bytes() const {
    return two_levels() ? upper_bytes() + kSuperK / group * scale_bytes() : 0;
  }
  DK_INLINE int64_t super_bytes() const {
    return header_bytes() + kSuperK / group * group_stride();
  }
  // Where a group's codes begin in a panel.
  DK_INLINE int64_t codes_at(int64_t index) const {
    const int64_t num_headers = index * group / kSuperK + 1;
    return index * group_stride() + num_headers * header_bytes();
  }
  // From a group's codes to those of the n-th group after it.
  DK_INLINE int64_t bytes_of(int64_t index, int64_t n) const {
    return codes_at(index + n) - codes_at(index);
  }
  // K is a multiple of the group; with scales of two levels, of 256.
  DK_INLINE int64_t panel_bytes(int64_t K) const {
    return K / group * group_stride() + K / kSuperK * header_bytes();
  }
};

DK_INLINE GroupFormat group_format(int64_t kind, int64_t group) {
  switch (kind) {
    case DK_INT8: return {8, 32, kBf16Scales, false};
    case DK_INT4: return {4, group, kBf16Scales, false};
    case DK_Q4_0: return {4, 32, kHalfScales, false};
    case DK_Q4_1: return {4, 32, kHalfScales, true};
    case DK_Q5_1: return {8, 32, kHalfScales, true};
    case DK_Q4_K: return {4, 32, kTwoLevelScales, true};
    case DK_Q5_K: return {8, 32, kTwoLevelScales, true};
    case DK_Q6_K: return {6, 16, kTwoLevelScales, false};
    default: return {8, 32, kHalfScales, false};  // Q5_0, Q8_0
  }
}

// One pass over the weights for `num_rows` rows.
struct LinearJob {
  const dk_linear_args* args;
  const uint16_t* x;     // first row of the pass
  int64_t first_row, num_rows, tile_rows;
  int64_t num_units;     // of activations: 2 k (bf16) or 4 k
  GroupFormat format;    // all that follow: groups
  int64_t num_groups;
  char* activations;     // [tiles * tile_rows rows], unit_bytes a unit
  float* scales;         // [tile][group][row in tile]
  // The same shape: where the integer sum of a group starts (linear_groups_level.cpp), what that
  // contributes times the scale, negative, and the sum of the activations as rounded, for minima.
  int32_t* starts;
  float *start_products, *sums;
  // Only if groups are refined: low parts, what the integer sum of a group gets before them, and
  // for each [tile][group] the bits r % 8 of the rows r of the tile that have low parts.
  char* low;
  int32_t* low_starts;
  uint8_t* has_low;
  float refined_from;    // a row's groups have low parts above this share of its mean scale; or 0

  DK_INLINE int64_t num_tiles() const { return (num_rows + tile_rows - 1) / tile_rows; }
};

struct LinearKernels {
  int64_t max_tile_rows;
  int64_t few_rows;        // up to so many rows are one tile of this height;
  int64_t min_tile_rows;   // tiles of more rows have at least this height
  int64_t fewest_rows, most_rows;  // of a pass; between them as many as fit in kKeptBytes
  float row_cost;          // fixed cost of a tile, in rows
  int64_t unit_bytes;      // of packed activations, per unit and row
  int64_t unit_multiple;   // to which packed activations are padded
  void (*pack_rows)(const LinearJob& job, int64_t first_tile, int64_t end_tile);
  void (*compute)(const LinearJob& job, int64_t first_panel, int64_t end_panel);
};

// Pack panels [first, end); returns the number of weights that are not finite.
struct PackKernels {
  int64_t (*pack)(const dk_pack_linear_args& args, int64_t kind, int64_t first_panel,
                  int64_t end_panel);
};

// Shape of packed weights; `units` as in LinearJob.
struct PackedShape {
  int64_t num_panels, num_units, panel_bytes;
};
DK_INLINE PackedShape packed_shape(int64_t kind, int64_t N, int64_t K, int64_t group) {
  const int64_t num_panels = (N + kColumns - 1) / kColumns;
  if (kind == DK_BF16) {
    const int64_t num_units = (K + 7) / 8 * 4;
    return {num_panels, num_units, num_units * kUnitBytes};
  }
  const GroupFormat format = group_format(kind, group);
  const int64_t padded = (K + format.group - 1) / format.group * format.group;
  return {num_panels, padded / 4, format.panel_bytes(padded)};
}

// The length of blocks that split n into as few as `most` allows, as equal as multiples of `step`
// permit: each block prefetches as much of the next as its own length.
DK_INLINE int64_t even_blocks(int64_t n, int64_t most, int64_t step) {
  if (n == 0) return step;
  const int64_t num_blocks = (n + most - 1) / most;
  return ((n + num_blocks - 1) / num_blocks + step - 1) / step * step;
}

// Columns of a panel that the kernel outputs, and how many of them exist in the last panel.
DK_INLINE int64_t outputs_per_panel(int64_t flags) { return flags & DK_GATE_UP ? 16 : 32; }
DK_INLINE int64_t num_outputs(int64_t N, int64_t flags) { return flags & DK_GATE_UP ? N / 2 : N; }

}  // namespace dk

DK_DECLARE_TABLES(dk::LinearKernels, linear_bf16)
DK_DECLARE_TABLES(dk::LinearKernels, linear_groups)
DK_DECLARE_TABLES(dk::LinearKernels, group_tiles)  // for many rows, at some levels
DK_DECLARE_TABLES(dk::LinearKernels, wide_groups)  // for codes of 6 or 8 bits, at some levels
DK_DECLARE_TABLES(dk::PackKernels, pack_bf16)
DK_DECLARE_TABLES(dk::PackKernels, pack_groups)
