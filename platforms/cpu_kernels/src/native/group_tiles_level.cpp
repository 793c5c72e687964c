// Packed linear with codes in groups for many rows, with matrix tiles (tiles.h).
//
// A product of tiles has the codes of a group and 16 rows. Its sums are as exact as those of
// linear_groups_level.cpp, and the same floating point operations follow in the same order: bits
// are equal. Packed activations and their low parts: [tile of 16 rows][group][row][k of the group].
#include "group_activations.h"
#include "group_scales.h"
#include "linear_epilogue.h"
#include "six_bits.h"
#include "team.h"
#include "tiles.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kTileBlockK = 1024;  // 32 KiB of signed codes, kept in the L1 cache
constexpr int64_t kBlockHalf = kTileBlockK * kTileColumns;
constexpr int64_t kPartK = 32;        // k of a product of tiles, at most
constexpr int kBatch = 4;             // groups that are multiplied, then scaled

// Some groups of a panel, and what prefetching reads.
struct TileBlock {
  const LinearJob& job;
  const char* panel;
  char* codes;  // signed, [half of the columns][unit][16 columns][4 k]
  int64_t first, num_groups;
  const char* ahead;  // the next block of packed codes, `ahead_lines` lines of each part of a tile
  int64_t ahead_lines;
};

// Codes of 4 and 6 bits are unpacked to bytes; all lose their offset.
DK_INLINE void write_signed_codes(const TileBlock& block) {
  const GroupFormat& format = block.job.format;
  char* to = block.codes;
  const VI flip = _mm512_set1_epi8(static_cast<char>(128)), mask = _mm512_set1_epi8(15);
  const VI offset = _mm512_set1_epi8(static_cast<char>(format.offset()));
  for (int64_t g = 0; g < block.num_groups; ++g) {
    const char* const from = block.panel + format.codes_at(block.first + g);
    if (format.bits == 6) {
      DK_UNROLL for (int half = 0; half < 2; ++half) {
        VI codes[4];
        read_six_bits(from + half * 64, codes);
        DK_UNROLL for (int u = 0; u < 4; ++u) {
          _mm512_store_si512(to + half * kBlockHalf + u * 64, _mm512_sub_epi8(codes[u], offset));
        }
      }
      to += 256;
      continue;
    }
    for (int64_t i = 0; i < format.code_bytes(); i += kUnitBytes) {
      DK_UNROLL for (int half = 0; half < 2; ++half) {
        const VI codes = _mm512_load_si512(from + i + half * 64);
        char* const out = to + half * kBlockHalf;
        if (format.bits == 8) {
          _mm512_store_si512(out, _mm512_xor_si512(codes, flip));
        } else {
          const VI low = _mm512_and_si512(codes, mask);
          const VI high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
          _mm512_store_si512(out, _mm512_sub_epi8(low, offset));
          _mm512_store_si512(out + 64, _mm512_sub_epi8(high, offset));
        }
      }
      to += format.bits == 8 ? 64 : 128;
    }
  }
}

#define DK_MULTIPLY_GROUP(number)                                                \
  _tile_zero(number);                                                            \
  for (int64_t k = 0; k < group; k += part) {                                    \
    _tile_loadd(4, inputs + k, group);                                           \
    _tile_loadd(6, codes + k * kTileColumns, kTileRowBytes);                     \
    _tile_dpbssd(number, 4, 6);                                                  \
  }                                                                              \
  inputs += kTileRows * group;                                                   \
  codes += kTileColumns * group;                                                 \
  _tile_stored(number, products + number * kProducts, kTileRowBytes);

constexpr int64_t kProducts = kTileRows * kTileColumns;  // of a group

// Multiplies the next groups, up to four at once. kOnePart: a group is one product of tiles.
struct Multiplier {
  const char *inputs, *codes;
  const int64_t group, part;

  DK_INLINE void skip(int64_t num_groups) {
    inputs += num_groups * kTileRows * group;
    codes += num_groups * kTileColumns * group;
  }
  template <bool kOnePart>
  DK_INLINE void multiply(int64_t num_groups, int32_t* products) {
    const int64_t part = kOnePart ? group : this->part;
    DK_MULTIPLY_GROUP(0)
    if (num_groups > 1) { DK_MULTIPLY_GROUP(1) }
    if (num_groups > 2) { DK_MULTIPLY_GROUP(2) }
    if (num_groups > 3) { DK_MULTIPLY_GROUP(3) }
  }
  template <bool kOnePart>
  DK_INLINE void multiply_first(int32_t* products) {
    const int64_t part = kOnePart ? group : this->part;
    DK_MULTIPLY_GROUP(0)
  }
};
#undef DK_MULTIPLY_GROUP

// Add the products of low parts to those of a group, shifted. low: products of a tile.
DK_INLINE void add_low_products(int32_t* products, const int32_t* low) {
  for (int64_t i = 0; i < kProducts; i += kWidth) {
    const VI high = shift_left(load_int(products + i), kLowBits);
    store_int(products + i, add_int(high, load_int(low + i)));
  }
}

// Add all groups of a block to the sums [rows][32], 16 rows and 16 columns after the other. The
// next products are computed before the previous ones are scaled, also those of the next sums;
// those of low parts when they are needed.
template <ScaleKind kKind, bool kMinima, bool kOnePart>
__attribute__((noinline)) void add_block(const TileBlock& block, float* all_sums) {
  static_assert(kWidth == kTileColumns, "a vector has the columns of a tile");
  const LinearJob& job = block.job;
  const int64_t group = job.format.group, num_parts = 2 * job.num_tiles();
  const auto multiplier_of = [&](int64_t number) {
    const int64_t at = (number / 2 * job.num_groups + block.first) * kTileRows;
    const char* const codes = block.codes + number % 2 * kBlockHalf;
    return Multiplier{job.activations + at * group, codes, group, kPartK};
  };
  alignas(64) int32_t products[2 * kBatch * kProducts], low_products[kProducts];
  int32_t *done = products, *next = products + kBatch * kProducts;
  multiplier_of(0).template multiply<kOnePart>(block.num_groups, done);
  for (int64_t number = 0; number < num_parts; ++number) {
    const int64_t half = number % 2, tile = number / 2;
    const int64_t at = (tile * job.num_groups + block.first) * kTileRows;
    const float *row_scales = job.scales + at, *row_sums = job.sums + at;
    float* const sums = all_sums + tile * kTileRows * kPanel + half * kWidth;
    Scales scales(job.format, block.panel, block.first);
    for (int64_t i = 0; i < block.ahead_lines; ++i) {
      __builtin_prefetch(block.ahead + (number * block.ahead_lines + i) * 64, 0, 2);  // L2
    }
    VF acc[kTileRows];
    DK_UNROLL for (int r = 0; r < kTileRows; ++r) {
      acc[r] = block.first ? load(sums + r * kPanel) : zero();
    }
    Multiplier multiplier = multiplier_of(number), low = multiplier_of(number);
    if (job.low) low.inputs += job.low - job.activations;
    const uint8_t* has_low = job.low ? job.has_low + at / kTileRows : nullptr;
    multiplier.skip(kBatch);
    for (int64_t left = block.num_groups; left > 0; left -= kBatch) {
      if (left > kBatch) {
        multiplier.template multiply<kOnePart>(left - kBatch, next);
      } else if (number + 1 < num_parts) {
        multiplier_of(number + 1).template multiply<kOnePart>(block.num_groups, next);
      }
      const int64_t num_groups = left < kBatch ? left : kBatch;
      for (int64_t g = 0; g < num_groups; ++g) {
        int32_t* const product = done + g * kProducts;
        const VF scale = scales.load<kKind>(half * kWidth);
        VF minimum = zero();
        if constexpr (kMinima) minimum = scales.load<kKind>(kColumns + half * kWidth);
        const auto add_rows = [&](auto row_scale) __attribute__((always_inline)) {
          DK_UNROLL for (int r = 0; r < kTileRows; ++r) {
            const VF sum = mul(to_float(load_int(product + r * kWidth)), row_scale(r));
            acc[r] = fma(sum, scale, acc[r]);
            if constexpr (kMinima) acc[r] = fma(set1(row_sums[r]), minimum, acc[r]);
          }
        };
        if (has_low && *has_low++) {
          Multiplier(low).multiply_first<kOnePart>(low_products);
          add_low_products(product, low_products);
          add_rows([&](int r) { return set1(row_scales[r] * kLowScale); });
        } else {
          add_rows([&](int r) { return set1(row_scales[r]); });
        }
        low.skip(1);
        row_scales += kTileRows;
        row_sums += kTileRows;
        scales.next();
      }
      int32_t* const free = done;
      done = next;
      next = free;
    }
    DK_UNROLL for (int r = 0; r < kTileRows; ++r) store(sums + r * kPanel, acc[r]);
  }
}

using AddBlock = void (*)(const TileBlock& block, float* sums);

DK_INLINE AddBlock add_block_of(const GroupFormat& format) {
  switch (format.scales) {
    case kBf16Scales:
      return format.group <= kPartK ? add_block<kBf16Scales, false, true>
                                    : add_block<kBf16Scales, false, false>;
    case kHalfScales:
      return format.has_minima ? add_block<kHalfScales, true, true>
                               : add_block<kHalfScales, false, true>;
    default:
      return format.has_minima ? add_block<kTwoLevelScales, true, true>
                               : add_block<kTwoLevelScales, false, true>;
  }
}

void compute(const LinearJob& job, int64_t first_panel, int64_t end_panel) {
  const GroupFormat& format = job.format;
  const int64_t num_tiles = job.num_tiles(), part = format.group < kPartK ? format.group : kPartK;
  const int64_t panel_bytes = format.panel_bytes(job.num_units * 4);
  const int64_t most = even_blocks(job.num_groups, kTileBlockK / format.group, 1);
  char* const codes = scratch(kRegionScratch, 2 * kBlockHalf + num_tiles * kTileRows * kPanel * 4);
  auto* const sums = reinterpret_cast<float*>(codes + 2 * kBlockHalf);
  const AddBlock add_block = add_block_of(format);
  const Tiles tiles(kTileRows, part);
  for (int64_t p = first_panel; p < end_panel; ++p) {
    const char* const panel = static_cast<const char*>(job.args->packed) + p * panel_bytes;
    for (int64_t g = 0; g < job.num_groups; g += most) {
      const int64_t n = job.num_groups - g < most ? job.num_groups - g : most;
      const char* const end = panel + format.codes_at(g + n - 1) + format.group_stride();
      const int64_t lines = format.bytes_of(g, n) / 64 / (2 * num_tiles) + 1;
      const TileBlock block{job, panel, codes, g, n, end, lines};
      write_signed_codes(block);
      Tiles::publish();
      add_block(block, sums);
    }
    finish_panel(job, p, sums);
  }
}

void pack_rows(const LinearJob& job, int64_t first_tile, int64_t end_tile) {
  const int64_t padded_k = job.num_units * 4, group = job.format.group;
  for (int64_t t = first_tile; t < end_tile; ++t) {
    const int64_t left = job.num_rows - t * kTileRows, rows = left < kTileRows ? left : kTileRows;
    auto* const q = reinterpret_cast<int8_t*>(job.activations) + t * kTileRows * padded_k;
    auto* const low = job.low ? reinterpret_cast<int8_t*>(job.low) + t * kTileRows * padded_k
                              : nullptr;
    if (rows < kTileRows) {
      memset(q, 0, kTileRows * padded_k);
      if (low) memset(low, 0, kTileRows * padded_k);
    }
    quantize_tile(job, t, rows, q, low, group, kTileRows * group);
  }
}

constexpr float kRowCost = 1.0f;
constexpr int64_t kFewestTileRows = 256, kMostTileRows = 512;

}  // namespace

const LinearKernels group_tiles = {
    kTileRows, 0, kTileRows, kFewestTileRows, kMostTileRows, kRowCost, 4, 1, pack_rows, compute};

}  // namespace dk::DK_LEVEL_NAMESPACE
