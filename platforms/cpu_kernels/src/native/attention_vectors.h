// The products of attention's tiles with vector registers.
#pragma once

namespace dk::DK_LEVEL_NAMESPACE {

class ProductState {};  // nothing to prepare for an item

template <int R, int P>
static void score_tile(const ScoreTile& t) {
  Vec sum[R][P];
  DK_UNROLL for (int r = 0; r < R; ++r) DK_UNROLL for (int j = 0; j < P; ++j) sum[r][j] = zero();
  const uint32_t* query = t.queries;
  for (int64_t i = 0; i < t.num_pairs; ++i) {
    Words key[P];
    DK_UNROLL for (int j = 0; j < P; ++j) {
      prefetch(t.ahead + (i * P + j) * 64);
      key[j] = load_words(t.keys[j] + i * kLanes);
    }
    DK_UNROLL for (int r = 0; r < R; ++r) {
      const Words x = set_words(query[r * t.query_stride + i]);
      DK_UNROLL for (int j = 0; j < P; ++j) sum[r][j] = dot(sum[r][j], key[j], x);
    }
  }
  DK_UNROLL for (int r = 0; r < R; ++r) DK_UNROLL for (int j = 0; j < P; ++j)
    store(t.scores + r * kChunk + j * kPanel, sum[r][j]);
}

template <int R, int V>
static void value_columns(const ValueTile& t, int panel) {
  Vec sum[R][V];
  float* const out = t.out + panel * kLanes;
  DK_UNROLL for (int r = 0; r < R; ++r) DK_UNROLL for (int j = 0; j < V; ++j)
    sum[r][j] = t.fresh || t.keep ? zero() : load(out + r * t.out_stride + j * kLanes);
  for (int s = 0; s < t.num_segments; ++s) {
    const ValueSegment& segment = t.segments[s];
    const uint32_t* values = segment.values + panel * segment.panel_stride;
    const uint32_t* weights = t.weights + segment.first_pair;
    const char* ahead = segment.ahead + panel * segment.num_pairs * 64;
    for (int64_t i = 0; i < segment.num_pairs; ++i) {
      Words value[V];
      DK_UNROLL for (int j = 0; j < V; ++j) {
        prefetch(ahead + (i * V + j) * 64);
        value[j] = load_words(values + j * segment.panel_stride + i * kLanes);
      }
      DK_UNROLL for (int r = 0; r < R; ++r) {
        const Words x = set_words(weights[r * (kChunk / 2) + i]);
        DK_UNROLL for (int j = 0; j < V; ++j) sum[r][j] = dot(sum[r][j], value[j], x);
      }
    }
  }
  DK_UNROLL for (int r = 0; r < R; ++r) DK_UNROLL for (int j = 0; j < V; ++j) {
    float* const place = out + r * t.out_stride + j * kLanes;
    if (t.keep) sum[r][j] = fma(load(place), set(t.keep[r]), mul(sum[r][j], set(t.take[r])));
    store(place, sum[r][j]);
  }
}

template <int R>
static void value_tile(const ValueTile& t) {
  constexpr int kWide = kMaxSums / R >= 8 ? 8 : kMaxSums / R >= 4 ? 4 : kMaxSums / R >= 2 ? 2 : 1;
  int panel = 0;
  for (; panel + kWide <= t.num_panels; panel += kWide) value_columns<R, kWide>(t, panel);
  if constexpr (kWide > 4) {
    for (; panel + 4 <= t.num_panels; panel += 4) value_columns<R, 4>(t, panel);
  }
  if constexpr (kWide > 2) {
    for (; panel + 2 <= t.num_panels; panel += 2) value_columns<R, 2>(t, panel);
  }
  if constexpr (kWide > 1) {
    for (; panel < t.num_panels; ++panel) value_columns<R, 1>(t, panel);
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
