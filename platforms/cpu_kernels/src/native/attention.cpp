// Attention of a step: split the batch into items that the team processes.
//
// A run of few rows is one item for all its heads, or several if there are fewer such runs than
// threads: then its context is split between chunks (their results are stored and combined in
// order afterwards, Dao et al. 2023, "Flash-Decoding"), and then its heads. A run of many rows is
// split into tiles of rows per head. The split never affects the result (attention.h).
#include "attention.h"

#include <algorithm>
#include <new>
#include <vector>

#include "record.h"
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

struct Run {
  int64_t first_token, query_len, seq_len;
  int64_t first_chunk, end_chunk;
  int64_t num_seen;  // positions that its tokens see in total
};

struct Plan {
  std::vector<AttentionItem> items, dealt;
  std::vector<AttentionSplit> splits;
  std::vector<int64_t> writes;  // pairs: first and last token to write before anything attends
  int64_t scratch_bytes = 0;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Run run_of(const dk_attention_args& a, int64_t r) {
  Run run;
  run.first_token = a.query_start[r];
  run.query_len = a.query_start[r + 1] - run.first_token;
  run.seq_len = a.seq_lens[r];
  const int64_t context = run.seq_len - run.query_len;
  const int64_t first = a.window ? std::max<int64_t>(0, context + 1 - a.window) : 0;
  run.first_chunk = first / kChunk;
  run.end_chunk = ceil_div(run.seq_len, kChunk);
  run.num_seen = run.seq_len - first;
  return run;
}

bool streams(const dk_attention_args& a, const Run& run) {
  return run.query_len * (a.num_heads / a.num_kv_heads) <= kStreamRows;
}

class Planner {
 public:
  Planner(const dk_attention_args& a, Plan& plan) : a_(a), plan_(plan), shape_(a) {}

  void make() {
    plan_.items.clear();
    plan_.splits.clear();
    plan_.writes.clear();
    plan_.scratch_bytes = 0;
    const int64_t num_runs = a_.batch->num_runs, threads = num_threads();
    int64_t streamed = 0, num_streams = 0;
    for (int64_t r = 0; r < num_runs; ++r) {
      const Run run = run_of(a_, r);
      if (!run.query_len || !streams(a_, run)) continue;
      streamed += run.num_seen;
      ++num_streams;
    }
    const int64_t token_bytes = shape_.block_bytes / a_.block_size;
    if (threads > 1 && streamed * token_bytes > kAloneBytes) {
      tokens_per_item_ = std::max<int64_t>(1, streamed / (threads * kItemsPerThread));
      cuts_heads_ = num_streams < 2 * threads;
    }
    for (int64_t r = 0; r < num_runs; ++r) {
      const Run run = run_of(a_, r);
      if (!run.query_len) continue;
      if (run.query_len > 1) add_writes(run);
      if (streams(a_, run)) {
        add_streaming(r, run);
      } else {
        add_tiled(r, run);
      }
    }
    deal(threads);
  }

 private:
  void add_writes(const Run& run) {
    for (int64_t t = 0; t < run.query_len; t += kTokensPerWrite) {
      plan_.writes.push_back(run.first_token + t);
      plan_.writes.push_back(run.first_token + std::min(run.query_len, t + kTokensPerWrite));
    }
  }

  void add_streaming(int64_t r, const Run& run) {
    const int64_t chunks = run.end_chunk - run.first_chunk;
    const int64_t rows = run.query_len * shape_.group;
    int64_t chunks_each = std::max<int64_t>(1, tokens_per_item_ / kChunk);
    float* partial = nullptr;
    if (2 * chunks > 3 * chunks_each) partial = take_partial(chunks * a_.num_kv_heads * rows);
    if (!partial) chunks_each = chunks;
    int64_t heads_each = std::min(a_.num_kv_heads, std::max<int64_t>(1, kMaxStreamRows / rows));
    if (cuts_heads_ && run.num_seen > tokens_per_item_ && chunks_each == chunks) {
      heads_each = std::min(heads_each, ceil_div(a_.num_kv_heads, 2 * num_threads()));
    }
    if (partial) {
      plan_.splits.push_back({static_cast<int32_t>(r), static_cast<int32_t>(run.first_chunk),
                              static_cast<int32_t>(run.end_chunk), partial});
    }
    for (int64_t c = run.first_chunk; c < run.end_chunk; c += chunks_each) {
      const int64_t end = std::min(run.end_chunk, c + chunks_each);
      for (int64_t h = 0; h < a_.num_kv_heads; h += heads_each) {
        AttentionItem item{};
        item.run = static_cast<int32_t>(r);
        item.num_tokens = static_cast<int32_t>(run.query_len);
        item.first_head = static_cast<int32_t>(h);
        item.num_heads = static_cast<int32_t>(std::min(heads_each, a_.num_kv_heads - h));
        item.first_chunk = static_cast<int32_t>(c);
        item.end_chunk = static_cast<int32_t>(end);
        item.streams = true;
        item.writes = run.query_len == 1 && end == run.end_chunk;
        item.partial = partial;
        item.kept_from = static_cast<int32_t>(run.first_chunk);
        // Relative to multiplied rows: a position of a head costs about as much as 4 rows.
        item.cost = (std::min(end * kChunk, run.seq_len) - c * kChunk) * item.num_heads * 4;
        add(item);
      }
    }
  }

  void add_tiled(int64_t r, const Run& run) {
    const int64_t rows = a_.cache_kind == DK_CACHE_INT8 ? kIntegerRows : kItemRows;
    const int64_t tokens_each = std::max<int64_t>(1, rows / shape_.group);
    const int64_t context = run.seq_len - run.query_len;
    for (int64_t t = 0; t < run.query_len; t += tokens_each) {
      const int64_t num_tokens = std::min(tokens_each, run.query_len - t);
      const int64_t end = context + t + num_tokens;
      const int64_t first = a_.window ? std::max<int64_t>(0, context + t + 1 - a_.window) : 0;
      for (int64_t h = 0; h < a_.num_kv_heads; ++h) {
        AttentionItem item{};
        item.run = static_cast<int32_t>(r);
        item.first_token = static_cast<int32_t>(t);
        item.num_tokens = static_cast<int32_t>(num_tokens);
        item.first_head = static_cast<int32_t>(h);
        item.num_heads = 1;
        item.first_chunk = static_cast<int32_t>(first / kChunk);
        item.end_chunk = static_cast<int32_t>(ceil_div(end, kChunk));
        item.cost = (end - first) * num_tokens * shape_.group;
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

  float* take_partial(int64_t rows) {
    const int64_t floats = rows * partial_row_floats(a_);
    if (floats > a_.workspace_floats - used_) return nullptr;
    float* const piece = a_.workspace + used_;
    used_ += floats;
    return piece;
  }

  // Order the items of each thread's share (team.h) by falling cost: the most expensive are
  // started first, so that pieces stolen at the end are small.
  void deal(int64_t threads) {
    std::vector<AttentionItem>& items = plan_.items;
    const int64_t n = static_cast<int64_t>(items.size());
    if (threads == 1 || n < 2) return;
    using Item = AttentionItem;
    const auto is_dearer = [](const Item& x, const Item& y) { return x.cost > y.cost; };
    std::stable_sort(items.begin(), items.end(), is_dearer);
    int64_t next[kMaxThreads], end[kMaxThreads];
    for (int64_t t = 0; t < threads; ++t) {
      next[t] = n * t / threads;
      end[t] = n * (t + 1) / threads;
    }
    plan_.dealt.resize(n);
    int64_t t = 0;
    for (const AttentionItem& item : items) {
      while (next[t] == end[t]) t = (t + 1) % threads;
      plan_.dealt[next[t]++] = item;
      t = (t + 1) % threads;
    }
    items.swap(plan_.dealt);
  }

  const dk_attention_args& a_;
  Plan& plan_;
  const AttentionShape shape_;
  int64_t tokens_per_item_ = INT64_MAX;
  bool cuts_heads_ = false;
  int64_t used_ = 0;        // of the workspace
  int64_t largest_[2] = {};  // heads x tokens of an item, tiled and streaming
};

thread_local Plan thread_plan;

}  // namespace
}  // namespace dk

void dk_attention(const dk_attention_args* args) {
  dk::note(dk_attention, args);
  const dk_attention_args& a = *args;
  const dk::AttentionTable& table = DK_PICK(attention_table);
  dk::Plan& plan = dk::thread_plan;
  try {
    dk::Planner(a, plan).make();
  } catch (const std::bad_alloc&) {
    dk::end_without_memory("the plan of attention", plan.items.size() * sizeof(dk::AttentionItem));
  }
  const int64_t num_writes = static_cast<int64_t>(plan.writes.size()) / 2;
  dk::parallel_for(num_writes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.write(a, plan.writes[2 * i], plan.writes[2 * i + 1], 0, a.num_kv_heads);
    }
  });
  dk::parallel_ranges(static_cast<int64_t>(plan.items.size()), 1, [&](auto&& next) {
    char* const scratch = dk::scratch(dk::kRegionScratch, plan.scratch_bytes);
    int64_t begin, end;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) table.attend(a, plan.items[i], scratch);
    }
  });
  const int64_t num_splits = static_cast<int64_t>(plan.splits.size());
  dk::parallel_for(num_splits * a.num_kv_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.combine(a, plan.splits[i / a.num_kv_heads], i % a.num_kv_heads);
    }
  });
}

int64_t dk_attention_block_bytes(int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                                 int64_t cache_kind) {
  dk_attention_args a{};
  a.num_heads = a.num_kv_heads = num_kv_heads;
  a.head_size = head_size;
  a.block_size = block_size;
  a.cache_kind = cache_kind;
  return dk::AttentionShape(a).block_bytes;
}
