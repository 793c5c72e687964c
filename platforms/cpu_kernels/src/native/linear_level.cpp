// Packed linear in bf16 and int8, one level. A tile of up to kMaxRows rows and 32 columns stays in
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

constexpr int kStreamAhead = 8192;   // bytes of weights prefetched ahead in one pass over k
constexpr int64_t kBlockUnits = 128; // 16 KiB of weights: a block over k stays in the L1 cache

template <int kRows, class Vector>
DK_INLINE void keep_in_registers(Vector (*sums)[kVectorsPerPanel]) {
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) DK_IN_REGISTER(sums[r][v]);
  }
}

// Half of a unit, if one instruction cannot process all of it: sums += weight(words) * input(row).
// Two wide vectors of weights stay in registers while inputs change; with narrow ones inputs stay.
template <int kRows, class Vector, class Weight, class Input, class Multiply>
DK_INLINE void add_half(Vector (*sums)[kVectorsPerPanel], const char* weights, Weight weight,
                        Input input, Multiply multiply) {
  const auto* words = reinterpret_cast<const int32_t*>(weights);
  if constexpr (kVectorsPerPanel == 2) {
    const Vector w0 = weight(words), w1 = weight(words + kWidth);
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vector a = input(r);
      sums[r][0] = multiply(w0, a, sums[r][0]);
      sums[r][1] = multiply(w1, a, sums[r][1]);
    }
  } else {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const Vector w = weight(words + v * kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) sums[r][v] = multiply(w, input(r), sums[r][v]);
    }
  }
  keep_in_registers<kRows>(sums);
}

// --- bf16: how a unit (2 k of 32 columns) is multiplied -----------------------------------------

#if DK_LEVEL >= 3
struct Bf16 {
  static constexpr bool kScaled = false;
  using Accumulator = VF;
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
  static constexpr bool kScaled = false;
  using Accumulator = VF;
  struct Unit {
    float even, odd;
  };
  static constexpr int kMaxRows = DK_LEVEL == 2 ? 10 : DK_LEVEL == 1 ? 2 : 1;
  template <int kRows>
  DK_INLINE static void step(VF (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const auto even = [](const int32_t* w) { return as_float(shift_left(load_int(w), 16)); };
    const auto odd = [](const int32_t* w) { return as_float(upper_half(load_int(w))); };
    const auto multiply = [](VF w, VF a, VF sum) { return fma(w, a, sum); };
    add_half<kRows>(sums, weights, even, [x](int r) { return set1(x[r].even); }, multiply);
    add_half<kRows>(sums, weights, odd, [x](int r) { return set1(x[r].odd); }, multiply);
  }
};
#endif

// --- int8: a unit is 4 k of 32 columns; weights are q + 128, unsigned ---------------------------

#if DK_LEVEL >= 3
struct Int8 {
  static constexpr bool kScaled = true;
  using Accumulator = VI;
  using Unit = uint32_t;  // 4 int8
  static constexpr int kMaxRows = 12;
  template <int kRows>
  DK_INLINE static void step(VI (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const VI w0 = _mm512_load_si512(weights), w1 = _mm512_load_si512(weights + 64);
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = _mm512_set1_epi32(static_cast<int>(x[r]));
      sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], w0, a);
      sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], w1, a);
    }
  }
};
#elif DK_LEVEL >= 1
// Without VNNI the bytes are widened to 16 bits: the byte instruction would saturate.
struct Int8 {
  static constexpr bool kScaled = true;
  using Accumulator = VI;
  struct Unit {
    int32_t even, odd;  // k 0 and 2, k 1 and 3, as 16 bit halves
  };
  static constexpr int kMaxRows = DK_LEVEL == 2 ? 10 : 2;
  template <int kRows>
  DK_INLINE static void step(VI (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const auto even = [](const int32_t* w) { return even_bytes(load_int(w)); };
    const auto odd = [](const int32_t* w) { return odd_bytes(load_int(w)); };
    const auto multiply = [](VI w, VI a, VI sum) { return add_int(sum, multiply_pairs(w, a)); };
    add_half<kRows>(sums, weights, even, [x](int r) { return set1_int(x[r].even); }, multiply);
    add_half<kRows>(sums, weights, odd, [x](int r) { return set1_int(x[r].odd); }, multiply);
  }
};
#else
struct Int8 {
  static constexpr bool kScaled = true;
  using Accumulator = VI;
  using Unit = uint32_t;
  static constexpr int kMaxRows = 1;
  template <int kRows>
  DK_INLINE static void step(VI (*sums)[kVectorsPerPanel], const char* weights, const Unit* x) {
    const auto* w = reinterpret_cast<const uint8_t*>(weights);
    for (int k = 0; k < 4; ++k) {
      const int32_t a = static_cast<int8_t>(x[0] >> (8 * k));
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        const uint8_t* column = w + v * kWidth * 4 + k;
        sums[0][v] += VI{column[0], column[4], column[8], column[12]} * a;
      }
    }
  }
};
#endif

// --- tiles -------------------------------------------------------------------------------------

DK_INLINE VF load_sum(const VF*, const float* p) { return load(p); }
DK_INLINE VI load_sum(const VI*, const float* p) {
  return load_int(reinterpret_cast<const int32_t*>(p));
}
DK_INLINE void store_sum(float* p, VF v) { store(p, v); }
DK_INLINE void store_sum(float* p, VI v) { store_int(reinterpret_cast<int32_t*>(p), v); }
DK_INLINE VF clear_sum(const VF*) { return zero(); }
DK_INLINE VI clear_sum(const VI*) { return zero_int(); }

// Add num_units units (a multiple of 4) to the sums [kRows][32], which start at zero in the first
// block. kLines < 0: prefetch the stream of weights; otherwise kLines lines of `ahead` per
// 4 units.
template <class Kind, int kRows, int kLines>
__attribute__((noinline)) void add_units(const typename Kind::Unit* x, const char* weights,
                                         int64_t num_units, float* sums, bool begins,
                                         const char* ahead) {
  using Accumulator = typename Kind::Accumulator;
  Accumulator acc[kRows][kVectorsPerPanel];
  const Accumulator* const type = nullptr;
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      acc[r][v] = begins ? clear_sum(type) : load_sum(type, sums + r * kPanel + v * kWidth);
    }
  }
  for (int64_t u = 0; u < num_units; u += 4) {
    if (kLines < 0) {
      DK_UNROLL for (int i = 0; i < 8; ++i) prefetch_once(weights + kStreamAhead + i * 64);
    } else {
      DK_UNROLL for (int i = 0; i < kLines; ++i) __builtin_prefetch(ahead + i * 64);
      ahead += kLines * 64;
    }
    DK_UNROLL for (int i = 0; i < 4; ++i) {
      Kind::template step<kRows>(acc, weights + i * kUnitBytes, x + i * kRows);
    }
    keep_in_registers<kRows>(acc);
    x += 4 * kRows;
    weights += 4 * kUnitBytes;
  }
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      store_sum(sums + r * kPanel + v * kWidth, acc[r][v]);
    }
  }
}

template <class Kind>
DK_INLINE void finish(const LinearJob& job, const PanelOutput& out, int64_t tile, const float* sums,
                      const char* panel_scales) {
  const int64_t row = tile * job.tile_rows, left = job.num_rows - row;
  const int64_t rows = left < job.tile_rows ? left : job.tile_rows;
  if constexpr (Kind::kScaled) {
    const auto* column_scales = reinterpret_cast<const float*>(panel_scales);
    finish_tile(*job.args, out, job.first_row + row, rows, [&](int64_t r, int v) {
      const auto* whole = reinterpret_cast<const int32_t*>(sums + r * kPanel + v * kWidth);
      const VI sum = add_int(load_int(whole), set1_int(job.corrections[row + r]));
      const VF scale = mul(set1(job.scales[row + r]), load(column_scales + v * kWidth));
      return mul(to_float(sum), scale);
    });
  } else {
    finish_tile(*job.args, out, job.first_row + row, rows,
                [&](int64_t r, int v) { return load(sums + r * kPanel + v * kWidth); });
  }
}

// One tile: a single pass over k, far prefetch.
template <class Kind, int kRows>
void compute_one_tile(const LinearJob& job, int64_t panel, const char* weights, float* sums) {
  const auto* x = reinterpret_cast<const typename Kind::Unit*>(job.activations);
  add_units<Kind, kRows, -1>(x, weights, job.num_units, sums, true, nullptr);
  finish<Kind>(job, panel_output(*job.args, panel), 0, sums, weights + job.num_units * kUnitBytes);
}

// Many tiles: blocks over k, all tiles on a block before the next. Each tile prefetches a share of
// the next block; tiles of the last block prefetch the next panel.
template <class Kind, int kRows>
void compute_tiles(const LinearJob& job, int64_t panel, const char* weights, float* sums) {
  const auto* x = reinterpret_cast<const typename Kind::Unit*>(job.activations);
  const int64_t num_tiles = job.num_tiles(), tile_sums = kRows * kPanel;
  const int64_t block_units = even_blocks(job.num_units, kBlockUnits, 4);
  const PanelOutput out = panel_output(*job.args, panel);
  const char* const scales = weights + job.num_units * kUnitBytes;
  for (int64_t u = 0; u < job.num_units; u += block_units) {
    const int64_t n = job.num_units - u < block_units ? job.num_units - u : block_units;
    const char* const block = weights + u * kUnitBytes;
    const char* ahead = block + n * kUnitBytes;
    for (int64_t t = 0; t < num_tiles; ++t) {
      const auto* a = x + (t * job.num_units + u) * kRows;
      float* const c = sums + t * tile_sums;
      // 2 lines per unit are needed: n / 4 steps of num_tiles tiles prefetch kLines lines each.
      if (num_tiles <= 2) {
        add_units<Kind, kRows, 4>(a, block, n, c, u == 0, ahead + t * n * 64);
      } else if (num_tiles <= 4) {
        add_units<Kind, kRows, 2>(a, block, n, c, u == 0, ahead + t * n * 32);
      } else if (t < 8) {
        add_units<Kind, kRows, 1>(a, block, n, c, u == 0, ahead + t * n * 16);
      } else {
        add_units<Kind, kRows, 0>(a, block, n, c, u == 0, ahead);
      }
      // Immediately: the store overlaps with the multiplication of the next tile.
      if (u + n == job.num_units) finish<Kind>(job, out, t, c, scales);
    }
  }
}

template <class Kind, int kRows>
void compute_rows(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const int64_t num_tiles = job.num_tiles();
  const int64_t panel_bytes = job.num_units * kUnitBytes + (Kind::kScaled ? kPanel * 4 : 0);
  char* const memory = scratch(kRegionScratch, num_tiles * kRows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(memory);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const weights = static_cast<const char*>(job.args->packed) + p * panel_bytes;
    if (num_tiles == 1) {
      compute_one_tile<Kind, kRows>(job, p, weights, sums);
    } else if constexpr (kRows * 2 >= Kind::kMaxRows) {
      compute_tiles<Kind, kRows>(job, p, weights, sums);
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
      const int64_t length = r < rows.count ? K : 0;
      const uint16_t* const row = x + r * ld;
      for (int64_t u = 0; u < job.num_units; ++u) {
        const float even = 2 * u < length ? bf16_to_float(row[2 * u]) : 0.0f;
        const float odd = 2 * u + 1 < length ? bf16_to_float(row[2 * u + 1]) : 0.0f;
        out[u * job.tile_rows + r] = {even, odd};
      }
    }
#endif
  }
}

#if DK_LEVEL == 1 || DK_LEVEL == 2
// Like transpose_words, with bytes widened to 16 bits: k 0 and 2, then k 1 and 3.
void pack_pairs(const int8_t* q, int64_t K, int64_t rows, Int8::Unit* out, int64_t tile_rows,
                int64_t num_units) {
  const auto pair = [](int32_t low, int32_t high) { return (low & 0xffff) | high * 65536; };
  for (int64_t r = 0; r < tile_rows; ++r) {
    for (int64_t u = 0; u < num_units; ++u) {
      int8_t bytes[4] = {};
      const int64_t left = r < rows ? K - u * 4 : 0;
      if (left > 0) memcpy(bytes, q + r * K + u * 4, left < 4 ? left : 4);
      out[u * tile_rows + r] = {pair(bytes[0], bytes[2]), pair(bytes[1], bytes[3])};
    }
  }
}
#endif

void pack_rows_int8(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t K = job.args->K;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const TileRows rows = rows_of(job, t);
    auto* const q = reinterpret_cast<int8_t*>(scratch(kRegionScratch, rows.count * K));
    for (int64_t r = 0; r < rows.count; ++r) {
      const int64_t row = rows.first + r;
      int32_t sum;
      job.scales[row] = quantise_group(job.x + row * job.args->ldx, K, q + r * K, &sum);
      job.corrections[row] = -128 * sum;
    }
    auto* const out = reinterpret_cast<Int8::Unit*>(job.activations) +
                      t * job.tile_rows * job.num_units;
#if DK_LEVEL == 0 || DK_LEVEL >= 3
    const auto* const bytes = reinterpret_cast<const char*>(q);
    transpose_words(bytes, K, K, rows.count, out, job.tile_rows, job.num_units);
#else
    pack_pairs(q, K, rows.count, out, job.tile_rows, job.num_units);
#endif
  }
}

template <class Kind, int... kSmaller>
void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel,
             std::integer_sequence<int, kSmaller...>) {
  using Compute = void (*)(const LinearJob&, int64_t, int64_t);
  static constexpr Compute by_rows[] = {compute_rows<Kind, kSmaller + 1>...};
  by_rows[job.tile_rows - 1](job, first_panel, end_panel);
}

template <class Kind>
void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  compute<Kind>(job, first_panel, end_panel, std::make_integer_sequence<int, Kind::kMaxRows>{});
}

constexpr float kRowCost = 0.12f;

}  // namespace

const LinearKernels linear_bf16 = {Bf16::kMaxRows, kRowCost, sizeof(Bf16::Unit), pack_rows_bf16,
                                   compute<Bf16>};
const LinearKernels linear_int8 = {Int8::kMaxRows, kRowCost, sizeof(Int8::Unit), pack_rows_int8,
                                   compute<Int8>};

}  // namespace dk::DK_LEVEL_NAMESPACE
