// Packed linear with codes in groups, one level: integer sums within a group, floats over the
// groups.
//
// The integer sum of a group starts at -offset * sum(x), so that it becomes exactly the sum of
// q * x, plus the bits of the float 1.5 * 2^23. Since sums are below 2^22, the result is the bits
// of that float plus the sum: no conversion. Times the row's scale, which has 16 bits, this part of
// the product is exact, and a fused multiply-add subtracts it with one rounding. Groups are added
// in ascending order by one fused multiply-add each, and one for minima, for any tile height: a
// row's bits do not depend on the batch.
//
// Rows with low parts in a group: the exact sum is shifted, the products of the low parts are
// added, and the sum is converted to float.
#include <utility>

#include "group_activations.h"
#include "group_codes.h"
#include "group_packing.h"
#include "group_scales.h"
#include "linear_epilogue.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kBlockK = 512;      // k of a block: 16 KiB of bytes, kept in the L1 cache
constexpr int64_t kAheadTiles = 12;   // number of tiles that share the prefetch of the next block
constexpr int kMaxRows = DK_LEVEL >= 2 ? 6 : DK_LEVEL == 1 ? 2 : 1;

// --- tiles in registers --------------------------------------------------------------------------

// What a tile has of a group, of each row (LinearJob).
struct RowNumbers {
  const float* scales;
  const int32_t* starts;
  const float *start_products, *sums;
};

using Whole = VI[kVectorsPerPanel];  // of a row
using Scaled = VF[kVectorsPerPanel];

// A group's sums times the row's scale, rounded once.
DK_INLINE void scale_row(const Whole& whole, const RowNumbers& row, int r, Scaled& scaled) {
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
#if DK_LEVEL >= 1
    scaled[v] = fma(as_float(whole[v]), set1(row.scales[r]), set1(row.start_products[r]));
#else
    scaled[v] = mul(to_float(add_int(whole[v], set1_int(-kStartBits))), set1(row.scales[r]));
#endif
  }
}

template <ScaleKind kKind, int kRows, bool kMinima>
DK_INLINE void add_scaled(VF (*acc)[kVectorsPerPanel], const VF (*sums)[kVectorsPerPanel],
                          const Scales& from, const RowNumbers& row) {
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
    const VF scale = from.load<kKind>(v * kWidth);
    DK_UNROLL for (int r = 0; r < kRows; ++r) acc[r][v] = fma(sums[r][v], scale, acc[r][v]);
    if constexpr (kMinima) {
      const VF minimum = from.load<kKind>(kColumns + v * kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        acc[r][v] = fma(set1(row.sums[r]), minimum, acc[r][v]);
      }
    }
  }
}

// Some groups of a panel.
struct Block {
  const char *panel, *codes;  // codes of the first group: packed, or unpacked to bytes
  int64_t code_stride;        // from one group to the next, without headers
  int64_t header_bytes;       // 0 if codes are unpacked
  int64_t first, num_groups;
  const char* ahead;          // what tiles prefetch, `ahead_lines` lines a group
  int64_t ahead_lines;
};

// How codes are stored and read. kUnits: units of 4 k in a part of a group.
template <int kBits_, int kUnits_, bool kMinima_>
struct Codes {
  static constexpr int kBits = kBits_, kUnits = kUnits_;
  static constexpr bool kMinima = kMinima_;
  static constexpr int kPartBytes = kUnits * 4 * kBits / 8 * kColumns;
};

// Add the products of a group's codes and activations. kStreams: prefetch codes that are read once.
template <class Kind, int kRows, bool kStreams>
DK_INLINE void multiply_group(const char* codes, const uint32_t* x, int64_t num_parts,
                              Whole* whole) {
  for (int64_t part = 0; part < num_parts; ++part) {
    const char* const from = codes + part * Kind::kPartBytes;
    if constexpr (kStreams) {
      DK_UNROLL for (int i = 0; i < Kind::kPartBytes / 64; ++i) prefetch_stream(from, i);
    }
    if constexpr (Kind::kBits == 8) {
      add_bytes<kRows, Kind::kUnits>(from, x, whole);
    } else if constexpr (Kind::kBits == 6) {
      add_six_bits<kRows>(from, x, whole);
    } else {
      add_nibbles<kRows>(from, x, whole);
    }
    x += Kind::kUnits * kRows;
  }
}

// The same as scale_row for a row with low parts, x, whose products with the codes are added first.
template <class Kind>
DK_INLINE void scale_fine_row(const char* codes, const char* x, int64_t num_parts, int32_t start,
                              float scale, const Whole& whole, Scaled& scaled) {
  Whole fine[1];
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
    fine[0][v] = add_int(shift_left(whole[v], kLowBits), set1_int(start));
  }
  multiply_group<Kind, 1, false>(codes, reinterpret_cast<const uint32_t*>(x), num_parts, fine);
  DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
    scaled[v] = mul(to_float(fine[0][v]), set1(scale * kLowScale));
  }
}

// Add the groups of a block to the sums [kRows][32] of a tile. at: of the tile's first group in the
// arrays of the job. kTiles: one of many tiles; otherwise the weights are read once, as a stream.
template <class Kind, int kRows, bool kTiles, bool kRefined>
__attribute__((noinline)) void add_block(const Block& block, const LinearJob& job, int64_t at,
                                         float* sums, bool begins) {
  const GroupFormat format = job.format;
  const int64_t group_words = format.group / 4 * kRows;
  const auto* x = reinterpret_cast<const uint32_t*>(job.activations) + at * (format.group / 4);
  const int64_t row_bytes = job.num_groups * format.group;
  const int64_t first_row = at / (job.num_groups * kRows) * kRows;
  const char* low = kRefined ? job.low + first_row * row_bytes + block.first * format.group
                             : nullptr;
  const int32_t* low_starts = kRefined ? job.low_starts + at : nullptr;
  const uint8_t* const has_low = kRefined ? job.has_low + at / kRows : nullptr;
  RowNumbers row{job.scales + at, job.starts + at, job.start_products + at, job.sums + at};
  const int64_t num_parts = format.group / 4 / Kind::kUnits;
  const char *codes = block.codes, *ahead = block.ahead;
  Scales scales(format, block.panel, block.first);
  if constexpr (!kTiles) scales.load_header();
  VF acc[kRows][kVectorsPerPanel];
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      acc[r][v] = begins ? zero() : load(sums + r * kPanel + v * kWidth);
    }
  }
  for (int64_t g = 0; g < block.num_groups; ++g) {
    if constexpr (kTiles) {
      for (int64_t i = 0; i < block.ahead_lines; ++i) __builtin_prefetch(ahead + i * 64);
      ahead += block.ahead_lines * 64;
    } else if (!format.two_levels()) {
      prefetch_stream(scales.own, 0);
    }
    Whole whole[kRows];
    Scaled scaled[kRows];
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      const VI start = set1_int(row.starts[r]);
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) whole[r][v] = start;
    }
    multiply_group<Kind, kRows, !kTiles>(codes, x, num_parts, whole);
    if (kRefined && has_low[g]) {
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        if (has_low[g] >> r & 1) {
          scale_fine_row<Kind>(codes, low + r * row_bytes, num_parts, low_starts[r], row.scales[r],
                               whole[r], scaled[r]);
        } else {
          scale_row(whole[r], row, r, scaled[r]);
        }
      }
    } else {
      DK_UNROLL for (int r = 0; r < kRows; ++r) scale_row(whole[r], row, r, scaled[r]);
    }
    switch (format.scales) {
      case kBf16Scales:
        add_scaled<kBf16Scales, kRows, Kind::kMinima>(acc, scaled, scales, row);
        break;
      case kHalfScales:
        add_scaled<kHalfScales, kRows, Kind::kMinima>(acc, scaled, scales, row);
        break;
      case kTwoLevelScales:
        add_scaled<kTwoLevelScales, kRows, Kind::kMinima>(acc, scaled, scales, row);
        break;
    }
    row = {row.scales + kRows, row.starts + kRows, row.start_products + kRows, row.sums + kRows};
    x += group_words;
    if constexpr (kRefined) {
      low += format.group;
      low_starts += kRows;
    }
    codes += block.code_stride;
    if (scales.next()) {
      codes += block.header_bytes;
      if (!kTiles && g + 1 < block.num_groups) scales.load_header();
    }
  }
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      store(sums + r * kPanel + v * kWidth, acc[r][v]);
    }
  }
}

template <class Kind, int kRows, bool kRefined>
void compute_tiles(const LinearJob& job, const char* panel, float* sums, char* bytes) {
  constexpr bool kUnpack = kUnpacks && Kind::kBits < 8;
  using Read = Codes<kUnpack ? 8 : Kind::kBits, Kind::kUnits, Kind::kMinima>;
  const GroupFormat& format = job.format;
  const int64_t num_tiles = job.num_tiles(), stride = format.group_stride();
  const int64_t sharing = num_tiles < kAheadTiles ? num_tiles : kAheadTiles;
  const int64_t most = even_blocks(job.num_groups, kBlockK / format.group, 1);
  for (int64_t g = 0; g < job.num_groups; g += most) {
    const int64_t n = job.num_groups - g < most ? job.num_groups - g : most;
    const int64_t lines = (format.bytes_of(g, n) / 64 + sharing * n - 1) / (sharing * n);
    const char* const end = panel + format.codes_at(g + n - 1) + stride;
    Block block{panel, panel + format.codes_at(g), stride, format.header_bytes(), g, n, end, lines};
#if DK_HAS_VNNI && DK_LEVEL >= 2
    if constexpr (kUnpack) {
      block.codes = bytes;
      block.code_stride = format.group * kColumns;
      block.header_bytes = 0;
      for (int64_t i = 0; i < n; ++i) {
        const char* const from = panel + format.codes_at(g + i);
        char* const to = bytes + i * block.code_stride;
        if constexpr (Kind::kBits == 6) {
          unpack_six_bits(from, to);
        } else {
          unpack_nibbles(from, format.code_bytes(), to);
        }
      }
    }
#else
    static_cast<void>(bytes);
#endif
    for (int64_t t = 0; t < num_tiles; ++t) {
      if (t >= kAheadTiles) block.ahead_lines = 0;
      const int64_t at = (t * job.num_groups + g) * kRows;
      add_block<Read, kRows, true, kRefined>(block, job, at, sums + t * kRows * kPanel, g == 0);
      block.ahead += lines * n * 64;
    }
  }
}

template <class Kind, int kRows, bool kRefined>
void compute_rows(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const GroupFormat& format = job.format;
  const int64_t num_tiles = job.num_tiles(), panel_bytes = format.panel_bytes(job.num_units * 4);
  constexpr int64_t kUnpackedBytes = kUnpacks && Kind::kBits < 8 ? kBlockK * kColumns : 0;
  char* const bytes = scratch(kRegionScratch, kUnpackedBytes + num_tiles * kRows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(bytes + kUnpackedBytes);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const panel = static_cast<const char*>(job.args->packed) + p * panel_bytes;
    if (num_tiles == 1) {
      const Block all{panel, panel + format.codes_at(0), format.group_stride(),
                      format.header_bytes(), 0, job.num_groups, nullptr, 0};
      add_block<Kind, kRows, false, kRefined>(all, job, 0, sums, true);
    } else if constexpr (kRows * 2 >= kMaxRows) {
      compute_tiles<Kind, kRows, kRefined>(job, panel, sums, bytes);
    }
    finish_panel(job, p, sums);
  }
}

template <class Kind, bool kRefined, int... kSmaller>
void compute_heights(const LinearJob& job, int64_t first_panel, int64_t end_panel,
                     std::integer_sequence<int, kSmaller...>) {
  using Compute = void (*)(const LinearJob&, int64_t, int64_t);
  static constexpr Compute by_rows[] = {compute_rows<Kind, kSmaller + 1, kRefined>...};
  by_rows[job.tile_rows - 1](job, first_panel, end_panel);
}

template <class Kind>
void compute_kind(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const auto heights = std::make_integer_sequence<int, kMaxRows>{};
  if (job.low) {
    compute_heights<Kind, true>(job, first_panel, end_panel, heights);
  } else {
    compute_heights<Kind, false>(job, first_panel, end_panel, heights);
  }
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const bool minima = job.format.has_minima;
  auto* kind = compute_kind<Codes<6, 4, false>>;
  if (job.format.group > 16 && job.format.bits == 8) {
    kind = minima ? compute_kind<Codes<8, 8, true>> : compute_kind<Codes<8, 8, false>>;
  } else if (job.format.group > 16) {
    kind = minima ? compute_kind<Codes<4, 8, true>> : compute_kind<Codes<4, 8, false>>;
  }
  kind(job, first_panel, end_panel);
}

// --- activations: int8 with a scale per row and group -------------------------------------------

void pack_rows(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t padded_k = job.num_units * 4;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const int64_t first_row = t * job.tile_rows, left = job.num_rows - first_row;
    const int64_t rows = left < job.tile_rows ? left : job.tile_rows;
#if DK_LEVEL >= 2
    if (job.tile_rows >= kFewestPackedRows) {
      job.low ? pack_tile<true>(job, t, rows) : pack_tile<false>(job, t, rows);
      continue;
    }
#endif
    auto* const q = reinterpret_cast<int8_t*>(scratch(kRegionScratch, rows * padded_k));
    auto* const low = job.low ? reinterpret_cast<int8_t*>(job.low) + first_row * padded_k : nullptr;
    quantize_tile(job, t, rows, q, low, padded_k, job.format.group);
    auto* const out = reinterpret_cast<uint32_t*>(job.activations) + first_row * job.num_units;
    transpose_words(reinterpret_cast<const char*>(q), padded_k, padded_k, rows, out, job.tile_rows,
                    job.num_units);
  }
}

constexpr float kRowCost = 1.43f;  // unpacking, scales

}  // namespace

const LinearKernels linear_groups = {
    kMaxRows, kMaxRows, (kMaxRows + 1) / 2, kFewestRows, kMostRows, kRowCost,
    4, 1, pack_rows, compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
