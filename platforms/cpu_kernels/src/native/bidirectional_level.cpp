// Attention without a cache, of one item at a level: iterate over the chunks of the run in order.
//
// Keys and values of a chunk are packed into the panels that attention_tiles.h multiplies, then
// every tile of query rows attends to the chunk. Chunks are combined in order by the formula of
// cached attention, so the bits do not depend on the division of queries into items and tiles.
#include "attention_tiles.h"
#include "bidirectional.h"
#include "word_transpose.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Allocates consecutive pieces of a scratch buffer; without memory it only counts.
struct Carver {
  char* memory;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    // Computed as integers: without memory there is no valid pointer.
    T* const piece = reinterpret_cast<T*>(reinterpret_cast<intptr_t>(memory) + used);
    used += (n * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64 + 64;  // + 64: reads past the end
    return piece;
  }
};

// An item being processed. Rows are its tokens times the query heads of the group, in this order.
struct Work {
  const dk_bidirectional_args& a;
  int64_t group, rows;
  int64_t run_start, length;  // of the run, in tokens of the step
  int64_t position;           // of the first token in its run
  int64_t head;               // key-value head
  uint16_t* queries;          // [rows, D]
  float* scores;              // [kMaxRows, kChunk]
  uint16_t* weights;          // the same
  float *max, *sum;           // [rows]
  float* out;                 // [rows, D]
  uint32_t* keys;             // [kChunk / 16][D / 2][16 tokens]
  uint32_t* values;           // [D / 16][kChunk / 2][16 features]
  mutable ProductState state;

  Work(const dk_bidirectional_args& args, int64_t num_tokens, Carver& carver)
      : a(args), group(args.num_heads / args.num_kv_heads), rows(num_tokens * group) {
    queries = carver.take<uint16_t>(rows * a.head_size);
    scores = carver.take<float>(kMaxRows * kChunk);
    weights = carver.take<uint16_t>(kMaxRows * kChunk);
    max = carver.take<float>(rows);
    sum = carver.take<float>(rows);
    out = carver.take<float>(rows * a.head_size);
    keys = carver.take<uint32_t>(kChunk * a.head_size / 2);
    values = carver.take<uint32_t>(kChunk * a.head_size / 2);
  }

  int64_t position_of(int64_t row) const { return position + row / group; }
  // The first position that a row sees, and the one after the last.
  int64_t first_of(int64_t row) const {
    return a.window ? max64(0, position_of(row) + 1 - a.window) : 0;
  }
  int64_t end_of(int64_t row) const {
    return a.window ? min64(length, position_of(row) + a.window) : length;
  }
};

// What rows first_row .. end_row see of a chunk, in panels of the chunk.
struct Part {
  int64_t chunk_start;
  int first_panel, end_panel;
  bool empty() const { return first_panel >= end_panel; }
};
Part part_of(const Work& w, int64_t chunk, int64_t first_row, int64_t end_row) {
  const int64_t start = chunk * kChunk;
  const int64_t first = max64(0, w.first_of(first_row) - start);
  const int64_t end = min64(kChunk, w.end_of(end_row - 1) - start);
  if (first >= end) return {start, 0, 0};
  return {start, static_cast<int>(first / kPanel), static_cast<int>((end + kPanel - 1) / kPanel)};
}

// --- packing -------------------------------------------------------------------------------------

// Pack the keys of up to 16 tokens, `stride` elements apart; tokens after num_tokens become zero.
void pack_keys(const uint16_t* from, int64_t stride, int64_t num_tokens, int64_t size,
               uint32_t* to) {
  const int64_t pairs = size / 2;
#if DK_LEVEL >= 2
  for (int64_t p = 0; p < pairs; p += kLanes) {
    const int64_t left = min64(kLanes, pairs - p);
    const __mmask16 words = static_cast<__mmask16>((1u << left) - 1);
    __m512i row[kLanes];
    DK_UNROLL for (int t = 0; t < kLanes; ++t) {
      row[t] = t < num_tokens ? _mm512_maskz_loadu_epi32(words, from + t * stride + 2 * p)
                              : _mm512_setzero_si512();
    }
    transpose_16(row);
    DK_UNROLL for (int i = 0; i < kLanes; ++i) {
      if (i < left) _mm512_storeu_si512(to + (p + i) * kLanes, row[i]);
    }
  }
#else
  for (int64_t p = 0; p < pairs; ++p) {
    for (int64_t t = 0; t < kLanes; ++t) {
      uint32_t word = 0;
      if (t < num_tokens) memcpy(&word, from + t * stride + 2 * p, 4);
      to[p * kLanes + t] = word;
    }
  }
#endif
}

// Pack the values of two tokens; without a second one its half of each word becomes zero.
void pack_values(const uint16_t* first, const uint16_t* second, int64_t size, uint32_t* to) {
  for (int64_t d = 0; d < size; d += kLanes, to += kChunk / 2 * kLanes) {
    for (int i = 0; i < kLanes; ++i) to[i] = first[d + i];
    if (!second) continue;
    for (int i = 0; i < kLanes; ++i) to[i] |= static_cast<uint32_t>(second[d + i]) << 16;
  }
}

void pack_chunk(const Work& w, const Part& part) {
  const dk_bidirectional_args& a = w.a;
  const int64_t size = a.head_size, panel_words = size / 2 * kPanel;
  for (int panel = part.first_panel; panel < part.end_panel; ++panel) {
    const int64_t first = part.chunk_start + panel * kPanel, token = w.run_start + first;
    const int64_t num_tokens = min64(kPanel, w.length - first);
    const auto* const k = static_cast<const uint16_t*>(a.k) + token * a.k_token_stride +
                          w.head * a.k_head_stride;
    const auto* const v = static_cast<const uint16_t*>(a.v) + token * a.v_token_stride +
                          w.head * a.v_head_stride;
    pack_keys(k, a.k_token_stride, num_tokens, size, w.keys + panel * panel_words);
    uint32_t* const values = w.values + panel * (kPanel / 2) * kLanes;
    for (int64_t t = 0; t < kPanel; t += 2) {
      uint32_t* const to = values + t / 2 * kLanes;
      if (t < num_tokens) {
        const uint16_t* const row = v + t * a.v_token_stride;
        pack_values(row, t + 1 < num_tokens ? row + a.v_token_stride : nullptr, size, to);
      } else {
        for (int64_t d = 0; d < size; d += kLanes) {
          memset(to + d / kLanes * (kChunk / 2) * kLanes, 0, kLanes * 4);
        }
      }
    }
  }
}

void gather_queries(const Work& w) {
  const int64_t size = w.a.head_size, num_tokens = w.rows / w.group;
  const auto* from = static_cast<const uint16_t*>(w.a.q) +
                     (w.run_start + w.position) * w.a.q_token_stride +
                     w.head * w.group * w.a.q_head_stride;
  uint16_t* to = w.queries;
  for (int64_t t = 0; t < num_tokens; ++t, from += w.a.q_token_stride) {
    for (int64_t g = 0; g < w.group; ++g, to += size) {
      memcpy(to, from + g * w.a.q_head_stride, size * 2);
    }
  }
}

// --- a tile of rows ------------------------------------------------------------------------------

void score(const Work& w, const Part& part, int64_t first_row, int num_rows) {
  const int64_t pairs = w.a.head_size / 2, panel_words = pairs * kPanel;
  ScoreTile t{};
  t.state = &w.state;
  t.queries = reinterpret_cast<const uint32_t*>(w.queries + first_row * w.a.head_size);
  t.query_stride = t.num_pairs = pairs;
  for (int j = part.first_panel; j < part.end_panel; j += kMaxPanels) {
    const bool two = j + kMaxPanels <= part.end_panel;
    for (int i = 0; i < kMaxPanels; ++i) t.keys[i] = w.keys + (j + i) * panel_words;
    t.ahead = reinterpret_cast<const char*>(t.keys[0]);  // already in the cache
    t.scores = w.scores + j * kPanel;
    (two ? kTiles[num_rows].score_two : kTiles[num_rows].score_one)(t);
  }
}

void weigh(const Work& w, const Part& part, int64_t first_row, int num_rows, float* max,
           float* sum) {
  int first[kMaxRows], end[kMaxRows];
  for (int r = 0; r < num_rows; ++r) {
    const int64_t from = w.first_of(first_row + r) - part.chunk_start;
    const int64_t to = w.end_of(first_row + r) - part.chunk_start;
    first[r] = static_cast<int>(min64(kChunk, max64(0, from)));
    end[r] = static_cast<int>(max64(0, min64(kChunk, to)));
  }
  SoftmaxTile t{};
  t.scores = w.scores;
  t.weights = w.weights;
  t.num_rows = num_rows;
  t.first_panel = part.first_panel;
  t.end_panel = part.end_panel;
  t.first = first;
  t.end = end;
  t.scale = w.a.scale;
  t.max = max;
  t.sum = sum;
  softmax_tile(t);
}

void attend_tile(const Work& w, int64_t chunk, int64_t first_row, int num_rows) {
  const Part part = part_of(w, chunk, first_row, first_row + num_rows);
  if (part.empty()) return;
  const int64_t size = w.a.head_size;
  float max[kMaxRows], sum[kMaxRows], keep[kMaxRows], take[kMaxRows];
  score(w, part, first_row, num_rows);
  weigh(w, part, first_row, num_rows, max, sum);
  merge_rows(num_rows, w.max + first_row, w.sum + first_row, max, sum, keep, take);
  constexpr int kPanelPairs = kPanel / 2;
  const uint32_t* const values = w.values + part.first_panel * kPanelPairs * kLanes;
  const int num_panels = part.end_panel - part.first_panel;
  const ValueSegment segment{values, kChunk / 2 * kLanes, part.first_panel * kPanelPairs,
                             num_panels * kPanelPairs, reinterpret_cast<const char*>(values)};
  ValueTile t{};
  t.state = &w.state;
  t.weights = reinterpret_cast<const uint32_t*>(w.weights);
  t.segments = &segment;
  t.num_segments = 1;
  t.num_panels = static_cast<int>(size / kLanes);
  t.out = w.out + first_row * size;
  t.out_stride = size;
  t.keep = keep;
  t.take = take;
  kTiles[num_rows].values(t);
}

void write_out(const Work& w) {
  const int64_t size = w.a.head_size;
  auto* const out = static_cast<uint16_t*>(w.a.out);
  for (int64_t r = 0; r < w.rows; ++r) {
    uint16_t* const to = out + (w.run_start + w.position_of(r)) * w.a.out_token_stride +
                         (w.head * w.group + r % w.group) * w.a.out_head_stride;
    const Vec factor = set(1.f / w.sum[r]);
    for (int64_t d = 0; d < size; d += kLanes) {
      store_bf16(to + d, mul(load(w.out + r * size + d), factor));
    }
  }
}

// --- an item -------------------------------------------------------------------------------------

int64_t scratch_bytes(const dk_bidirectional_args& a, int64_t num_tokens) {
  Carver carver{nullptr};
  Work(a, num_tokens, carver);
  return carver.used;
}

void attend(const dk_bidirectional_args& a, const BidirectionalItem& item, char* scratch) {
  Carver carver{scratch};
  Work w(a, item.num_tokens, carver);
  w.run_start = a.query_start[item.run];
  w.length = a.query_start[item.run + 1] - w.run_start;
  w.position = item.first_token;
  w.head = item.head;
  gather_queries(w);
  for (int64_t r = 0; r < w.rows; ++r) {
    w.max[r] = kLowest;
    w.sum[r] = 0.f;
  }
  memset(w.out, 0, w.rows * a.head_size * sizeof(float));
  const int64_t num_tiles = (w.rows + kMaxRows - 1) / kMaxRows;
  for (int64_t chunk = w.first_of(0) / kChunk; chunk * kChunk < w.end_of(w.rows - 1); ++chunk) {
    pack_chunk(w, part_of(w, chunk, 0, w.rows));
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = w.rows * tile / num_tiles, end = w.rows * (tile + 1) / num_tiles;
      attend_tile(w, chunk, first, static_cast<int>(end - first));
    }
  }
  write_out(w);
}

}  // namespace

const BidirectionalTable bidirectional_table = {scratch_bytes, attend};

}  // namespace dk::DK_LEVEL_NAMESPACE
