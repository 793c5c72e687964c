// Attention of one item at a level: iterate over the chunks of the context in order.
//
// Two ways through a chunk give the same bits. Few rows stream: block by block in memory order, all
// heads of a block, because reading dominates. Many rows go head by head, so that a head's chunk
// stays in the cache for all tiles of rows, because multiplication dominates. This file processes
// one item at a time; attention.cpp distributes the items.
#include "attention_cache.h"
#include "attention_tiles.h"

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

// An item being processed.
struct Work {
  const dk_attention_args& a;
  const AttentionItem& item;
  const AttentionShape shape;
  int64_t rows;      // of a head: tokens x query heads of the group, in this order
  int64_t token;     // of the step: the item's first
  int64_t position;  // of this token in its row
  uint16_t* queries;  // [heads, rows, D]
  float* scores;      // [rows at once, kChunk]
  uint16_t* weights;  // the same
  float* max;         // [heads, rows]
  float* sum;         // the same
  float* out;         // [heads, rows, width]
  float* chunk_max;   // of the current chunk: [heads, rows], [heads, rows], [heads, rows, width]
  float* chunk_sum;
  float* chunk_out;
  uint16_t* wide;  // keys and values of a chunk (or a block) of a head, widened or rearranged
  float* key_scales;
  float* value_scales;
  uint32_t* tail;  // the last pairs, padded with zeros: [width / 16][kPairsAtOnce][16]
  mutable ProductState state;

  Work(const dk_attention_args& args, const AttentionItem& its, Carver& carver)
      : a(args), item(its), shape(args), rows(its.num_tokens * shape.group) {
    const int64_t all = its.num_heads * rows, at_once = its.streams ? all : min64(rows, kMaxRows);
    const bool integers = args.cache_kind == DK_CACHE_INT8;
    const int64_t wide_tokens = its.streams ? args.block_size : kChunk + args.block_size;
    queries = carver.take<uint16_t>(all * args.head_size);
    scores = carver.take<float>(at_once * kChunk);
    weights = carver.take<uint16_t>(at_once * kChunk);
    max = carver.take<float>(all);
    sum = carver.take<float>(all);
    out = carver.take<float>(all * shape.width);
    chunk_max = carver.take<float>(its.streams ? all : kMaxRows);
    chunk_sum = carver.take<float>(its.streams ? all : kMaxRows);
    chunk_out = carver.take<float>(its.streams ? all * shape.width : 0);
    wide = carver.take<uint16_t>((integers + (integers || shape.latent)) * wide_tokens *
                                 args.head_size);
    key_scales = carver.take<float>(integers ? its.num_heads * kChunk : 0);
    value_scales = carver.take<float>(integers ? its.num_heads * kChunk : 0);
    tail = carver.take<uint32_t>(kPairsAtOnce * shape.width);
  }

  int64_t token_of(int64_t row) const { return row / shape.group; }
  // The position after the last that a row sees, and the first one.
  int64_t end_of(int64_t row) const { return position + token_of(row) + 1; }
  int64_t first_of(int64_t row) const { return a.window ? max64(0, end_of(row) - a.window) : 0; }
};

// A part of a chunk, in positions of the chunk: what rows first_row .. end_row see of it.
struct Part {
  int64_t chunk_start;
  int first, end;  // first is rounded down to a panel
  bool empty() const { return first >= end; }
};
Part part_of(const Work& w, int64_t chunk, int64_t first_row, int64_t end_row) {
  const int64_t start = chunk * kChunk;
  const int64_t first = max64(0, w.first_of(first_row) - start);
  const int64_t end = min64(kChunk, w.end_of(end_row - 1) - start);
  if (first >= end) return {start, 0, 0};
  return {start, static_cast<int>(first / kPanel * kPanel), static_cast<int>(end)};
}

// The addresses of a segment's keys and values for one head, in bf16.
struct Place {
  const uint32_t* keys;    // contiguous panels of 16 tokens
  const uint32_t* values;  // [D / 16][panel_stride / 16][16]
  int64_t panel_stride;    // words
};
Place place_of(const Work& w, const Segment& s, int64_t head) {
  const char* const base = s.block + head * w.shape.head_bytes;
  return {reinterpret_cast<const uint32_t*>(base + s.offset * w.a.head_size * 2),
          reinterpret_cast<const uint32_t*>(base + w.shape.values_offset + s.offset * kLanes * 2),
          w.a.block_size / 2 * kLanes};
}
void widen_keys(const Work& w, const Segment& s, int64_t head, uint16_t* to, const char* ahead) {
  const int64_t panels = (s.num_tokens + kPanel - 1) / kPanel;
  const char* const from = s.block + head * w.shape.head_bytes + s.offset * w.a.head_size;
  widen(reinterpret_cast<const int8_t*>(from), to, panels * kPanel * w.a.head_size, ahead);
}
// Pairs of tokens of each panel are contiguous; return the stride of panels in words.
int64_t widen_values(const Work& w, const Segment& s, int64_t head, uint16_t* to,
                     const char* ahead) {
  const int64_t n = (s.num_tokens + 1) / 2 * 2 * kLanes;
  const char* const base = s.block + w.shape.values_offset + head * w.shape.head_bytes;
  const int8_t* from = reinterpret_cast<const int8_t*>(base + s.offset * kLanes);
  for (int64_t d = 0; d < w.a.head_size; d += kLanes) {
    widen(from, to, n, ahead + d * w.a.block_size);
    from += w.a.block_size * kLanes;
    to += n;
  }
  return n / 2;
}

// Rearrange the values of a segment whose keys contain them; integers are widened first.
Place latent_values(const Work& w, const Segment& s, int64_t head, uint16_t* to) {
  Place place = place_of(w, s, head);
  if (w.a.cache_kind == DK_CACHE_INT8) {
    widen_keys(w, s, head, to, s.block);
    place.keys = reinterpret_cast<const uint32_t*>(to);
    to += (s.num_tokens + kPanel - 1) / kPanel * kPanel * w.a.head_size;
  }
  uint32_t* const values = reinterpret_cast<uint32_t*>(to);
  place.panel_stride = values_of_keys(w.a, w.shape, place.keys, s.num_tokens, values);
  place.values = values;
  return place;
}

// Append the segment's values to a tile's segments. The last tokens, if they do not fill a step of
// kPairsAtOnce, get a separate segment with zeros after them: the slots after them may contain NaN.
int add_values(const Work& w, const Place& place, int first_token, int num_tokens,
               const char* ahead, ValueSegment* segments) {
  constexpr int kStep = 2 * kPairsAtOnce;
  int n = 0;
  const int rest = num_tokens % kStep, pairs = (num_tokens - rest) / 2;
  if (pairs) segments[n++] = {place.values, place.panel_stride, first_token / 2, pairs, ahead};
  if (!rest) return n;
  const uint32_t* from = place.values + pairs * kLanes;
  uint32_t* to = w.tail;
  for (int64_t d = 0; d < w.shape.width; d += kLanes, from += place.panel_stride) {
    for (int p = 0; p < kPairsAtOnce; ++p, to += kLanes) {
      const uint32_t kept = 2 * p + 1 < rest ? ~0u : 2 * p < rest ? 0xffffu : 0u;
      for (int i = 0; i < kLanes; ++i) to[i] = kept ? from[p * kLanes + i] & kept : 0u;
    }
  }
  segments[n++] = {w.tail, kPairsAtOnce * kLanes, first_token / 2 + pairs, kPairsAtOnce, ahead};
  return n;
}

// The rows' limits within a part, and their softmax.
void weigh(const Work& w, const Part& part, int64_t first_row, int n, int64_t head, float* scores,
           uint16_t* weights, float* max, float* sum) {
  int first[kMaxRows], end[kMaxRows];
  for (int r = 0; r < n; ++r) {
    first[r] = static_cast<int>(max64(0, w.first_of(first_row + r) - part.chunk_start));
    end[r] = static_cast<int>(min64(kChunk, w.end_of(first_row + r) - part.chunk_start));
  }
  const bool integers = w.a.cache_kind == DK_CACHE_INT8;
  SoftmaxTile t{};
  t.scores = scores;
  t.weights = weights;
  t.num_rows = n;
  t.first_panel = part.first / kPanel;
  t.end_panel = (part.end + kPanel - 1) / kPanel;
  t.first = first;
  t.end = end;
  t.key_scales = integers ? w.key_scales + head * kChunk : nullptr;
  t.value_scales = integers ? w.value_scales + head * kChunk : nullptr;
  t.scale = w.a.scale;
  t.soft_cap = w.a.soft_cap;
  t.max = max;
  t.sum = sum;
  softmax_tile(t);
}

// Tiles of about equal size: `rows` in as few as kMaxRows allows.
struct Tiling {
  int64_t rows, count;
  explicit Tiling(int64_t n) : rows(n), count((n + kMaxRows - 1) / kMaxRows) {}
  int64_t start(int64_t tile) const { return rows * tile / count; }
};

void load_scales(const Work& w, const Segment* segments, int n) {
  if (w.a.cache_kind != DK_CACHE_INT8) return;
  for (int64_t h = 0; h < w.item.num_heads; ++h) {
    const int64_t offset = (w.item.first_head + h) * w.a.block_size * 4;
    gather_scales(segments, n, w.shape.key_scales_offset + offset, w.key_scales + h * kChunk);
    gather_scales(segments, n, w.shape.value_scales_offset + offset, w.value_scales + h * kChunk);
  }
}

// Where the results of a row of the item in a chunk are stored: maximum, sum and values.
float* partial_row(const Work& w, int64_t chunk, int64_t row) {
  const int64_t slot = (chunk - w.item.first_chunk) * w.item.partial_rows;
  return w.item.partial + (slot + row) * partial_row_floats(w.shape);
}

// --- streaming: few rows, block by block --------------------------------------------------------

void score_segment(const Work& w, const Segment& s, int64_t head, const uint32_t* keys,
                   const char* ahead) {
  const Tiling tiling(w.rows);
  const int panels = (s.num_tokens + kPanel - 1) / kPanel;
  const int64_t pairs = w.a.head_size / 2, panel_words = pairs * kPanel;
  for (int64_t tile = 0; tile < tiling.count; ++tile) {
    const int64_t row = head * w.rows + tiling.start(tile);
    const TileFunctions& functions = kTiles[tiling.start(tile + 1) - tiling.start(tile)];
    ScoreTile t{};
    t.state = &w.state;
    t.queries = reinterpret_cast<const uint32_t*>(w.queries + row * w.a.head_size);
    t.query_stride = t.num_pairs = pairs;
    for (int j = 0; j < panels; j += kMaxPanels) {
      const bool two = j + kMaxPanels <= panels;
      for (int i = 0; i < kMaxPanels; ++i) t.keys[i] = keys + (j + i) * panel_words;
      t.ahead = ahead + j * panel_words * 4;
      t.scores = w.scores + row * kChunk + s.first_token + j * kPanel;
      (two ? functions.score_two : functions.score_one)(t);
    }
  }
}

// writes: the last segment's last key is this step's. It is written just before it is read: its
// cache lines, one per pair of features, have been prefetched by then.
void stream_keys(const Work& w, const Segment* segments, int n, bool writes) {
  const bool integers = w.a.cache_kind == DK_CACHE_INT8;
  const int64_t heads = w.item.num_heads, head_bytes = w.shape.head_bytes;
  for (int s = 0; s < n; ++s) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = w.item.first_head + h;
      const char* ahead = segments[s].block + (head + 1) * head_bytes;
      if (h + 1 == heads) {
        ahead = s + 1 < n ? segments[s + 1].block : segments[0].block + w.shape.values_offset;
        ahead += w.item.first_head * head_bytes;
      }
      if (integers) {
        widen_keys(w, segments[s], head, w.wide, ahead);
        const uint32_t* const keys = reinterpret_cast<const uint32_t*>(w.wide);
        score_segment(w, segments[s], h, keys, reinterpret_cast<const char*>(w.wide));
      } else {
        if (writes && s + 1 == n) write_key(w.a, w.shape, w.token, head);
        score_segment(w, segments[s], h, place_of(w, segments[s], head).keys, ahead);
      }
    }
  }
}

void stream_values(const Work& w, const Segment* segments, int n, bool writes, const char* after) {
  const bool integers = w.a.cache_kind == DK_CACHE_INT8;
  const int64_t heads = w.item.num_heads, head_bytes = w.shape.head_bytes, size = w.shape.width;
  const Tiling tiling(w.rows);
  for (int s = 0; s < n; ++s) {
    const Segment& segment = segments[s];
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t head = w.item.first_head + h;
      const char* ahead = segment.block + w.shape.values_offset + (head + 1) * head_bytes;
      if (h + 1 == heads) {
        const int64_t first = w.item.first_head * head_bytes;
        ahead = s + 1 < n ? segments[s + 1].block + w.shape.values_offset + first : after + first;
      }
      Place place = place_of(w, segment, head);
      if (writes && s + 1 == n) write_value(w.a, w.shape, w.token, head);
      if (w.shape.latent) {
        place = latent_values(w, segment, head, w.wide);
        ahead = reinterpret_cast<const char*>(w.wide);
      } else if (integers) {
        place.panel_stride = widen_values(w, segment, head, w.wide, ahead);
        place.values = reinterpret_cast<const uint32_t*>(w.wide);
        ahead = reinterpret_cast<const char*>(w.wide);
      }
      ValueSegment pieces[2];
      const int num_pieces =
          add_values(w, place, segment.first_token, segment.num_tokens, ahead, pieces);
      for (int64_t tile = 0; tile < tiling.count; ++tile) {
        const int64_t row = h * w.rows + tiling.start(tile);
        ValueTile t{};
        t.state = &w.state;
        t.weights = reinterpret_cast<const uint32_t*>(w.weights + row * kChunk);
        t.segments = pieces;
        t.num_segments = num_pieces;
        t.num_panels = static_cast<int>(size / kLanes);
        t.out = w.chunk_out + row * size;
        t.out_stride = size;
        t.fresh = s == 0;
        kTiles[tiling.start(tile + 1) - tiling.start(tile)].values(t);
      }
    }
  }
}

// Merge a chunk's results into the previous ones.
void merge_chunk(const Work& w) {
  const int64_t all = w.item.num_heads * w.rows, size = w.shape.width;
  for (int64_t row = 0; row < all; row += kLanes) {
    const int n = static_cast<int>(min64(kLanes, all - row));
    float keep[kLanes], take[kLanes];
    merge_rows(n, w.max + row, w.sum + row, w.chunk_max + row, w.chunk_sum + row, keep, take);
    for (int r = 0; r < n; ++r) {
      float* const out = w.out + (row + r) * size;
      const float* const more = w.chunk_out + (row + r) * size;
      for (int64_t d = 0; d < size; d += kLanes) {
        store(out + d, fma(load(out + d), set(keep[r]), mul(load(more + d), set(take[r]))));
      }
    }
  }
}

void keep_chunk(const Work& w, int64_t chunk) {
  const int64_t all = w.item.num_heads * w.rows, size = w.shape.width;
  for (int64_t r = 0; r < all; ++r) {
    float* const to = partial_row(w, chunk, r);
    to[0] = w.chunk_max[r];
    to[1] = w.chunk_sum[r];
    memcpy(to + 2, w.chunk_out + r * size, size * sizeof(float));
  }
}

void stream_chunk(const Work& w, int64_t chunk) {
  const Part part = part_of(w, chunk, 0, w.rows);
  if (part.empty()) return;
  Segment segments[kMaxSegments];
  const int n = cut_segments(w.a, w.item.run, part.chunk_start, part.first, part.end, segments);
  bool writes = w.item.writes && part.chunk_start + part.end == w.position + 1;
  if (writes && w.a.cache_kind == DK_CACHE_INT8) {
    // Scales are looked up before anything is read.
    const int64_t first = w.item.first_head;
    write_tokens(w.a, w.token, w.token + 1, first, first + w.item.num_heads);
    writes = false;
  }
  load_scales(w, segments, n);
  stream_keys(w, segments, n, writes);
  const Tiling tiling(w.rows);
  for (int64_t h = 0; h < w.item.num_heads; ++h) {
    for (int64_t tile = 0; tile < tiling.count; ++tile) {
      const int64_t first = tiling.start(tile), row = h * w.rows + first;
      const int rows = static_cast<int>(tiling.start(tile + 1) - first);
      weigh(w, part, first, rows, h, w.scores + row * kChunk, w.weights + row * kChunk,
            w.chunk_max + row, w.chunk_sum + row);
    }
  }
  // The memory after this chunk's values: the next chunk's keys, or unknown.
  const int64_t next = part.chunk_start + kChunk;
  const bool last = chunk + 1 == w.item.end_chunk || next >= w.end_of(w.rows - 1);
  const int32_t* const table = w.a.block_table + w.item.run * w.a.block_table_stride;
  const char* const after = last ? segments[n - 1].block
                                 : static_cast<const char*>(w.a.cache) +
                                       table[next / w.a.block_size] * w.a.block_stride;
  stream_values(w, segments, n, writes, after);
}

// --- head by head: many rows --------------------------------------------------------------------

// The addresses of a chunk's segments for a head, widened if necessary. places: by segment.
void locate(const Work& w, const Segment* segments, int n, int64_t head, Place* places) {
  uint16_t* to = w.wide;
  for (int s = 0; s < n; ++s) {
    const bool integers = w.a.cache_kind == DK_CACHE_INT8;
    const int64_t tokens = (segments[s].num_tokens + kPanel - 1) / kPanel * kPanel;
    if (w.shape.latent) {
      places[s] = latent_values(w, segments[s], head, to);
      to += (integers + 1) * tokens * w.a.head_size;
      continue;
    }
    places[s] = place_of(w, segments[s], head);
    if (!integers) continue;
    widen_keys(w, segments[s], head, to, segments[s].block);
    places[s].keys = reinterpret_cast<const uint32_t*>(to);
    to += tokens * w.a.head_size;
    places[s].panel_stride = widen_values(w, segments[s], head, to, segments[s].block);
    places[s].values = reinterpret_cast<const uint32_t*>(to);
    to += tokens * w.a.head_size;
  }
}

// The scores of a tile of rows against the panels of a part.
void score_part(const Work& w, const Part& part, const Segment* segments, const Place* places,
                const uint16_t* queries, int rows) {
  const uint32_t* panels[kChunk / kPanel + kMaxPanels];
  const int64_t pairs = w.a.head_size / 2;
  int n = 0;
  for (int t = part.first, s = 0; t < part.end; t += kPanel, ++n) {
    while (t >= segments[s].first_token + segments[s].num_tokens) ++s;
    panels[n] = places[s].keys + (t - segments[s].first_token) / kPanel * pairs * kPanel;
  }
  panels[n] = panels[n - 1];  // what to prefetch for the last ones
  ScoreTile t{};
  t.state = &w.state;
  t.queries = reinterpret_cast<const uint32_t*>(queries);
  t.query_stride = t.num_pairs = pairs;
  for (int j = 0; j < n; j += kMaxPanels) {
    const bool two = j + kMaxPanels <= n;
    for (int i = 0; i < kMaxPanels; ++i) t.keys[i] = panels[min64(j + i, n)];
    t.ahead = reinterpret_cast<const char*>(panels[min64(j + kMaxPanels, n)]);
    t.scores = w.scores + part.first + j * kPanel;
    (two ? kTiles[rows].score_two : kTiles[rows].score_one)(t);
  }
}

// What a chunk of which a row sees nothing contributes.
void keep_nothing(const Work& w, int64_t chunk, int64_t first_row, int64_t end_row) {
  for (int64_t r = first_row; r < end_row; ++r) {
    float* const to = partial_row(w, chunk, r);
    to[0] = kLowest;
    memset(to + 1, 0, (w.shape.width + 1) * sizeof(float));
  }
}

void attend_tile(const Work& w, int64_t chunk, const Segment* segments, int num_segments,
                 const Place* places, int64_t head, int64_t first_row, int64_t end_row) {
  const Part part = part_of(w, chunk, first_row, end_row);
  const int64_t row = head * w.rows + first_row, size = w.shape.width;
  if (part.empty()) {
    if (w.item.partial) keep_nothing(w, chunk, row, row + end_row - first_row);
    return;
  }
  const int rows = static_cast<int>(end_row - first_row);
  score_part(w, part, segments, places, w.queries + row * w.a.head_size, rows);
  weigh(w, part, first_row, rows, head, w.scores, w.weights, w.chunk_max, w.chunk_sum);
  ValueSegment pieces[kMaxSegments + 1];
  int n = 0;
  for (int s = 0; s < num_segments && segments[s].first_token < part.end; ++s) {
    const int start = segments[s].first_token;
    const int skipped = static_cast<int>(max64(0, part.first - start));
    const int end = static_cast<int>(min64(part.end - start, segments[s].num_tokens));
    if (skipped >= end) continue;
    Place place = places[s];
    place.values += skipped / 2 * kLanes;
    const char* const here = reinterpret_cast<const char*>(place.values);
    // Prefetch explicitly from the previous piece: pieces are too short for the hardware.
    if (n) pieces[n - 1].ahead = here;
    n += add_values(w, place, start + skipped, end - skipped, here, pieces + n);
  }
  ValueTile t{};
  t.state = &w.state;
  t.weights = reinterpret_cast<const uint32_t*>(w.weights);
  t.segments = pieces;
  t.num_segments = n;
  t.num_panels = static_cast<int>(size / kLanes);
  float keep[kMaxRows], take[kMaxRows];
  if (w.item.partial) {
    float* const to = partial_row(w, chunk, row);
    t.fresh = true;
    t.out = to + 2;
    t.out_stride = partial_row_floats(w.shape);
    for (int r = 0; r < rows; ++r) {
      to[r * t.out_stride] = w.chunk_max[r];
      to[r * t.out_stride + 1] = w.chunk_sum[r];
    }
  } else {
    merge_rows(rows, w.max + row, w.sum + row, w.chunk_max, w.chunk_sum, keep, take);
    t.out = w.out + row * size;
    t.out_stride = size;
    t.keep = keep;
    t.take = take;
  }
  kTiles[rows].values(t);
}

void attend_chunk(const Work& w, int64_t chunk) {
  const Part whole = part_of(w, chunk, 0, w.rows);
  if (whole.empty()) return;
  Segment segments[kMaxSegments];
  Place places[kMaxSegments];
  const int n = cut_segments(w.a, w.item.run, whole.chunk_start, whole.first, whole.end, segments);
  load_scales(w, segments, n);
  const Tiling tiling(w.rows);
  for (int64_t h = 0; h < w.item.num_heads; ++h) {
    locate(w, segments, n, w.item.first_head + h, places);
    for (int64_t tile = 0; tile < tiling.count; ++tile) {
      attend_tile(w, chunk, segments, n, places, h, tiling.start(tile), tiling.start(tile + 1));
    }
  }
}

// --- an item ------------------------------------------------------------------------------------

void gather_queries(const Work& w) {
  const int64_t size = w.a.head_size;
  uint16_t* to = w.queries;
  for (int64_t h = 0; h < w.item.num_heads; ++h) {
    for (int64_t t = 0; t < w.item.num_tokens; ++t) {
      const uint16_t* const from =
          static_cast<const uint16_t*>(w.a.q) + (w.token + t) * w.a.q_token_stride +
          (w.item.first_head + h) * w.shape.group * w.a.q_head_stride;
      for (int64_t g = 0; g < w.shape.group; ++g, to += size) {
        memcpy(to, from + g * w.a.q_head_stride, size * 2);
      }
    }
  }
}

void write_out(const Work& w) {
  uint16_t* const out = static_cast<uint16_t*>(w.a.out);
  for (int64_t h = 0; h < w.item.num_heads; ++h) {
    for (int64_t r = 0; r < w.rows; ++r) {
      const int64_t row = h * w.rows + r;
      const int64_t query_head = (w.item.first_head + h) * w.shape.group + r % w.shape.group;
      uint16_t* const to = out + (w.token + w.token_of(r)) * w.a.out_token_stride +
                           query_head * w.a.out_head_stride;
      write_row(w.a, w.shape, query_head, w.out + row * w.shape.width, w.max[row], w.sum[row], to);
    }
  }
}

void forget(const Work& w) {
  const int64_t all = w.item.num_heads * w.rows;
  for (int64_t r = 0; r < all; ++r) {
    w.max[r] = kLowest;
    w.sum[r] = 0.f;
  }
  memset(w.out, 0, all * w.shape.width * sizeof(float));
}

int64_t scratch_bytes(const dk_attention_args& a, const AttentionItem& item) {
  Carver carver{nullptr};
  Work(a, item, carver);
  return carver.used;
}

void attend(const dk_attention_args& a, const AttentionItem& item, char* scratch) {
  Carver carver{scratch};
  Work w(a, item, carver);
  const int64_t run_start = a.query_start[item.run];
  const int64_t query_len = a.query_start[item.run + 1] - run_start;
  w.token = run_start + item.first_token;
  w.position = a.seq_lens[item.run] - query_len + item.first_token;
  gather_queries(w);
  if (!item.partial) forget(w);
  for (int64_t chunk = item.first_chunk; chunk < item.end_chunk; ++chunk) {
    if (!item.streams) {
      attend_chunk(w, chunk);
      continue;
    }
    stream_chunk(w, chunk);
    if (item.partial) {
      keep_chunk(w, chunk);
    } else {
      merge_chunk(w);
    }
  }
  if (!item.partial) write_out(w);
}

void combine(const dk_attention_args& a, const AttentionSplit& split, int64_t first_row,
             int64_t end_row) {
  const AttentionShape shape(a);
  const int64_t group = shape.group, size = shape.width, row_floats = partial_row_floats(shape);
  const int64_t rows = split.rows(shape), head_rows = split.num_tokens * group;
  for (int64_t r = first_row; r < end_row; ++r) {
    float out[kMaxHeadSize] = {}, max = kLowest, sum = 0.f;
    float* const first = split.partial + r * row_floats;
    if (split.continues) {
      max = first[0];
      sum = first[1];
      memcpy(out, first + 2, size * sizeof(float));
    }
    for (int64_t slot = split.continues; slot < split.num_slots; ++slot) {
      const float* const more = first + slot * rows * row_floats;
      float keep, take;
      merge_rows(1, &max, &sum, more, more + 1, &keep, &take);
      for (int64_t d = 0; d < size; d += kLanes) {
        store(out + d, fma(load(out + d), set(keep), mul(load(more + 2 + d), set(take))));
      }
    }
    if (!split.ends) {
      first[0] = max;
      first[1] = sum;
      memcpy(first + 2, out, size * sizeof(float));
      continue;
    }
    const int64_t token = a.query_start[split.run] + split.first_token + r % head_rows / group;
    const int64_t head = (split.first_head + r / head_rows) * group + r % group;
    uint16_t* const to = static_cast<uint16_t*>(a.out);
    write_row(a, shape, head, out, max, sum,
              to + token * a.out_token_stride + head * a.out_head_stride);
  }
}

}  // namespace

const AttentionTable attention_table = {scratch_bytes, write_tokens, attend, combine};

}  // namespace dk::DK_LEVEL_NAMESPACE
