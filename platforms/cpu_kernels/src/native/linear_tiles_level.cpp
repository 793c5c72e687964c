// Packed linear in bf16 with matrix tiles, which multiply 16 rows by 16 columns and 32 k at once.
//
// A sum adds its steps of 32 k in ascending order, for any number of rows and blocks over k: a
// row's bits depend neither on the other rows nor on the distribution of panels over threads.
#include "linear_epilogue.h"
#include "team.h"
#include "tiles.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kStepUnits = 16;                        // units of 2 k in a step
constexpr int64_t kStepBytes = kStepUnits * kUnitBytes;   // of weights
constexpr int64_t kBlockSteps = 8;      // of many tiles: 16 KiB of weights stay in the L1 cache
constexpr int64_t kStreamAhead = 8192;  // bytes of weights prefetched ahead in one pass over k
constexpr int64_t kPairTiles = 2;       // tiles of rows that are multiplied at the same time

// --- tiles of 32 columns, of one or two heights --------------------------------------------------

// Where the sums of tiles are before or after a block.
enum SumsAt { kZero, kMemory, kRegisters };

struct Block {
  const char* weights;
  int64_t num_steps;
  SumsAt before, after;
  const char* ahead;    // what is prefetched, `ahead_lines` lines a step
  int64_t ahead_lines;
};

// Some rows: packed inputs from the block's first step, and sums [rows][32].
struct Rows {
  const char* inputs;
  float* sums;
};

#define DK_LOAD_SUMS(left, right, from)                                  \
  if (block.before == kZero) {                                           \
    _tile_zero(left);                                                    \
    _tile_zero(right);                                                   \
  } else if (block.before == kMemory) {                                  \
    _tile_loadd(left, (from).sums, kPanel * 4);                          \
    _tile_loadd(right, (from).sums + kTileColumns, kPanel * 4);          \
  }
#define DK_STORE_SUMS(left, right, to)                                   \
  if (block.after == kMemory) {                                          \
    _tile_stored(left, (to).sums, kPanel * 4);                           \
    _tile_stored(right, (to).sums + kTileColumns, kPanel * 4);           \
  }

DK_INLINE void prefetch_lines(const char* from, int64_t num_lines) {
  for (int64_t i = 0; i < num_lines; ++i) __builtin_prefetch(from + i * 64);
}

// input_bytes: of a tile of inputs.
__attribute__((noinline)) void add_one(const Block& block, const Rows& a, int64_t input_bytes) {
  DK_LOAD_SUMS(0, 1, a)
  for (int64_t s = 0; s < block.num_steps; ++s) {
    const char* const weights = block.weights + s * kStepBytes;
    prefetch_lines(block.ahead + s * block.ahead_lines * 64, block.ahead_lines);
    _tile_loadd(4, a.inputs + s * input_bytes, kTileRowBytes);
    _tile_loadd(6, weights, kUnitBytes);
    _tile_loadd(7, weights + kTileRowBytes, kUnitBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  DK_STORE_SUMS(0, 1, a)
}

__attribute__((noinline)) void add_two(const Block& block, const Rows& a, const Rows& b,
                                       int64_t input_bytes) {
  DK_LOAD_SUMS(0, 1, a)
  DK_LOAD_SUMS(2, 3, b)
  for (int64_t s = 0; s < block.num_steps; ++s) {
    const char* const weights = block.weights + s * kStepBytes;
    prefetch_lines(block.ahead + s * block.ahead_lines * 64, block.ahead_lines);
    _tile_loadd(4, a.inputs + s * input_bytes, kTileRowBytes);
    _tile_loadd(6, weights, kUnitBytes);
    _tile_loadd(7, weights + kTileRowBytes, kUnitBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, b.inputs + s * input_bytes, kTileRowBytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  DK_STORE_SUMS(0, 1, a)
  DK_STORE_SUMS(2, 3, b)
}

#undef DK_LOAD_SUMS
#undef DK_STORE_SUMS

// --- panels -------------------------------------------------------------------------------------

struct Panel {
  const LinearJob& job;
  const char* weights;
  float* sums;
  char* rest;  // for the last step, if k is not a multiple of it
  PanelOutput out;

  int64_t num_steps() const { return (job.num_units + kStepUnits - 1) / kStepUnits; }
  int64_t num_whole_steps() const { return job.num_units / kStepUnits; }
  int64_t input_bytes() const { return job.tile_rows * kTileRowBytes; }
  Rows rows(int64_t tile, int64_t step) const {
    const char* const inputs = job.activations + (tile * num_steps() + step) * input_bytes();
    return {inputs, sums + tile * job.tile_rows * kPanel};
  }
  // How many rows there are from a tile on, at most those of two tiles.
  int64_t rows_of_pair(int64_t tile) const {
    const int64_t left = job.num_rows - tile * job.tile_rows, most = kPairTiles * job.tile_rows;
    return left < most ? left : most;
  }
};

// The weights from a step on, all whole steps or the last one padded with zeros.
DK_INLINE const char* weights_from(const Panel& panel, int64_t step) {
  const char* const weights = panel.weights + step * kStepBytes;
  if (step < panel.num_whole_steps()) return weights;
  const int64_t filled = (panel.job.num_units - step * kStepUnits) * kUnitBytes;
  memcpy(panel.rest, weights, filled);
  memset(panel.rest + filled, 0, kStepBytes - filled);
  Tiles::publish();
  return panel.rest;
}

// How many steps a block from `step` has: at most `most`, or the last one alone if it is padded.
DK_INLINE int64_t block_steps(const Panel& panel, int64_t step, int64_t most) {
  const int64_t left = panel.num_whole_steps() - step;
  return left <= 0 ? 1 : left < most ? left : most;
}

DK_INLINE void add_pair(const Panel& panel, const Block& block, int64_t tile, int64_t step) {
  if (tile + 1 < panel.job.num_tiles()) {
    add_two(block, panel.rows(tile, step), panel.rows(tile + 1, step), panel.input_bytes());
  } else {
    add_one(block, panel.rows(tile, step), panel.input_bytes());
  }
}

void finish_pair(const Panel& panel, int64_t tile) {
  const LinearJob& job = panel.job;
  const float* const sums = panel.sums + tile * job.tile_rows * kPanel;
  finish_tile(*job.args, panel.out, job.first_row + tile * job.tile_rows, panel.rows_of_pair(tile),
              [&](int64_t r, int v) { return load(sums + r * kPanel + v * kWidth); });
}

// One or two tiles: their sums stay in registers, and the weights are a stream.
void compute_stream(const Panel& panel) {
  const int64_t num_steps = panel.num_steps();
  for (int64_t s = 0, n; s < num_steps; s += n) {
    n = block_steps(panel, s, num_steps);
    const char* const weights = weights_from(panel, s);
    add_pair(panel, {weights, n, s ? kRegisters : kZero, s + n < num_steps ? kRegisters : kMemory,
                     weights + kStreamAhead, kStepBytes / 64}, 0, s);
  }
  finish_pair(panel, 0);
}

// Many tiles: blocks over k, all tiles on a block before the next. Together the tiles prefetch the
// next block.
void compute_blocks(const Panel& panel) {
  const int64_t num_tiles = panel.job.num_tiles(), num_steps = panel.num_steps();
  const int64_t num_pairs = (num_tiles + kPairTiles - 1) / kPairTiles;
  const int64_t most = even_blocks(panel.num_whole_steps(), kBlockSteps, 1);
  for (int64_t s = 0, n; s < num_steps; s += n) {
    n = block_steps(panel, s, most);
    const bool last = s + n == num_steps;
    Block block{weights_from(panel, s), n, s ? kMemory : kZero, kMemory,
                panel.weights + (s + n) * kStepBytes, (32 + num_pairs - 1) / num_pairs};
    for (int64_t tile = 0; tile < num_tiles; tile += kPairTiles) {
      if (last) {
        prefetch_outputs(*panel.job.args, panel.out,
                         panel.job.first_row + tile * panel.job.tile_rows,
                         panel.rows_of_pair(tile));
      }
      add_pair(panel, block, tile, s);
      block.ahead += n * block.ahead_lines * 64;
      if (last) finish_pair(panel, tile);
    }
  }
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  char* const rest = scratch(kRegionScratch,
                             kStepBytes + job.num_tiles() * job.tile_rows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(rest + kStepBytes);
  const Tiles tiles(job.tile_rows, kTileRowBytes);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const auto* const packed = static_cast<const char*>(job.args->packed);
    const char* const weights = packed + p * job.num_units * kUnitBytes;
    const Panel panel{job, weights, sums, rest, panel_output(*job.args, p)};
    if (job.num_tiles() <= kPairTiles) {
      compute_stream(panel);
    } else {
      compute_blocks(panel);
    }
  }
}

// --- activations: [tile][step][row][32 k], zero for padded rows and k ----------------------------

void pack_rows(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t num_steps = (job.num_units + kStepUnits - 1) / kStepUnits, rows = job.tile_rows;
  const int64_t row_bytes = job.args->K * 2;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    char* const tile = job.activations + t * num_steps * rows * kTileRowBytes;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = t * rows + r;
      const auto* const x = reinterpret_cast<const char*>(job.x + row * job.args->ldx);
      const int64_t filled = row < job.num_rows ? row_bytes : 0;
      for (int64_t s = 0; s < num_steps; ++s) {
        const int64_t left = filled - s * kTileRowBytes;
        const __mmask64 bytes = left <= 0 ? 0 : left < 64 ? (1ull << left) - 1 : ~0ull;
        _mm512_store_si512(tile + (s * rows + r) * kTileRowBytes,
                           _mm512_maskz_loadu_epi8(bytes, x + s * kTileRowBytes));
      }
    }
  }
}

constexpr float kRowCost = 8.0f;
constexpr int64_t kFewestTileRows = 256, kMostTileRows = 512;

}  // namespace

const LinearKernels linear_bf16 = {
    kTileRows, kTileRows, kTileRows / 2 + 1, kFewestTileRows, kMostTileRows, kRowCost,
    4, kStepUnits, pack_rows, compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
