// Split the batch of a step into items that the team processes.
//
// A run of few rows is one item for all its heads. A run of many rows is split into tiles of rows
// per head. If there are fewer such items than the threads need, their context is split between
// chunks (the results are stored and combined in order afterwards, Dao et al. 2023,
// "Flash-Decoding"), and then their heads. Where the workspace is too small for all chunks, the
// call runs in waves: each wave fills the workspace and is combined before the next one. The split
// never affects the result (attention.h).
#include "attention_plan.h"

#include <algorithm>

#include "failure.h"
#include "team.h"

namespace dk {
namespace {

constexpr int64_t kStreamRows = 24;     // of a head: up to here reading dominates
constexpr int64_t kItemRows = 96;       // of a head, in an item that does not stream
constexpr int64_t kIntegerRows = 144;   // the same for int8, which is widened for each item
constexpr int64_t kMaxStreamRows = 96;  // of all heads of an item that streams: they stay in L2
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kTokensPerWrite = 64;
constexpr int64_t kAloneBytes = 48 << 10;  // of keys and values: less runs on one thread
constexpr int64_t kFewestSlots = 3;        // of a wave: less is not worth a split
constexpr int64_t kCombineRows = 4;
constexpr int64_t kNoLimit = INT64_MAX / 2;

struct Run {
  int64_t index;
  int64_t first_token, query_len, seq_len;
  int64_t first_chunk, end_chunk;
  int64_t num_seen;  // positions that its tokens see in total
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Planner {
 public:
  Planner(const dk_attention_args& a, AttentionPlan& plan)
      : a_(a), plan_(plan), shape_(a), threads_(num_threads()) {}

  void make() {
    plan_.items.clear();
    plan_.splits.clear();
    plan_.pieces.clear();
    plan_.waves.clear();
    plan_.writes.clear();
    plan_.scratch_bytes = 0;
    const int64_t num_runs = a_.batch->num_runs;
    if (threads_ > 1) set_targets(num_runs);
    for (int64_t r = 0; r < num_runs; ++r) {
      const Run run = run_of(r);
      if (!run.query_len) continue;
      const bool few_rows = streams(run);
      if (run.query_len > 1 || !few_rows) add_writes(run);
      if (few_rows) {
        add_streaming(run);
      } else {
        each_tile(run, [this](const AttentionItem& tile) { add_tile(tile); });
      }
    }
    end_wave();
  }

 private:
  Run run_of(int64_t r) const {
    Run run;
    run.index = r;
    run.first_token = a_.query_start[r];
    run.query_len = a_.query_start[r + 1] - run.first_token;
    run.seq_len = a_.seq_lens[r];
    const int64_t context = run.seq_len - run.query_len;
    const int64_t first = a_.window ? std::max<int64_t>(0, context + 1 - a_.window) : 0;
    run.first_chunk = first / kChunk;
    run.end_chunk = ceil_div(run.seq_len, kChunk);
    run.num_seen = run.seq_len - first;
    return run;
  }

  bool streams(const Run& run) const { return run.query_len * shape_.group <= kStreamRows; }

  // How much work an item should have, so that every thread gets several.
  void set_targets(int64_t num_runs) {
    int64_t streamed = 0, num_streams = 0, cost = 0;
    for (int64_t r = 0; r < num_runs; ++r) {
      const Run run = run_of(r);
      if (!run.query_len) continue;
      if (streams(run)) {
        streamed += run.num_seen;
        ++num_streams;
        cost += stream_cost(run.num_seen, a_.num_kv_heads);
      } else {
        each_tile(run, [&cost](const AttentionItem& tile) { cost += tile.cost; });
      }
    }
    cost_per_item_ = std::max<int64_t>(1, cost / (threads_ * kItemsPerThread));
    if (streamed * (shape_.block_bytes / a_.block_size) <= kAloneBytes) return;
    tokens_per_item_ = std::max<int64_t>(1, streamed / (threads_ * kItemsPerThread));
    cuts_heads_ = num_streams < 2 * threads_;
  }

  // Relative to multiplied rows: a position of a head costs about as much as 4 rows.
  static int64_t stream_cost(int64_t num_positions, int64_t num_heads) {
    return num_positions * num_heads * 4;
  }

  void add_writes(const Run& run) {
    for (int64_t t = 0; t < run.query_len; t += kTokensPerWrite) {
      plan_.writes.push_back(run.first_token + t);
      plan_.writes.push_back(run.first_token + std::min(run.query_len, t + kTokensPerWrite));
    }
  }

  void add_streaming(const Run& run) {
    AttentionItem unit{};
    unit.run = static_cast<int32_t>(run.index);
    unit.num_tokens = static_cast<int32_t>(run.query_len);
    unit.num_heads = static_cast<int32_t>(a_.num_kv_heads);
    unit.first_chunk = static_cast<int32_t>(run.first_chunk);
    unit.end_chunk = static_cast<int32_t>(run.end_chunk);
    unit.streams = true;
    unit.cost = stream_cost(run.num_seen, a_.num_kv_heads);
    const int64_t rows = run.query_len * shape_.group;
    const int64_t chunks_each = std::max<int64_t>(1, tokens_per_item_ / kChunk);
    int64_t heads_each = std::min(a_.num_kv_heads, std::max<int64_t>(1, kMaxStreamRows / rows));
    if (is_worth_splitting(unit, chunks_each)) {
      const int64_t parts = ceil_div(run.end_chunk - run.first_chunk, chunks_each);
      const int64_t heads = a_.num_kv_heads * parts / (2 * threads_);
      if (cuts_heads_) heads_each = std::min(heads_each, std::max<int64_t>(1, heads));
      split(unit, chunks_each, heads_each);
      return;
    }
    if (cuts_heads_ && run.num_seen > tokens_per_item_) {
      heads_each = std::min(heads_each, ceil_div(a_.num_kv_heads, 2 * threads_));
    }
    add_parts(unit, unit.end_chunk - unit.first_chunk, heads_each);
  }

  // Call f with an item for each tile of rows of each head.
  template <class F>
  void each_tile(const Run& run, F f) const {
    const int64_t rows = a_.cache_kind == DK_CACHE_INT8 ? kIntegerRows : kItemRows;
    const int64_t tokens_each = std::max<int64_t>(1, rows / shape_.group);
    const int64_t context = run.seq_len - run.query_len;
    for (int64_t t = 0; t < run.query_len; t += tokens_each) {
      const int64_t num_tokens = std::min(tokens_each, run.query_len - t);
      const int64_t end = context + t + num_tokens;
      const int64_t first = a_.window ? std::max<int64_t>(0, context + t + 1 - a_.window) : 0;
      for (int64_t h = 0; h < a_.num_kv_heads; ++h) {
        AttentionItem item{};
        item.run = static_cast<int32_t>(run.index);
        item.first_token = static_cast<int32_t>(t);
        item.num_tokens = static_cast<int32_t>(num_tokens);
        item.first_head = static_cast<int32_t>(h);
        item.num_heads = 1;
        item.first_chunk = static_cast<int32_t>(first / kChunk);
        item.end_chunk = static_cast<int32_t>(ceil_div(end, kChunk));
        item.cost = (end - first) * num_tokens * shape_.group;
        f(item);
      }
    }
  }

  void add_tile(const AttentionItem& tile) {
    const int64_t chunks = tile.end_chunk - tile.first_chunk;
    const int64_t parts = ceil_div(tile.cost, cost_per_item_);
    const int64_t chunks_each = ceil_div(chunks, parts);
    if (is_worth_splitting(tile, chunks_each)) {
      split(tile, chunks_each, 1);
    } else {
      add(tile);
    }
  }

  int64_t slot_floats(const AttentionItem& unit) const {
    return unit.num_heads * unit.num_tokens * shape_.group * partial_row_floats(shape_);
  }

  bool is_worth_splitting(const AttentionItem& unit, int64_t chunks_each) const {
    return 2 * (unit.end_chunk - unit.first_chunk) > 3 * chunks_each &&
           a_.workspace_floats >= kFewestSlots * slot_floats(unit);
  }

  // Split the unit between chunks, in as many waves as its results need.
  void split(const AttentionItem& unit, int64_t chunks_each, int64_t heads_each) {
    const int64_t floats = slot_floats(unit), chunks = unit.end_chunk - unit.first_chunk;
    if (chunks * floats > a_.workspace_floats - used_ && used_) end_wave();
    int64_t most_slots = a_.workspace_floats / floats;
    // As many parts fit into the workspace as keep every thread busy.
    chunks_each = std::clamp<int64_t>(most_slots / (2 * threads_), 1, chunks_each);
    if (chunks > most_slots) {
      // In waves of about the same size. Each but the first has a slot for the earlier results.
      const int64_t num_waves = ceil_div(chunks - 1, most_slots - 1);
      most_slots = ceil_div(chunks - 1, num_waves) + 1;
    }
    AttentionItem part = unit;
    part.partial_rows = static_cast<int32_t>(floats / partial_row_floats(shape_));
    for (int64_t c = unit.first_chunk; c < unit.end_chunk; c = part.end_chunk) {
      const bool continues = c > unit.first_chunk;
      if (continues) end_wave();
      const int64_t slots = std::min(most_slots, unit.end_chunk - c + continues);
      float* const memory = a_.workspace + used_;
      used_ += slots * floats;
      part.first_chunk = static_cast<int32_t>(c);
      part.end_chunk = static_cast<int32_t>(c + slots - continues);
      part.partial = memory + continues * floats;
      part.cost = unit.cost * (part.end_chunk - part.first_chunk) / chunks;
      add_parts(part, chunks_each, heads_each);
      add_split({unit.run, unit.first_token, unit.num_tokens, unit.first_head, unit.num_heads,
                 static_cast<int32_t>(slots), continues, part.end_chunk == unit.end_chunk, memory});
    }
  }

  void add_split(const AttentionSplit& split) {
    const int64_t rows = split.rows(shape_), index = static_cast<int64_t>(plan_.splits.size());
    plan_.splits.push_back(split);
    for (int64_t r = 0; r < rows; r += kCombineRows) {
      plan_.pieces.push_back({index, r, std::min(rows, r + kCombineRows)});
    }
  }

  // Add the items of a unit: pieces of its chunks and heads.
  void add_parts(const AttentionItem& unit, int64_t chunks_each, int64_t heads_each) {
    const int64_t chunks = unit.end_chunk - unit.first_chunk, heads = unit.num_heads;
    const int64_t head_floats = slot_floats(unit) / heads;
    const int64_t last_chunk = ceil_div(a_.seq_lens[unit.run], kChunk);
    for (int64_t c = 0; c < chunks; c += chunks_each) {
      for (int64_t h = 0; h < heads; h += heads_each) {
        AttentionItem item = unit;
        item.first_chunk = static_cast<int32_t>(unit.first_chunk + c);
        item.end_chunk = static_cast<int32_t>(unit.first_chunk + std::min(chunks, c + chunks_each));
        item.first_head = static_cast<int32_t>(unit.first_head + h);
        item.num_heads = static_cast<int32_t>(std::min(heads_each, heads - h));
        item.writes = unit.streams && unit.num_tokens == 1 && item.end_chunk == last_chunk;
        if (unit.partial) item.partial = unit.partial + c * slot_floats(unit) + h * head_floats;
        item.cost = unit.cost * (item.end_chunk - item.first_chunk) * item.num_heads;
        item.cost /= chunks * heads;
        add(item);
      }
    }
  }

  void add(const AttentionItem& item) {
    const int64_t heads_tokens = static_cast<int64_t>(item.num_heads) * item.num_tokens;
    int64_t& largest = largest_[item.streams];
    if (heads_tokens > largest) {
      largest = heads_tokens;
      const int64_t bytes = DK_PICK(attention_table).scratch_bytes(a_, item);
      plan_.scratch_bytes = std::max(plan_.scratch_bytes, bytes);
    }
    plan_.items.push_back(item);
  }

  // What is added from now on runs after the present items and has the whole workspace.
  void end_wave() {
    const int64_t begin = plan_.waves.empty() ? 0 : plan_.waves.back().end_item;
    const int64_t end = static_cast<int64_t>(plan_.items.size());
    deal(plan_.items.data() + begin, end - begin);
    plan_.waves.push_back({end, static_cast<int64_t>(plan_.pieces.size())});
    used_ = 0;
  }

  // Order the items of each thread's share (team.h) by falling cost: the most expensive are
  // started first, so that pieces stolen at the end are small.
  void deal(AttentionItem* items, int64_t n) {
    if (threads_ == 1 || n < 2) return;
    using Item = AttentionItem;
    const auto is_dearer = [](const Item& x, const Item& y) { return x.cost > y.cost; };
    std::stable_sort(items, items + n, is_dearer);
    int64_t next[kMaxThreads], end[kMaxThreads];
    for (int64_t t = 0; t < threads_; ++t) {
      next[t] = n * t / threads_;
      end[t] = n * (t + 1) / threads_;
    }
    plan_.dealt.resize(n);
    int64_t t = 0;
    for (int64_t i = 0; i < n; ++i) {
      while (next[t] == end[t]) t = (t + 1) % threads_;
      plan_.dealt[next[t]++] = items[i];
      t = (t + 1) % threads_;
    }
    std::copy_n(plan_.dealt.data(), n, items);
  }

  const dk_attention_args& a_;
  AttentionPlan& plan_;
  const AttentionShape shape_;
  const int64_t threads_;
  int64_t tokens_per_item_ = kNoLimit, cost_per_item_ = kNoLimit;
  bool cuts_heads_ = false;
  int64_t used_ = 0;         // of the workspace, in this wave
  int64_t largest_[2] = {};  // heads x tokens of an item, tiled and streaming
};

}  // namespace

void make_plan(const dk_attention_args& a, AttentionPlan& plan) { Planner(a, plan).make(); }

}  // namespace dk

int64_t dk_attention_plan(const dk_attention_args* args, dk_attention_work* work) {
  dk::AttentionPlan plan;
  const int64_t result = dk::result_of("dk_attention_plan", [&] { dk::make_plan(*args, plan); });
  *work = {};
  work->num_items = static_cast<int64_t>(plan.items.size());
  work->num_waves = static_cast<int64_t>(plan.waves.size());
  int64_t i = 0;
  for (const dk::AttentionWave& wave : plan.waves) {
    int64_t most = 0, sum = 0;
    for (; i < wave.end_item; ++i) {
      sum += plan.items[i].cost;
      most = std::max(most, plan.items[i].cost);
    }
    work->cost += sum;
    work->longest_cost += std::max(most, dk::ceil_div(sum, dk::num_threads()));
  }
  return result;
}
