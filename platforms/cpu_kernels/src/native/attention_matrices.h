// The products of attention's tiles with matrix tiles (AMX).
//
// The cache stores panels in the layout of weight tiles: a row is a pair of features (keys) or a
// pair of tokens (values) of 16 columns. A step multiplies 16 pairs of features, or 8 pairs of
// tokens: these are the 16 tokens of a panel, so that no step crosses blocks. Registers: 0 to 3
// sums; 4 and 5 inputs of 16 and of 8 pairs; 6 and 7 weights of 16 and of 8 pairs.
#pragma once

namespace dk::DK_LEVEL_NAMESPACE {

// The configuration of this thread's tiles while an item is processed.
class ProductState {
 public:
  ProductState() = default;
  ~ProductState() {
    if (rows_) _tile_release();
  }
  ProductState(const ProductState&) = delete;
  ProductState& operator=(const ProductState&) = delete;

  // Set the number of rows of inputs and sums.
  DK_INLINE void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    TileLayout layout{};
    layout.palette = 1;
    for (int i = 0; i < kNumTiles; ++i) {
      const bool is_input = i == 4 || i == 5, is_half = i == 5 || i == 7, is_weight = i > 5;
      layout.row_bytes[i] = is_input && is_half ? kTileRowBytes / 2 : kTileRowBytes;
      layout.rows[i] = static_cast<uint8_t>(!is_weight ? rows : is_half ? 8 : 16);
    }
    Tiles::publish();
    _tile_loadconfig(&layout);
  }

 private:
  int rows_ = 0;
};

DK_INLINE void prefetch_rows(const char* from, int num_rows) {
  for (int i = 0; i < num_rows; ++i) prefetch(from + i * 64);
}

template <int R, int P>
static void score_tile(const ScoreTile& t) {
  t.state->configure(R);
  Tiles::publish();
  const int64_t stride = t.query_stride * 4;
  _tile_zero(0);
  if constexpr (P == 2) _tile_zero(1);
  int64_t i = 0;
  for (; i + 16 <= t.num_pairs; i += 16) {
    prefetch_rows(t.ahead + i * P * 64, 16 * P);
    _tile_loadd(4, t.queries + i, stride);
    _tile_loadd(6, t.keys[0] + i * kLanes, kTileRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (P == 2) {
      _tile_loadd(6, t.keys[1] + i * kLanes, kTileRowBytes);
      _tile_dpbf16ps(1, 4, 6);
    }
  }
  if (i < t.num_pairs) {  // the number of features is a multiple of 16
    prefetch_rows(t.ahead + i * P * 64, 8 * P);
    _tile_loadd(5, t.queries + i, stride);
    _tile_loadd(7, t.keys[0] + i * kLanes, kTileRowBytes);
    _tile_dpbf16ps(0, 5, 7);
    if constexpr (P == 2) {
      _tile_loadd(7, t.keys[1] + i * kLanes, kTileRowBytes);
      _tile_dpbf16ps(1, 5, 7);
    }
  }
  _tile_stored(0, t.scores, kChunk * 4);
  if constexpr (P == 2) _tile_stored(1, t.scores + kPanel, kChunk * 4);
  Tiles::publish();
}

// F(j) for the numbers j of the sums of V panels: registers are immediates.
#define DK_EACH_SUM(V, F)       \
  F(0)                          \
  if constexpr (V > 1) { F(1) } \
  if constexpr (V > 2) { F(2) } \
  if constexpr (V > 3) { F(3) }

template <int R, int V>
static void value_columns(const ValueTile& t, int panel) {
  float* const out = t.out + panel * kLanes;
#define DK_CLEAR(j) _tile_zero(j);
#define DK_LOAD(j) _tile_loadd(j, out + j * kLanes, t.out_stride * 4);
  if (t.fresh || t.keep) {
    DK_EACH_SUM(V, DK_CLEAR)
  } else {
    DK_EACH_SUM(V, DK_LOAD)
  }
  for (int s = 0; s < t.num_segments; ++s) {
    const ValueSegment& segment = t.segments[s];
    const uint32_t* const values = segment.values + panel * segment.panel_stride;
    const uint32_t* const weights = t.weights + segment.first_pair;
    const char* const ahead = segment.ahead + panel * segment.num_pairs * 64;
    for (int64_t i = 0; i < segment.num_pairs; i += kPairsAtOnce) {
      prefetch_rows(ahead + i * V * 64, kPairsAtOnce * V);
      _tile_loadd(5, weights + i, kChunk * 2);
#define DK_ADD(j)                                                                        \
  _tile_loadd(7, values + j * segment.panel_stride + i * kLanes, kTileRowBytes);         \
  _tile_dpbf16ps(j, 5, 7);
      DK_EACH_SUM(V, DK_ADD)
    }
  }
  if (!t.keep) {
#define DK_STORE(j) _tile_stored(j, out + j * kLanes, t.out_stride * 4);
    DK_EACH_SUM(V, DK_STORE)
    return;
  }
  alignas(64) float sums[V][R][kLanes];
#define DK_STORE_SUMS(j) _tile_stored(j, sums[j], kTileRowBytes);
  DK_EACH_SUM(V, DK_STORE_SUMS)
  Tiles::publish();
  for (int r = 0; r < R; ++r) DK_UNROLL for (int j = 0; j < V; ++j) {
    float* const place = out + r * t.out_stride + j * kLanes;
    store(place, fma(load(place), set(t.keep[r]), mul(load(sums[j][r]), set(t.take[r]))));
  }
#undef DK_CLEAR
#undef DK_LOAD
#undef DK_ADD
#undef DK_STORE
#undef DK_STORE_SUMS
}
#undef DK_EACH_SUM

template <int R>
static void value_tile(const ValueTile& t) {
  t.state->configure(R);
  Tiles::publish();
  int panel = 0;
  for (; panel + 4 <= t.num_panels; panel += 4) value_columns<R, 4>(t, panel);
  switch (t.num_panels - panel) {
    case 1: value_columns<R, 1>(t, panel); break;
    case 2: value_columns<R, 2>(t, panel); break;
    case 3: value_columns<R, 3>(t, panel); break;
  }
  Tiles::publish();
}

}  // namespace dk::DK_LEVEL_NAMESPACE
