// Packed linear in int4 by groups, one level: integer sums within a group, floats over the groups.
//
// A nibble is q + 8 and unsigned, an activation a signed byte. The sum of a group starts at -8 *
// sum(x), so that it becomes exactly the sum of q * x. Groups are added in ascending order by one
// fused multiply-add each, for any tile height: a row's bits do not depend on the batch.
#include <utility>

#include "activations.h"
#include "linear_epilogue.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int kStreamAhead = 8192;    // bytes of weights prefetched ahead in one pass over k
constexpr int64_t kBlockK = 512;      // k of a block: 16 KiB unpacked, kept in the L1 cache
constexpr int64_t kAheadTiles = 12;   // number of tiles that share the prefetch of the next block
constexpr int kMaxRows = DK_LEVEL >= 2 ? 6 : DK_LEVEL == 1 ? 2 : 1;

template <int kGroup>
constexpr int64_t kBlockGroups = kBlockK / kGroup;
template <int kGroup>
constexpr int64_t kGroupBytes = kGroup / 8 * kUnitBytes + kColumns * 2;

// --- integer sums of a group: sums[row][vector] += q + 8 times x --------------------------------

#if DK_LEVEL >= 3
// With few rows there are registers for a second set of sums, which hides the instruction's
// latency. That set uses the high nibbles in place, as 16 times their value.
template <int kRows, int kGroup, bool kUnpacked>
DK_INLINE void add_group(const char* weights, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  constexpr bool kTwoSets = kRows <= 4;
  const VI low_mask = _mm512_set1_epi8(15), high_mask = _mm512_set1_epi8(static_cast<char>(0xf0));
  VI high_sums[kTwoSets ? kRows : 1][2];
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) high_sums[r][0] = high_sums[r][1] = zero_int();
  }
  DK_UNROLL for (int u = 0; u < kGroup / 8; ++u) {
    VI low[2], high[2];
    DK_UNROLL for (int v = 0; v < 2; ++v) {
      if constexpr (kUnpacked) {
        low[v] = _mm512_load_si512(weights + u * 256 + v * 64);
        high[v] = _mm512_load_si512(weights + u * 256 + 128 + v * 64);
      } else {
        const VI both = _mm512_load_si512(weights + u * kUnitBytes + v * 64);
        low[v] = _mm512_and_si512(both, low_mask);
        high[v] = kTwoSets ? _mm512_and_si512(both, high_mask)
                           : _mm512_and_si512(_mm512_srli_epi16(both, 4), low_mask);
      }
    }
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = set1_int(static_cast<int>(x[2 * u * kRows + r]));
      DK_UNROLL for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], low[v], a);
    }
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI a = set1_int(static_cast<int>(x[(2 * u + 1) * kRows + r]));
      VI* const into = kTwoSets ? high_sums[kTwoSets ? r : 0] : sums[r];
      DK_UNROLL for (int v = 0; v < 2; ++v) into[v] = _mm512_dpbusd_epi32(into[v], high[v], a);
    }
  }
  if constexpr (kTwoSets) {
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < 2; ++v) {
        const VI high = high_sums[r][v];
        sums[r][v] = add_int(sums[r][v], kUnpacked ? high : _mm512_srai_epi32(high, 4));
      }
    }
  }
}

template <int kGroup>
void unpack_group(const char* weights, char* out) {
  const VI mask = _mm512_set1_epi8(15);
  for (int i = 0; i < kGroup / 8 * 2; ++i) {
    const VI both = _mm512_load_si512(weights + i * 64);
    char* const to = out + i / 2 * 256 + i % 2 * 64;
    _mm512_store_si512(to, _mm512_and_si512(both, mask));
    _mm512_store_si512(to + 128, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask));
  }
}
#elif DK_LEVEL >= 1
// 16 bit sums hold 32 k: 8 products of pairs, each at most 2 * 15 * 127, stay below 2^15.
template <int kRows, int kGroup, bool>
DK_INLINE void add_group(const char* weights, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* words = reinterpret_cast<const int32_t*>(weights);
  for (int part = 0; part < kGroup / 32; ++part) {
    VI pairs[kRows][kVectorsPerPanel];
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) pairs[r][v] = zero_int();
    }
    DK_UNROLL for (int u = 0; u < 4; ++u) {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        const VI both = load_int(words + u * kColumns + v * kWidth);
        const VI low = low_nibbles(both), high = high_nibbles(both);
        DK_UNROLL for (int r = 0; r < kRows; ++r) {
          const VI a = set1_int(static_cast<int>(x[2 * u * kRows + r]));
          const VI b = set1_int(static_cast<int>(x[(2 * u + 1) * kRows + r]));
          pairs[r][v] = add_halves(pairs[r][v], multiply_bytes(low, a));
          pairs[r][v] = add_halves(pairs[r][v], multiply_bytes(high, b));
        }
      }
    }
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        sums[r][v] = add_int(sums[r][v], multiply_pairs(pairs[r][v], set1_int(0x10001)));
      }
    }
    x += 8 * kRows;
    words += 4 * kColumns;
  }
}
#else
template <int kRows, int kGroup, bool>
DK_INLINE void add_group(const char* weights, const uint32_t* x, VI (*sums)[kVectorsPerPanel]) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(weights);
  for (int u = 0; u < kGroup / 8; ++u) {
    for (int k = 0; k < 4; ++k) {
      const int32_t a = static_cast<int8_t>(x[2 * u] >> (8 * k));
      const int32_t b = static_cast<int8_t>(x[2 * u + 1] >> (8 * k));
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
        const uint8_t* const c = bytes + u * kUnitBytes + v * kWidth * 4 + k;
        const VI both = {c[0], c[4], c[8], c[12]};
        sums[0][v] += (both & 15) * a + (both >> 4) * b;
      }
    }
  }
}
#endif

// --- tiles -------------------------------------------------------------------------------------

// The inputs of a tile for a block of groups.
struct Block {
  const char* weights;   // packed, with scales
  const char* unpacked;  // nibbles as bytes, or null
  const char* ahead;     // what to prefetch, `ahead_lines` lines a group
  int64_t ahead_lines, num_groups;
};

// Add the groups of a block to the sums [kRows][32] of a tile.
template <int kRows, int kGroup, bool kUnpacked>
__attribute__((noinline)) void add_block(const Block& block, const LinearJob& job, int64_t at,
                                         float* sums, bool begins) {
  const auto* x = reinterpret_cast<const uint32_t*>(job.activations) + at * (kGroup / 4);
  const float* row_scales = job.scales + at;
  const int32_t* corrections = job.corrections + at;
  const char *weights = block.weights, *unpacked = block.unpacked, *ahead = block.ahead;
  VF acc[kRows][kVectorsPerPanel];
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      acc[r][v] = begins ? zero() : load(sums + r * kPanel + v * kWidth);
    }
  }
  for (int64_t g = 0; g < block.num_groups; ++g) {
    if constexpr (kUnpacked) {
      for (int64_t i = 0; i < block.ahead_lines; ++i) __builtin_prefetch(ahead + i * 64);
      ahead += block.ahead_lines * 64;
    } else {
      DK_UNROLL for (int i = 0; i < kGroupBytes<kGroup> / 64; ++i) {
        prefetch_once(weights + kStreamAhead + i * 64);
      }
    }
    VI whole[kRows][kVectorsPerPanel];
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) whole[r][v] = set1_int(corrections[r]);
    }
    add_group<kRows, kGroup, kUnpacked>(kUnpacked ? unpacked : weights, x, whole);
    const auto* scales = reinterpret_cast<const uint16_t*>(weights + kGroup / 8 * kUnitBytes);
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      const VF scale = load_bf16(scales + v * kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        acc[r][v] = fma(mul(to_float(whole[r][v]), set1(row_scales[r])), scale, acc[r][v]);
      }
    }
    x += kGroup / 4 * kRows;
    row_scales += kRows;
    corrections += kRows;
    weights += kGroupBytes<kGroup>;
    unpacked += kUnpacked ? kGroup * kColumns : 0;
  }
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      store(sums + r * kPanel + v * kWidth, acc[r][v]);
    }
  }
}

template <int kRows, int kGroup>
void compute_tiles(const LinearJob& job, const char* weights, float* sums, char* bytes) {
  constexpr bool kUnpack = DK_LEVEL >= 3;
  constexpr int64_t kLines = kGroupBytes<kGroup> / 64;
  const int64_t num_tiles = job.num_tiles(), num_groups = job.num_units * 8 / kGroup;
  const int64_t sharing = num_tiles < kAheadTiles ? num_tiles : kAheadTiles;
  const int64_t lines = (kLines + sharing - 1) / sharing;
  const int64_t most = even_blocks(num_groups, kBlockGroups<kGroup>, 1);
  for (int64_t g = 0; g < num_groups; g += most) {
    const int64_t n = num_groups - g < most ? num_groups - g : most;
    const char* const from = weights + g * kGroupBytes<kGroup>;
    Block block{from, kUnpack ? bytes : nullptr, from + n * kGroupBytes<kGroup>, lines, n};
#if DK_LEVEL >= 3
    for (int64_t i = 0; i < n; ++i) {
      unpack_group<kGroup>(from + i * kGroupBytes<kGroup>, bytes + i * kGroup * kColumns);
    }
#endif
    for (int64_t t = 0; t < num_tiles; ++t) {
      if (t >= kAheadTiles) block.ahead_lines = 0;
      const int64_t at = (t * num_groups + g) * kRows;
      add_block<kRows, kGroup, kUnpack>(block, job, at, sums + t * kRows * kPanel, g == 0);
      block.ahead += lines * n * 64;
    }
  }
}

template <int kRows, int kGroup>
void compute_rows(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const int64_t num_tiles = job.num_tiles(), num_groups = job.num_units * 8 / kGroup;
  constexpr int64_t kUnpackedBytes = kBlockK * kColumns;
  char* const bytes = scratch(kRegionScratch, kUnpackedBytes + num_tiles * kRows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(bytes + kUnpackedBytes);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const weights =
        static_cast<const char*>(job.args->packed) + p * num_groups * kGroupBytes<kGroup>;
    if (num_tiles == 1) {
      const Block all{weights, nullptr, nullptr, 0, num_groups};
      add_block<kRows, kGroup, false>(all, job, 0, sums, true);
    } else if constexpr (kRows * 2 >= kMaxRows) {
      compute_tiles<kRows, kGroup>(job, weights, sums, bytes);
    }
    const PanelOutput out = panel_output(*job.args, p);
    for (int64_t t = 0; t < num_tiles; ++t) {
      const int64_t row = t * kRows, left = job.num_rows - row;
      const float* const tile = sums + row * kPanel;
      finish_tile(*job.args, out, job.first_row + row, left < kRows ? left : kRows,
                  [&](int64_t r, int v) { return load(tile + r * kPanel + v * kWidth); });
    }
  }
}

template <int kGroup, int... kSmaller>
void compute_group(const LinearJob& job, int64_t first_panel, int64_t end_panel,
                   std::integer_sequence<int, kSmaller...>) {
  using Compute = void (*)(const LinearJob&, int64_t, int64_t);
  static constexpr Compute by_rows[] = {compute_rows<kSmaller + 1, kGroup>...};
  by_rows[job.tile_rows - 1](job, first_panel, end_panel);
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  constexpr std::make_integer_sequence<int, kMaxRows> heights;
  switch (job.args->group) {
    case 32: return compute_group<32>(job, first_panel, end_panel, heights);
    case 64: return compute_group<64>(job, first_panel, end_panel, heights);
    default: return compute_group<128>(job, first_panel, end_panel, heights);
  }
}

// --- activations: int8 with a scale per row and group -------------------------------------------

void quantise_row(const LinearJob& job, int64_t row, int64_t at, int8_t* q) {
  const int64_t K = job.args->K, group = job.args->group;
  const uint16_t* const x = job.x + row * job.args->ldx;
  for (int64_t k = 0; k < K; k += group, q += group, at += job.tile_rows) {
    const int64_t n = K - k < group ? K - k : group;
    int32_t sum;
    job.scales[at] = quantise_group(x + k, n, q, &sum);
    job.corrections[at] = -8 * sum;
    memset(q + n, 0, group - n);
  }
}

void pack_rows(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t padded_k = job.num_units * 8, num_groups = padded_k / job.args->group;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const int64_t first_row = t * job.tile_rows, left = job.num_rows - first_row;
    const int64_t rows = left < job.tile_rows ? left : job.tile_rows;
    const int64_t at = t * num_groups * job.tile_rows;
    auto* const q = reinterpret_cast<int8_t*>(scratch(kRegionScratch, rows * padded_k));
    for (int64_t r = 0; r < rows; ++r) quantise_row(job, first_row + r, at + r, q + r * padded_k);
    for (int64_t r = rows; r < job.tile_rows; ++r) {
      for (int64_t g = 0; g < num_groups; ++g) {
        job.scales[at + g * job.tile_rows + r] = 0.0f;
        job.corrections[at + g * job.tile_rows + r] = 0;
      }
    }
    auto* const out = reinterpret_cast<uint32_t*>(job.activations) + first_row * padded_k / 4;
    transpose_words(reinterpret_cast<const char*>(q), padded_k, padded_k, rows, out, job.tile_rows,
                    padded_k / 4);
  }
}

constexpr float kRowCost = 1.43f;  // unpacking, conversion to float

}  // namespace

const LinearKernels linear_int4 = {kMaxRows, kRowCost, 8, pack_rows, compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
