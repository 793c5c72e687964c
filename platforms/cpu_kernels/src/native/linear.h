// The interface from linear.cpp, which distributes a packed linear over the team, to the kernels of
// a level (linear_level.cpp, linear_int4_level.cpp, pack_level.cpp), which compute some panels.
//
// Packed weights: panels of 32 columns, `num_units` units each, 128 bytes a unit.
//     bf16   [panel][unit][32 columns][2 k]                          K padded to 8
//     int8   [panel]{ [unit][32][4 k] of q + 128, 32 float scales }  K padded to 16
//     int4   [panel][group]{ [unit][32][8 k], 32 bf16 scales }       K padded to the group
// Of the 4 bytes of an int4 unit and column, low nibbles are k 0..3 and high ones k 4..7, of q + 8.
// With DK_GATE_UP columns 0..15 of a panel are gates and 16..31 the ups of the same 16 outputs.
// Packed activations: [tile of rows][unit][row], zero for padded rows and k; kernels choose the
// bytes of a unit. int8 and int4 have scales and corrections in separate arrays.
#pragma once
#include "dispatch.h"

namespace dk {

constexpr int64_t kColumns = 32;
constexpr int64_t kUnitBytes = kColumns * 4;
// Rows of a pass: its packed activations fit the L2 cache, its sums and a block of weights the L1.
// Since each pass reads all weights, it should be long enough to be compute-bound.
constexpr int64_t kFewestRows = 96, kMostRows = 240;
constexpr int64_t kKeptBytes = 768 << 10;

// One pass over the weights for `num_rows` rows.
struct LinearJob {
  const dk_linear_args* args;
  const uint16_t* x;     // first row of the pass
  int64_t first_row, num_rows, tile_rows;
  int64_t num_units;     // of weights; int4: units of 8 k
  char* activations;     // [tiles * tile_rows rows], unit_bytes a unit
  float* scales;         // int8: [row]; int4: [tile][group][row in tile]
  int32_t* corrections;  // the same shape: minus the contribution of the weights' offset

  DK_INLINE int64_t num_tiles() const { return (num_rows + tile_rows - 1) / tile_rows; }
};

struct LinearKernels {
  int64_t max_tile_rows;
  float row_cost;        // fixed cost of a tile, in rows
  int64_t unit_bytes;    // of packed activations, per unit of weights and row
  void (*pack_rows)(const LinearJob& job, int64_t first_tile, int64_t end_tile);
  void (*compute)(const LinearJob& job, int64_t first_panel, int64_t end_panel);
};

// Pack panels [first, end); returns the number of weights that are not finite.
struct PackKernels {
  int64_t (*pack)(const dk_pack_linear_args& args, int64_t first_panel, int64_t end_panel);
};

// Shape of packed weights.
struct PackedShape {
  int64_t num_panels, num_units, panel_bytes;
};
DK_INLINE PackedShape packed_shape(int64_t kind, int64_t N, int64_t K, int64_t group) {
  const int64_t multiple = kind == DK_BF16 ? 8 : kind == DK_INT8 ? 16 : group;
  const int64_t padded = (K + multiple - 1) / multiple * multiple;
  const int64_t per_unit = kind == DK_BF16 ? 2 : kind == DK_INT8 ? 4 : 8;
  const int64_t num_units = padded / per_unit;
  const int64_t scales = kind == DK_BF16 ? 0 : kind == DK_INT8 ? kColumns * 4
                                                               : padded / group * kColumns * 2;
  return {(N + kColumns - 1) / kColumns, num_units, num_units * kUnitBytes + scales};
}

// The length of blocks that split n into as few as `most` allows, as equal as multiples of `step`
// permit: each block prefetches as much of the next as its own length.
DK_INLINE int64_t even_blocks(int64_t n, int64_t most, int64_t step) {
  const int64_t num_blocks = (n + most - 1) / most;
  return ((n + num_blocks - 1) / num_blocks + step - 1) / step * step;
}

// Columns of a panel that the kernel outputs, and how many of them exist in the last panel.
DK_INLINE int64_t outputs_per_panel(int64_t flags) { return flags & DK_GATE_UP ? 16 : 32; }
DK_INLINE int64_t num_outputs(int64_t N, int64_t flags) { return flags & DK_GATE_UP ? N / 2 : N; }

}  // namespace dk

DK_DECLARE_TABLES(dk::LinearKernels, linear_bf16)
DK_DECLARE_TABLES(dk::LinearKernels, linear_int8)
DK_DECLARE_TABLES(dk::LinearKernels, linear_int4)
DK_DECLARE_TABLES(dk::PackKernels, pack_bf16)
DK_DECLARE_TABLES(dk::PackKernels, pack_int8)
DK_DECLARE_TABLES(dk::PackKernels, pack_int4)
