// Packed linear in bf16 with matrix tiles, which multiply 16 rows by 16 columns and 32 k at once.
//
// A sum adds its steps of 32 k in ascending order, for any number of rows and blocks over k: a
// row's bits depend neither on the other rows nor on the distribution of panels over threads.
#include "activations.h"
#include "linear_epilogue.h"
#include "team.h"
#include "tiles.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kStepUnits = 16;                        // units of 2 k in a step
constexpr int64_t kStepBytes = kStepUnits * kUnitBytes;   // of weights
constexpr int64_t kBlockSteps = 32;     // a block over k: 64 KiB of weights stay in the L1 cache
constexpr int64_t kStreamAhead = 8192;  // bytes of weights prefetched ahead in one pass over k

// --- tiles of 32 columns, of one or two heights --------------------------------------------------

struct Block {
  const char* weights;
  int64_t num_steps;
  bool begins;
  const char* ahead;    // what is prefetched, `ahead_lines` lines a step
  int64_t ahead_lines;
};

// Some rows: packed inputs from the block's first step, and sums [rows][32].
struct Rows {
  const char* inputs;
  float* sums;
};

#define DK_LOAD_SUMS(left, right, from)                                  \
  if (block.begins) {                                                    \
    _tile_zero(left);                                                    \
    _tile_zero(right);                                                   \
  } else {                                                               \
    _tile_loadd(left, (from).sums, kPanel * 4);                          \
    _tile_loadd(right, (from).sums + kTileColumns, kPanel * 4);          \
  }
#define DK_STORE_SUMS(left, right, to)                                   \
  _tile_stored(left, (to).sums, kPanel * 4);                             \
  _tile_stored(right, (to).sums + kTileColumns, kPanel * 4)

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
  DK_STORE_SUMS(0, 1, a);
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
  DK_STORE_SUMS(0, 1, a);
  DK_STORE_SUMS(2, 3, b);
}

#undef DK_LOAD_SUMS
#undef DK_STORE_SUMS

// --- panels -------------------------------------------------------------------------------------

struct Panel {
  const LinearJob& job;
  const char* weights;
  float* sums;
  PanelOutput out;

  int64_t num_steps() const { return (job.num_units + kStepUnits - 1) / kStepUnits; }
  int64_t input_bytes() const { return job.tile_rows * kTileRowBytes; }
  Rows rows(int64_t tile, int64_t step) const {
    const char* const inputs = job.activations + (tile * num_steps() + step) * input_bytes();
    return {inputs, sums + tile * job.tile_rows * kPanel};
  }
};

// Add a block to all rows. The first tiles prefetch the next block.
void add_block(const Panel& panel, Block block, int64_t step) {
  const int64_t num_tiles = panel.job.num_tiles(), num_pairs = (num_tiles + 1) / 2;
  block.ahead_lines = num_pairs == 1 ? 32 : (32 + num_pairs - 1) / num_pairs;
  block.ahead = block.weights + (num_pairs == 1 ? kStreamAhead : block.num_steps * kStepBytes);
  for (int64_t t = 0; t < num_tiles; t += 2) {
    if (t + 1 < num_tiles) {
      add_two(block, panel.rows(t, step), panel.rows(t + 1, step), panel.input_bytes());
    } else {
      add_one(block, panel.rows(t, step), panel.input_bytes());
    }
    block.ahead += block.num_steps * block.ahead_lines * 64;
  }
}

void compute_panel(const Panel& panel, char* rest) {
  const LinearJob& job = panel.job;
  const int64_t whole_steps = job.num_units / kStepUnits, num_tiles = job.num_tiles();
  const int64_t most = num_tiles <= 2 ? whole_steps : even_blocks(whole_steps, kBlockSteps, 1);
  for (int64_t s = 0; s < whole_steps; s += most) {
    const int64_t n = whole_steps - s < most ? whole_steps - s : most;
    add_block(panel, {panel.weights + s * kStepBytes, n, s == 0, nullptr, 0}, s);
  }
  if (const int64_t units = job.num_units - whole_steps * kStepUnits) {
    memcpy(rest, panel.weights + whole_steps * kStepBytes, units * kUnitBytes);
    memset(rest + units * kUnitBytes, 0, kStepBytes - units * kUnitBytes);
    Tiles::publish();
    add_block(panel, {rest, 1, whole_steps == 0, nullptr, 0}, whole_steps);
  }
  for (int64_t t = 0; t < num_tiles; ++t) {
    const int64_t row = t * job.tile_rows, left = job.num_rows - row;
    const float* const sums = panel.sums + row * kPanel;
    finish_tile(*job.args, panel.out, job.first_row + row,
                left < job.tile_rows ? left : job.tile_rows,
                [&](int64_t r, int v) { return load(sums + r * kPanel + v * kWidth); });
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
    compute_panel({job, weights, sums, panel_output(*job.args, p)}, rest);
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
