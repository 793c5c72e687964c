// Packed linear in bf16, one level. A tile of up to kMaxRows rows and 32 columns stays in
// registers; activations are broadcast, weights are read once per tile in one stream.
//
// A sum adds its units in ascending k, with one accumulator, for any tile height and blocks over
// k: a row's bits depend neither on the other rows nor on the distribution of panels over threads.
#include <utility>

#include "activations.h"
#include "linear_epilogue.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kBlockUnits = 128; // 16 KiB of weights: a block over k stays in the L1 cache

template <int kRows>
DK_INLINE void keep_in_registers(VF (*sums)[kVectorsPerPanel]) {
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) DK_IN_REGISTER(sums[r][v]);
  }
}

// --- bf16: how a unit (2 k of 32 columns) is multiplied -----------------------------------------

#if DK_LEVEL >= 3
struct Bf16 {
  using Unit = uint32_t;  // 2 bf16
  static constexpr int kMaxRows = 12;
  template <int kRows>
  DK_INLINE static void step(VF (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const auto w0 = (__m512bh)_mm512_load_si512(weights);
    const auto w1 = (__m512bh)_mm512_load_si512(weights + 64);
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const auto a = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[r]));
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, a);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, a);
    }
  }
};
#else
struct Bf16 {
  struct Unit {
    float even, odd;
  };
  static constexpr int kMaxRows = DK_LEVEL == 2 ? 10 : DK_LEVEL == 1 ? 2 : 1;
  // Half of a unit. Two wide vectors of weights stay in registers while inputs change; with narrow
  // ones inputs stay.
  template <int kRows, class Weight, class Input>
  DK_INLINE static void add_half(VF (*sums)[kVectorsPerPanel], const char* weights, Weight weight,
                                 Input input) {
    const auto* words = reinterpret_cast<const int32_t*>(weights);
    if constexpr (kVectorsPerPanel == 2) {
      const VF w0 = weight(words), w1 = weight(words + kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        const VF a = input(r);
        sums[r][0] = fma(w0, a, sums[r][0]);
        sums[r][1] = fma(w1, a, sums[r][1]);
      }
    } else {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        const VF w = weight(words + v * kWidth);
        DK_UNROLL for (int r = 0; r < kRows; ++r) sums[r][v] = fma(w, input(r), sums[r][v]);
      }
    }
    keep_in_registers<kRows>(sums);
  }
  template <int kRows>
  DK_INLINE static void step(VF (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const auto even = [](const int32_t* w) { return as_float(shift_left(load_int(w), 16)); };
    const auto odd = [](const int32_t* w) { return as_float(upper_half(load_int(w))); };
    add_half<kRows>(sums, weights, even, [x](int r) { return set1(x[r].even); });
    add_half<kRows>(sums, weights, odd, [x](int r) { return set1(x[r].odd); });
  }
};
#endif

// --- tiles -------------------------------------------------------------------------------------

// Add num_units units (a multiple of 4) to the sums [kRows][32], which start at zero in the first
// block. kLines < 0: prefetch the stream of weights; otherwise kLines lines of `ahead` per
// 4 units.
template <int kRows, int kLines>
__attribute__((noinline)) void add_units(const Bf16::Unit* x, const char* weights,
                                         int64_t num_units, float* sums, bool begins,
                                         const char* ahead) {
  VF acc[kRows][kVectorsPerPanel];
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      acc[r][v] = begins ? zero() : load(sums + r * kPanel + v * kWidth);
    }
  }
  for (int64_t u = 0; u < num_units; u += 4) {
    if (kLines < 0) {
      DK_UNROLL for (int i = 0; i < 8; ++i) prefetch_stream(weights, i);
    } else {
      DK_UNROLL for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * 64);
      ahead += kLines * 64;
    }
    DK_UNROLL for (int i = 0; i < 4; ++i) {
      Bf16::step<kRows>(acc, weights + i * kUnitBytes, x + i * kRows);
    }
    keep_in_registers<kRows>(acc);
    x += 4 * kRows;
    weights += 4 * kUnitBytes;
  }
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      store(sums + r * kPanel + v * kWidth, acc[r][v]);
    }
  }
}

DK_INLINE void finish(const LinearJob& job, const PanelOutput& out, int64_t tile,
                      const float* sums) {
  const int64_t row = tile * job.tile_rows, left = job.num_rows - row;
  const int64_t rows = left < job.tile_rows ? left : job.tile_rows;
  finish_tile(*job.args, out, job.first_row + row, rows,
              [&](int64_t r, int v) { return load(sums + r * kPanel + v * kWidth); });
}

// One tile: a single pass over k, far prefetch.
template <int kRows>
void compute_one_tile(const LinearJob& job, int64_t panel, const char* weights, float* sums) {
  const auto* x = reinterpret_cast<const Bf16::Unit*>(job.activations);
  add_units<kRows, -1>(x, weights, job.num_units, sums, true, nullptr);
  finish(job, panel_output(*job.args, panel), 0, sums);
}

// Many tiles: blocks over k, all tiles on a block before the next. Each tile prefetches a share of
// the next block; tiles of the last block prefetch the next panel.
template <int kRows>
void compute_tiles(const LinearJob& job, int64_t panel, const char* weights, float* sums) {
  const auto* x = reinterpret_cast<const Bf16::Unit*>(job.activations);
  const int64_t num_tiles = job.num_tiles(), tile_sums = kRows * kPanel;
  const int64_t block_units = even_blocks(job.num_units, kBlockUnits, 4);
  const PanelOutput out = panel_output(*job.args, panel);
  for (int64_t u = 0; u < job.num_units; u += block_units) {
    const int64_t n = job.num_units - u < block_units ? job.num_units - u : block_units;
    const char* const block = weights + u * kUnitBytes;
    const char* ahead = block + n * kUnitBytes;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const auto* a = x + (t * job.num_units + u) * kRows;
      float* const c = sums + t * tile_sums;
      // 2 lines per unit are needed: n / 4 steps of num_tiles tiles prefetch kLines lines each.
      if (num_tiles <= 2) {
        add_units<kRows, 4>(a, block, n, c, u == 0, ahead + t * n * 64);
      } else if (num_tiles <= 4) {
        add_units<kRows, 2>(a, block, n, c, u == 0, ahead + t * n * 32);
      } else if (t < 8) {
        add_units<kRows, 1>(a, block, n, c, u == 0, ahead + t * n * 16);
      } else {
        add_units<kRows, 0>(a, block, n, c, u == 0, ahead);
      }
      // Immediately: the store overlaps with the multiplication of the next tile.
      if (u + n == job.num_units) finish(job, out, t, c);
    }
  }
}

template <int kRows>
void compute_rows(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const int64_t num_tiles = job.num_tiles();
  const int64_t panel_bytes = job.num_units * kUnitBytes;
  char* const memory = scratch(kRegionScratch, num_tiles * kRows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(memory);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const weights = static_cast<const char*>(job.args->packed) + p * panel_bytes;
    if (num_tiles == 1) {
      compute_one_tile<kRows>(job, p, weights, sums);
    } else if constexpr (kRows * 2 >= Bf16::kMaxRows) {
      compute_tiles<kRows>(job, p, weights, sums);
    }
  }
}

// --- activations -------------------------------------------------------------------------------

struct TileRows {
  int64_t first, count;  // rows of the pass that a tile contains
};
TileRows rows_of(const LinearJob& job, int64_t tile) {
  const int64_t row = tile * job.tile_rows, left = job.num_rows - row;
  return {row, left < job.tile_rows ? left : job.tile_rows};
}

void pack_rows_bf16(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t K = job.args->K, ld = job.args->ldx;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const TileRows rows = rows_of(job, t);
    const uint16_t* const x = job.x + rows.first * ld;
    auto* const out = reinterpret_cast<Bf16::Unit*>(job.activations) +
                      t * job.tile_rows * job.num_units;
#if DK_LEVEL >= 3
    transpose_words(reinterpret_cast<const char*>(x), ld * 2, K * 2, rows.count, out, job.tile_rows,
                    job.num_units);
#else
    for (int64_t r = 0; r < job.tile_rows; ++r) {
      const int64_t length = r < rows.count ? K : 0, whole = length / (2 * kWidth) * kWidth;
      const uint16_t* const row = x + r * ld;
      for (int64_t u = 0; u < whole; u += kWidth) {
        int32_t even[kWidth], odd[kWidth];
        const VI both = load_int(reinterpret_cast<const int32_t*>(row + 2 * u));
        store_int(even, shift_left(both, 16));
        store_int(odd, upper_half(both));
        DK_UNROLL for (int i = 0; i < kWidth; ++i) {
          const int32_t unit[2] = {even[i], odd[i]};
          memcpy(&out[(u + i) * job.tile_rows + r], unit, sizeof unit);
        }
      }
      for (int64_t u = whole; u < job.num_units; ++u) {
        const float even = 2 * u < length ? bf16_to_float(row[2 * u]) : 0.0f;
        const float odd = 2 * u + 1 < length ? bf16_to_float(row[2 * u + 1]) : 0.0f;
        out[u * job.tile_rows + r] = {even, odd};
      }
    }
#endif
  }
}

template <int... kSmaller>
void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel,
             std::integer_sequence<int, kSmaller...>) {
  using Compute = void (*)(const LinearJob&, int64_t, int64_t);
  static constexpr Compute by_rows[] = {compute_rows<kSmaller + 1>...};
  by_rows[job.tile_rows - 1](job, first_panel, end_panel);
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  compute(job, first_panel, end_panel, std::make_integer_sequence<int, Bf16::kMaxRows>{});
}

constexpr float kRowCost = 0.12f;

}  // namespace

const LinearKernels linear_bf16 = {
    Bf16::kMaxRows, Bf16::kMaxRows, (Bf16::kMaxRows + 1) / 2, kFewestRows, kMostRows,
    kRowCost, sizeof(Bf16::Unit), 1, pack_rows_bf16, compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
