// Packed linear with codes of 6 or 8 bits in groups for several rows, without products of bytes.
//
// Codes and activations are multiplied as 16 bit numbers. Codes are widened once for all tiles of
// rows, or in registers for a single tile if they have 8 bits. An activation of a refined group is
// one number, 128 q + low, so low parts take no additional time. Integer sums are those of
// linear_groups_level.cpp, which is used for fewer rows: they are exact, at most 32 * 128 * 2^14,
// and the same floating point operations follow in the same order: bits are equal.
//
// Packed activations: [tile][group][word][row], a word of two k. Of 4 k, the first word has k 0 and
// 2, the second k 1 and 3.
#include <utility>

#include "group_activations.h"
#include "group_scales.h"
#include "linear_epilogue.h"
#include "six_bits.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int kMaxRows = 6, kMinRows = 3;  // of a tile
constexpr int kVectors = 2;                // of columns whose sums are in registers
// 16 KiB of widened codes, kept in the L1 cache, and no block of scales of two levels has a header
// between its codes.
constexpr int64_t kBlockK = kSuperK;
constexpr int64_t kMostGroup = 32, kLeastGroup = 16;
constexpr int64_t kAheadTiles = 8;         // number of tiles that share the prefetch of a block
constexpr int64_t kStreamAhead = 8192;     // bytes that a single tile prefetches ahead

// Some groups of a panel: codes, packed or as [group][word][32 columns][2], and [group][32 columns]
// floats.
struct WideBlock {
  int32_t* codes;
  const char* packed;
  float *scales, *minima;
  int64_t first, num_groups;
  const char* ahead;  // what tiles prefetch next, `ahead_lines` lines for a group and kVectors
  int64_t ahead_lines;
};
constexpr int64_t kCodeBytes = kBlockK * kColumns * 2;
constexpr int64_t kNumberBytes = kBlockK / kLeastGroup * kColumns * 4;

// --- codes ---------------------------------------------------------------------------------------

// Of 4 k in each lane, k 0 and 2 or k 1 and 3, as 16 bit numbers.
DK_INLINE VI even_codes(VI packed) {
  return _mm256_srai_epi16(_mm256_slli_epi16(flip_signs(packed), 8), 8);
}
DK_INLINE VI odd_codes(VI packed) { return _mm256_srai_epi16(flip_signs(packed), 8); }

template <ScaleKind kKind>
DK_INLINE void read_scales(const LinearJob& job, const char* panel, const WideBlock& block) {
  Scales scales(job.format, panel, block.first);
  for (int64_t at = 0; at < block.num_groups * kColumns; at += kColumns, scales.next()) {
    DK_UNROLL for (int c = 0; c < kColumns; c += kWidth) {
      store(block.scales + at + c, scales.load<kKind>(c));
      if (job.format.has_minima) {
        store(block.minima + at + c, scales.load<kKind>(kColumns + c));
      }
    }
  }
}

void unpack_scales(const LinearJob& job, const char* panel, const WideBlock& block) {
  switch (job.format.scales) {
    case kBf16Scales: return read_scales<kBf16Scales>(job, panel, block);
    case kHalfScales: return read_scales<kHalfScales>(job, panel, block);
    case kTwoLevelScales: return read_scales<kTwoLevelScales>(job, panel, block);
  }
}

// Write the codes of four units, in kWidth columns.
DK_INLINE void widen_six_bits(const char* from, int32_t* to) {
  VI units[4];
  read_six_bits(from, units);
  const VI low_bytes = _mm256_set1_epi16(255), offset = _mm256_set1_epi16(32);
  DK_UNROLL for (int u = 0; u < 4; ++u, to += 2 * kColumns) {
    store_int(to, _mm256_sub_epi16(_mm256_and_si256(units[u], low_bytes), offset));
    store_int(to + kColumns, _mm256_sub_epi16(_mm256_srli_epi16(units[u], 8), offset));
  }
}

void widen(const LinearJob& job, const WideBlock& block) {
  const int64_t stride = job.format.group_stride(), words = job.format.group * kColumns / 4;
  const char* from = block.packed;
  int32_t* to = block.codes;
  if (job.format.bits == 6) {
    for (int64_t g = 0; g < block.num_groups; ++g, from += stride, to += 8 * kColumns) {
      DK_UNROLL for (int c = 0; c < kColumns; c += kWidth) widen_six_bits(from + c * 4, to + c);
    }
    return;
  }
  for (int64_t g = 0; g < block.num_groups; ++g, from += stride) {
    const auto* const codes = reinterpret_cast<const int32_t*>(from);
    for (int64_t i = 0; i < words; i += kColumns, to += 2 * kColumns) {
      DK_UNROLL for (int c = 0; c < kColumns; c += kWidth) {
        const VI packed = load_int(codes + i + c);
        store_int(to + c, even_codes(packed));
        store_int(to + kColumns + c, odd_codes(packed));
      }
    }
  }
}

// --- tiles in registers --------------------------------------------------------------------------

// sum += products, in the register of the sum: compilers copy or spill sums otherwise.
DK_INLINE void add_to(VI& sum, VI products) {
  asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));
}

// Add the products of a word of each row to the sums.
template <int kRows>
DK_INLINE void add_word(const VI (&code)[kVectors], const int32_t* x,
                        VI (&whole)[kRows][kVectors]) {
  DK_UNROLL for (int r = 0; r < kRows; ++r) {
    const VI a = set1_int(x[r]);
    DK_UNROLL for (int v = 0; v < kVectors; ++v) add_to(whole[r][v], multiply_pairs(code[v], a));
  }
}

// Add the groups of a block to kVectors of the sums [kRows][32] of a tile. x: [group][word][kRows];
// row_scales, row_sums: [group][kRows]. kTiles: one of many tiles, which read widened codes.
template <int kRows, bool kMinima, bool kTiles>
DK_INLINE void add_columns(WideBlock& block, const GroupFormat& format, int64_t column,
                           const int32_t* x, const float* row_scales, const float* row_sums,
                           float* sums) {
  const int64_t words = format.group / 2, stride = format.group_stride();
  const int32_t* codes = block.codes + column;
  const char* packed = block.packed + column * 4;
  const float *scales = block.scales + column, *minima = block.minima + column;
  for (int64_t g = 0; g < block.num_groups; ++g) {
    VI whole[kRows][kVectors];
    DK_UNROLL for (int r = 0; r < kRows; ++r) {
      DK_UNROLL for (int v = 0; v < kVectors; ++v) whole[r][v] = zero_int();
    }
    VI code[kVectors];
    if constexpr (kTiles) {
      for (int64_t i = 0; i < block.ahead_lines; ++i, block.ahead += 64) {
        __builtin_prefetch(block.ahead);
      }
      for (int64_t w = 0; w < words; ++w, codes += kColumns, x += kRows) {
        DK_UNROLL for (int v = 0; v < kVectors; ++v) {
          code[v] = load_int(codes + v * kWidth);
          DK_IN_REGISTER(code[v]);
        }
        add_word<kRows>(code, x, whole);
      }
    } else {
      const auto* unit = reinterpret_cast<const int32_t*>(packed);
      __builtin_prefetch(packed + format.code_bytes() + kStreamAhead);
      for (int64_t w = 0; w < words; w += 2, unit += kColumns, x += 2 * kRows) {
        __builtin_prefetch(reinterpret_cast<const char*>(unit) + kStreamAhead);
        DK_UNROLL for (int v = 0; v < kVectors; ++v) {
          code[v] = even_codes(load_int(unit + v * kWidth));
          DK_IN_REGISTER(code[v]);
        }
        add_word<kRows>(code, x, whole);
        DK_UNROLL for (int v = 0; v < kVectors; ++v) {
          code[v] = odd_codes(load_int(unit + v * kWidth));
          DK_IN_REGISTER(code[v]);
        }
        add_word<kRows>(code, x + kRows, whole);
      }
      packed += stride;
    }
    DK_UNROLL for (int v = 0; v < kVectors; ++v) {
      const VF scale = load(scales + v * kWidth);
      DK_UNROLL for (int r = 0; r < kRows; ++r) {
        float* const sum = sums + r * kPanel + v * kWidth;
        const VF scaled = mul(to_float(whole[r][v]), set1(row_scales[r]));
        VF total = fma(scaled, scale, load(sum));
        if constexpr (kMinima) {
          total = fma(set1(row_sums[r]), load(minima + v * kWidth), total);
        }
        store(sum, total);
      }
    }
    row_scales += kRows;
    row_sums += kRows;
    scales += kColumns;
    minima += kColumns;
  }
}

template <int kRows, bool kMinima, bool kTiles>
__attribute__((noinline)) void add_block(const LinearJob& job, WideBlock& block, int64_t tile,
                                         float* sums) {
  const GroupFormat format = job.format;
  const int64_t at = (tile * job.num_groups + block.first) * kRows;
  const auto* const x = reinterpret_cast<const int32_t*>(job.activations) + at * format.group / 2;
  sums += tile * kRows * kPanel;
  if (block.first == 0) memset(sums, 0, kRows * kPanel * sizeof(float));
  for (int64_t column = 0; column < kColumns; column += kVectors * kWidth) {
    add_columns<kRows, kMinima, kTiles>(block, format, column, x, job.scales + at, job.sums + at,
                                        sums + column);
  }
}

template <int kRows, bool kMinima>
void compute_rows(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const GroupFormat& format = job.format;
  const int64_t num_tiles = job.num_tiles(), panel_bytes = format.panel_bytes(job.num_units * 4);
  const int64_t stride = format.group_stride();
  const int64_t most = even_blocks(job.num_groups, kBlockK / format.group, 1);
  char* const memory = scratch(kRegionScratch, kCodeBytes + 2 * kNumberBytes +
                                                   num_tiles * kRows * kPanel * 4);
  WideBlock block{};
  block.codes = reinterpret_cast<int32_t*>(memory);
  block.scales = reinterpret_cast<float*>(memory + kCodeBytes);
  block.minima = reinterpret_cast<float*>(memory + kCodeBytes + kNumberBytes);
  auto* const sums = reinterpret_cast<float*>(memory + kCodeBytes + 2 * kNumberBytes);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const panel = static_cast<const char*>(job.args->packed) + p * panel_bytes;
    for (int64_t g = 0; g < job.num_groups; g += most) {
      block.first = g;
      block.num_groups = job.num_groups - g < most ? job.num_groups - g : most;
      block.packed = panel + format.codes_at(g);
      unpack_scales(job, panel, block);
      if (num_tiles == 1 && format.bits == 8) {
        add_block<kRows, kMinima, false>(job, block, 0, sums);
        continue;
      }
      widen(job, block);
      const int64_t num_bytes = format.bytes_of(g, block.num_groups);
      const int64_t sharing = num_tiles < kAheadTiles ? num_tiles : kAheadTiles;
      block.ahead = block.packed + block.num_groups * stride;
      const int64_t parts = sharing * block.num_groups * (kVectorsPerPanel / kVectors);
      block.ahead_lines = (num_bytes / 64 + parts - 1) / parts;
      for (int64_t t = 0; t < num_tiles; ++t) {
        if (t == sharing) block.ahead_lines = 0;
        add_block<kRows, kMinima, true>(job, block, t, sums);
      }
    }
    finish_panel(job, p, sums);
  }
}

template <bool kMinima, int... kMore>
void compute_heights(const LinearJob& job, int64_t first_panel, int64_t end_panel,
                     std::integer_sequence<int, kMore...>) {
  using Compute = void (*)(const LinearJob&, int64_t, int64_t);
  static constexpr Compute by_rows[] = {compute_rows<kMinRows + kMore, kMinima>...};
  by_rows[job.tile_rows - kMinRows](job, first_panel, end_panel);
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const auto heights = std::make_integer_sequence<int, kMaxRows - kMinRows + 1>{};
  if (job.format.has_minima) {
    compute_heights<true>(job, first_panel, end_panel, heights);
  } else {
    compute_heights<false>(job, first_panel, end_panel, heights);
  }
}

// --- activations ---------------------------------------------------------------------------------

// Write x[0, group) * factor to nearest even as words, `stride` apart; returns the sum of these
// numbers. x: at least `group` numbers, a multiple of 16.
DK_INLINE int32_t round_words(const uint16_t* x, int64_t group, float factor, int32_t* words,
                              int64_t stride) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  VI sum = zero_int();
  for (int64_t k = 0; k < group; k += 16) {
    const VI a = round_to_int(mul(load_bf16(x + k), set1(factor)));
    const VI b = round_to_int(mul(load_bf16(x + k + 8), set1(factor)));
    sum = add_int(sum, add_int(a, b));
    // Packing works within 128-bit halves: a0-3 b0-3, a4-7 b4-7.
    const VI halves = _mm256_shuffle_epi8(_mm256_packs_epi32(a, b), order);
    int32_t each[kWidth];
    store_int(each, _mm256_permute4x64_epi64(halves, 0xd8));
    DK_UNROLL for (int i = 0; i < kWidth; ++i, words += stride) *words = each[i];
  }
  return sum_of(sum);
}

// Row r of a tile, which is row `at` of the arrays in the tile's first group.
void pack_row(const LinearJob& job, const uint16_t* x, int64_t at, int32_t* words) {
  const int64_t K = job.args->K, group = job.format.group, stride = job.tile_rows;
  const float least = write_scales(job, x, at);
  uint16_t padded[kMostGroup] = {};
  for (int64_t k = 0; k < K; k += group, at += stride, words += group / 2 * stride) {
    const int64_t n = K - k < group ? K - k : group;
    const float scale = job.scales[at], inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const uint16_t* from = x + k;
    if (inverse == 0.0f || n < group) {
      if (inverse > 0.0f) memcpy(padded, from, n * sizeof(*from));
      from = padded;
    }
    const bool is_refined = job.refined_from && scale > least;
    const float step = is_refined ? kLowScale : 1.0f;
    const float factor = is_refined ? inverse * (1 << kLowBits) : inverse;
    const int32_t sum = round_words(from, group, factor, words, stride);
    job.scales[at] = scale * step;
    job.sums[at] = scale * step * static_cast<float>(sum);
  }
}

void pack_rows(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t tile_rows = job.tile_rows, words = job.num_units * 2 * tile_rows;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const int64_t left = job.num_rows - t * tile_rows, rows = left < tile_rows ? left : tile_rows;
    const int64_t at = t * job.num_groups * tile_rows;
    auto* const out = reinterpret_cast<int32_t*>(job.activations) + t * words;
    if (rows < tile_rows) {
      memset(out, 0, words * 4);
      memset(job.scales + at, 0, job.num_groups * tile_rows * 4);
      memset(job.sums + at, 0, job.num_groups * tile_rows * 4);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* const x = job.x + (t * tile_rows + r) * job.args->ldx;
      pack_row(job, x, at + r, out + r);
    }
  }
}

constexpr float kRowCost = 0.5f;

}  // namespace

const LinearKernels wide_groups = {kMaxRows, kMaxRows, kMinRows, kFewestRows, kMostRows,
                                   kRowCost, 8,        1,        pack_rows,   compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
