// Activations of linear_groups_level.cpp for tiles of several rows: the numbers of quantize_tile
// (group_activations.h), with vectors whose lanes are rows of the tile.
#pragma once
#include "group_activations.h"
#include "team.h"

#if DK_LEVEL >= 2
namespace dk::DK_LEVEL_NAMESPACE {

constexpr int64_t kFewestPackedRows = 3;  // tiles of fewer rows leave most lanes unused

struct RowScales {
  VF scale, inverse;
};

// scale_of for each lane.
DK_INLINE RowScales scales_of(VF largest) {
  const __mmask16 none = _mm512_cmp_ps_mask(largest, set1(1e-30f), _CMP_LT_OQ);
  const __mmask16 wrong = _mm512_cmp_ps_mask(largest, set1(1e33f), _CMP_NLE_UQ);
  const VI bits = _mm512_castps_si512(div(largest, set1(127.0f)));
  const VI rounded = _mm512_and_si512(add_int(bits, set1_int(0xff)), set1_int(~0xff));
  const VF scale = _mm512_maskz_mov_ps(~none, as_float(rounded));
  return {_mm512_mask_mov_ps(scale, wrong, set1(__builtin_nanf(""))),
          _mm512_maskz_div_ps(~(none | wrong), set1(1.0f), scale)};
}

// A tile of activations. Lanes beyond `rows`, padding, have scales and sums of zero.
template <bool kRefined>
struct TilePacker {
  const LinearJob& job;
  const int64_t tile, rows, begin;  // begin: of the tile's first group in the arrays of the job
  const GroupFormat format;
  const __mmask16 kept;             // lanes in the arrays of the job
  float* const numbers;             // [group][16 rows]: magnitudes, then inverse scales
  int32_t* const totals;            // [group][16 rows]: sums of 128 q + low, of refined groups
  int8_t* const q;                  // [row][k]

  static int64_t scratch_bytes(const LinearJob& job, int64_t rows) {
    const int64_t row_bytes = job.num_units * 4;
    return (rows * row_bytes + 63) / 64 * 64 + job.num_groups * kWidth * 4 * (kRefined ? 2 : 1);
  }
  TilePacker(const LinearJob& job_, int64_t tile_, int64_t rows_, char* memory)
      : job(job_), tile(tile_), rows(rows_), begin(tile_ * job_.num_groups * job_.tile_rows),
        format(job_.format), kept(first(job_.tile_rows)),
        numbers(reinterpret_cast<float*>(memory)),
        totals(reinterpret_cast<int32_t*>(memory) + (kRefined ? job_.num_groups * kWidth : 0)),
        q(reinterpret_cast<int8_t*>(totals + job_.num_groups * kWidth)) {}

  DK_INLINE int64_t in_group(int64_t k) const {
    return job.args->K - k < format.group ? job.args->K - k : format.group;
  }
  DK_INLINE const uint16_t* input(int64_t r) const {
    return job.x + (tile * job.tile_rows + r) * job.args->ldx;
  }

  void find_largest() {
    memset(numbers, 0, job.num_groups * kWidth * 4);
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* const x = input(r);
      auto* to = reinterpret_cast<uint32_t*>(numbers) + r;
      for (int64_t k = 0; k < job.args->K; k += format.group, to += kWidth) {
        *to = largest_of(x + k, in_group(k)) << 16;
      }
    }
  }
  void write_scales() {
    VF total = zero();
    for (int64_t g = 0; g < job.num_groups; ++g) {
      const int64_t at = begin + g * job.tile_rows;
      const RowScales found = scales_of(load(numbers + g * kWidth));
      store(numbers + g * kWidth, found.inverse);
      _mm512_mask_storeu_ps(job.scales + at, kept, found.scale);
      _mm512_mask_storeu_ps(job.start_products + at, kept, mul(set1(-kStart), found.scale));
      total = add(total, found.scale);
    }
    if constexpr (kRefined) {
      const VF least = mul(total, set1(job.refined_from / static_cast<float>(job.num_groups)));
      for (int64_t g = 0; g < job.num_groups; ++g) {
        const VF scale = _mm512_maskz_loadu_ps(kept, job.scales + begin + g * job.tile_rows);
        job.has_low[tile * job.num_groups + g] =
            static_cast<uint8_t>(_mm512_cmp_ps_mask(scale, least, _CMP_GT_OQ));
      }
    }
  }
  void round_rows() {
    const int64_t K = job.args->K, padded_k = job.num_units * 4;
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* const x = input(r);
      const float* inverse = numbers + r;
      int8_t* to = q + r * padded_k;
      [[maybe_unused]] int32_t* total = totals + r;
      [[maybe_unused]] const uint8_t* has_low = nullptr;
      [[maybe_unused]] int8_t* low = nullptr;
      if constexpr (kRefined) {
        has_low = job.has_low + tile * job.num_groups;
        low = reinterpret_cast<int8_t*>(job.low) + (tile * job.tile_rows + r) * padded_k;
      }
      for (int64_t k = 0; k < K; k += format.group, to += format.group, inverse += kWidth) {
        const int64_t n = in_group(k);
        if (n < format.group) memset(to + n, 0, format.group - n);
        if constexpr (kRefined) {
          if (*has_low++ >> r & 1) {
            if (n < format.group) memset(low + n, 0, format.group - n);
            *total = round_finely(x + k, n, *inverse, to, low);
          } else {
            memset(low, 0, format.group);
            round_group(x + k, n, *inverse, to);
          }
          total += kWidth;
          low += format.group;
        } else {
          round_group(x + k, n, *inverse, to);
        }
      }
    }
  }
  // sum: of q in group g.
  DK_INLINE void write_sums(int64_t g, VI sum) {
    const int64_t at = begin + g * job.tile_rows;
    const int32_t offset = format.bits == 8 ? kByteOffset : static_cast<int32_t>(format.offset());
    const VI offsets = set1_int(offset);
    const VI start = _mm512_sub_epi32(set1_int(kStartBits), _mm512_mullo_epi32(offsets, sum));
    _mm512_mask_storeu_epi32(job.starts + at, kept, start);
    VI all = sum;
    VF scale = _mm512_maskz_loadu_ps(kept, job.scales + at);
    if constexpr (kRefined) {
      const VI high = shift_left(sum, kLowBits);
      const __mmask16 refined = job.has_low[tile * job.num_groups + g];
      all = _mm512_mask_loadu_epi32(high, refined, totals + g * kWidth);
      const VI rest = _mm512_mullo_epi32(offsets, _mm512_sub_epi32(all, high));
      _mm512_mask_storeu_epi32(job.low_starts + at, kept,
                               _mm512_sub_epi32(set1_int(kLowStart), rest));
      scale = mul(scale, set1(kLowScale));
    }
    if (format.has_minima) {
      _mm512_mask_storeu_ps(job.sums + at, kept, mul(scale, to_float(all)));
    }
  }
  // Transpose q to out[unit][row of the tile], and write the sums of groups.
  void transpose(uint32_t* out) {
    const int64_t padded_k = job.num_units * 4, group_units = format.group / 4;
    int64_t group = 0, left = group_units;
    VI sum = zero_int();
    for (int64_t u = 0; u < job.num_units; u += 16) {
      const int64_t units = job.num_units - u < 16 ? job.num_units - u : 16;
      const __mmask16 words = first(units);
      VI r[16];
      DK_UNROLL for (int i = 0; i < 8; ++i) {
        r[i] = i < rows ? _mm512_maskz_loadu_epi32(words, q + i * padded_k + u * 4) : zero_int();
        r[8 + i] = zero_int();
      }
      transpose_16(r);
      DK_UNROLL for (int i = 0; i < 16; i += 4) {
        if (i == units) break;
        DK_UNROLL for (int j = 0; j < 4; ++j) {
          _mm512_mask_storeu_epi32(out + (u + i + j) * job.tile_rows, kept, r[i + j]);
          const VI pairs = multiply_bytes(_mm512_set1_epi8(1), r[i + j]);
          sum = add_int(sum, multiply_pairs(pairs, set1_int(0x10001)));
        }
        left -= 4;
        if (left == 0) {
          write_sums(group++, sum);
          sum = zero_int();
          left = group_units;
        }
      }
    }
  }
};

// rows: those of the tile that exist; the tile has at most 8.
template <bool kRefined>
void pack_tile(const LinearJob& job, int64_t tile, int64_t rows) {
  char* const memory = scratch(kRegionScratch, TilePacker<kRefined>::scratch_bytes(job, rows));
  TilePacker<kRefined> packer(job, tile, rows, memory);
  packer.find_largest();
  packer.write_scales();
  packer.round_rows();
  const int64_t words = tile * job.tile_rows * job.num_units;
  packer.transpose(reinterpret_cast<uint32_t*>(job.activations) + words);
}

}  // namespace dk::DK_LEVEL_NAMESPACE
#endif
