// The tiles of attention: scores of a tile of rows, their softmax, their weighted values.
//
// A tile has 1 .. kMaxRows query rows. Each score is one chain of products over the pairs of
// features in order, each output element one over the pairs of tokens in order, for every tile
// size: the bits of a row do not depend on the other rows of its tile. Independent of blocks and
// runs.
#pragma once
#include "attention.h"
#include "attention_simd.h"
#ifdef __AMX_BF16__
#include "tiles.h"
#endif

namespace dk::DK_LEVEL_NAMESPACE {

// Registers of vectors: rows x panels sums, the panels' operands, one broadcast (or two halves
// without bf16). kPairsAtOnce: pairs of tokens that are multiplied at once; the last ones of a
// context are padded with zeros.
#ifdef __AMX_BF16__
constexpr int kMaxRows = 16, kMaxPanels = 2, kPairsAtOnce = 8;
#elif DK_LEVEL >= 2
constexpr int kMaxRows = 12, kMaxPanels = 2, kMaxSums = 24, kPairsAtOnce = 1;
#elif DK_LEVEL == 1
constexpr int kMaxRows = 4, kMaxPanels = 1, kMaxSums = 4, kPairsAtOnce = 1;
#else
constexpr int kMaxRows = 2, kMaxPanels = 1, kMaxSums = 2, kPairsAtOnce = 1;
#endif
constexpr float kMasked = -__builtin_inff();
constexpr float kLowest = -1e30f;  // below every score; finite, so that no difference is NaN

class ProductState;  // what a thread prepares for the products of an item

// Rows of queries against up to kMaxPanels panels of 16 keys; scores are not scaled.
struct ScoreTile {
  const uint32_t* queries;  // a row's pairs of features, contiguous
  int64_t query_stride;     // words
  int64_t num_pairs;
  const uint32_t* keys[kMaxPanels];
  const char* ahead;  // memory to prefetch, as much as this tile reads
  float* scores;      // row stride kChunk
  ProductState* state;
};

// Values of consecutive tokens of a chunk.
struct ValueSegment {
  const uint32_t* values;  // [D / 16][panel_stride / 16][16 features], a word per pair of tokens
  int64_t panel_stride;    // words
  int64_t first_pair, num_pairs;  // the weights of these tokens; their number
  const char* ahead;
};

// Rows of weights (bf16) times values, over segments in order.
struct ValueTile {
  const uint32_t* weights;  // pairs of tokens; row stride kChunk / 2
  const ValueSegment* segments;
  int num_segments;
  int num_panels;  // D / 16
  float* out;      // row stride out_stride
  int64_t out_stride;
  bool fresh;         // start from 0 instead of adding to `out`
  const float* keep;  // if given: out[r] = out[r] * keep[r] + sum * take[r], the sum from 0 on
  const float* take;
  ProductState* state;
};

}  // namespace dk::DK_LEVEL_NAMESPACE

#ifdef __AMX_BF16__
#include "attention_matrices.h"
#else
#include "attention_vectors.h"
#endif

namespace dk::DK_LEVEL_NAMESPACE {

struct TileFunctions {
  void (*score_one)(const ScoreTile&);
  void (*score_two)(const ScoreTile&);  // the same where kMaxPanels is 1
  void (*values)(const ValueTile&);
};
#define DK_TILE(R) {score_tile<R, 1>, score_tile<R, kMaxPanels>, value_tile<R>}
static const TileFunctions kTiles[kMaxRows + 1] = {
    {},         DK_TILE(1),
    DK_TILE(2),
#if DK_LEVEL >= 1
    DK_TILE(3), DK_TILE(4),
#endif
#if DK_LEVEL >= 2
    DK_TILE(5), DK_TILE(6), DK_TILE(7),  DK_TILE(8),
    DK_TILE(9), DK_TILE(10), DK_TILE(11), DK_TILE(12),
#endif
#ifdef __AMX_BF16__
    DK_TILE(13), DK_TILE(14), DK_TILE(15), DK_TILE(16),
#endif
};
#undef DK_TILE

// Turn scores of a chunk into weights. Panels first_panel .. end_panel exist.
struct SoftmaxTile {
  float* scores;      // changed; row stride kChunk
  uint16_t* weights;  // bf16, row stride kChunk
  int num_rows, first_panel, end_panel;
  const int* first;  // positions that row r sees, within the chunk: first[r] .. end[r]
  const int* end;
  const float* key_scales;  // by position of the chunk, finite; NULL if keys are not integers
  const float* value_scales;
  float scale, soft_cap;
  float* max;  // out, by row: the greatest score times log2(e), kLowest if it sees no position
  float* sum;  // out, by row: of the weights, before they are rounded
};

static DK_INLINE void shape_scores(const SoftmaxTile& t, float* scores) {
  for (int j = t.first_panel; j < t.end_panel; ++j) {
    Vec x = load(scores + j * kPanel);
    if (t.key_scales) x = mul(x, load(t.key_scales + j * kPanel));
    if (t.soft_cap > 0.f) {
      x = mul(tanh_of(mul(x, set(t.scale / t.soft_cap))), set(t.soft_cap));
    }
    store(scores + j * kPanel, x);
  }
}

// Return the maximum score that the row sees; hide the other scores.
static DK_INLINE Vec mask_scores(const SoftmaxTile& t, float* scores, int first, int end) {
  Vec best = set(kLowest);
  if (first <= t.first_panel * kPanel && end >= t.end_panel * kPanel) {
    for (int j = t.first_panel; j < t.end_panel; ++j) best = max(best, load(scores + j * kPanel));
    return best;
  }
  for (int j = t.first_panel; j < t.end_panel; ++j) {
    const int start = j * kPanel;
    const Vec x = keep_lanes(load(scores + start), first - start, end - start, set(kMasked));
    store(scores + start, x);
    best = max(best, x);
  }
  return best;
}

static DK_INLINE void softmax_tile(const SoftmaxTile& t) {
  const float factor = (t.soft_cap > 0.f ? 1.f : t.scale) * kLog2E;
  const bool shaped = t.key_scales || t.soft_cap > 0.f;
  Vec best[kMaxRows];
  // All maxima first, then all exponentials: latencies of different rows overlap.
  for (int r = 0; r < t.num_rows; ++r) {
    if (shaped) shape_scores(t, t.scores + r * kChunk);
    best[r] = mask_scores(t, t.scores + r * kChunk, t.first[r], t.end[r]);
  }
  for (int r = 0; r < t.num_rows; ++r) t.max[r] = reduce_max(best[r]) * factor;
  for (int r = 0; r < t.num_rows; ++r) {
    const float* const scores = t.scores + r * kChunk;
    uint16_t* const weights = t.weights + r * kChunk;
    const Vec top = set(-t.max[r]);
    Vec sum = zero();
    int j = t.first_panel;
    for (; j + 2 <= t.end_panel; j += 2) {
      Vec x = exp2_of(fma(load(scores + j * kPanel), set(factor), top));
      Vec y = exp2_of(fma(load(scores + (j + 1) * kPanel), set(factor), top));
      sum = add(add(sum, x), y);
      if (t.value_scales) x = mul(x, load(t.value_scales + j * kPanel));
      if (t.value_scales) y = mul(y, load(t.value_scales + (j + 1) * kPanel));
      store_bf16_pair(weights + j * kPanel, x, y);
    }
    if (j < t.end_panel) {
      Vec x = exp2_of(fma(load(scores + j * kPanel), set(factor), top));
      sum = add(sum, x);
      if (t.value_scales) x = mul(x, load(t.value_scales + j * kPanel));
      store_bf16(weights + j * kPanel, x);
    }
    t.sum[r] = reduce_add(sum);
  }
}

// The factors of the previous results and of a chunk's results when the maxima of rows are merged:
// keep and take, by row. The maxima and sums are updated. n <= 16 rows.
static DK_INLINE void merge_rows(int n, float* max_so_far, float* sum_so_far,
                                 const float* chunk_max, const float* chunk_sum, float* keep,
                                 float* take) {
  float room[4][kLanes] = {};
  for (int r = 0; r < n; ++r) {
    room[0][r] = max_so_far[r];
    room[1][r] = chunk_max[r];
    room[2][r] = sum_so_far[r];
    room[3][r] = chunk_sum[r];
  }
  const Vec old_max = load(room[0]), new_max = load(room[1]), top = max(old_max, new_max);
  const Vec kept = exp2_of(sub(old_max, top)), taken = exp2_of(sub(new_max, top));
  const Vec sum = fma(load(room[2]), kept, mul(load(room[3]), taken));
  store(room[0], top);
  store(room[1], kept);
  store(room[2], taken);
  store(room[3], sum);
  for (int r = 0; r < n; ++r) {
    max_so_far[r] = room[0][r];
    keep[r] = room[1][r];
    take[r] = room[2][r];
    sum_so_far[r] = room[3][r];
  }
}

// Write the rounded result of all chunks of a row. The sink joins the softmax here, as a last chunk
// without values: the bits do not depend on the split of the context.
static DK_INLINE void write_row(const dk_attention_args& a, const AttentionShape& shape,
                                int64_t query_head, const float* from, float max, float sum,
                                uint16_t* to) {
  uint16_t rounded[kMaxHeadSize];
  float keep = 1.f, take;
  if (a.sinks) {
    const float sink = a.sinks[query_head] * kLog2E, one = 1.f;
    merge_rows(1, &max, &sum, &sink, &one, &keep, &take);
  }
  for (int64_t d = 0; d < shape.width; d += kLanes) {
    store_bf16(rounded + d, mul(load(from + d), set(keep / sum)));
  }
  memcpy(to, rounded, shape.value_size * 2);
}

}  // namespace dk::DK_LEVEL_NAMESPACE
