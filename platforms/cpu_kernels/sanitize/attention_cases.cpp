// Attention: random batches in two steps, every window, cap and cache, compared with double sums.
#include <cmath>
#include <cstdlib>
#include <vector>

#include "cases.h"
#include "dovetail_attention.h"

namespace {

using cases::Buffer;
using cases::Random;

struct Shape {
  int64_t runs, kv_heads, group, size, block_size, kind, window, num_blocks, width;
  int64_t value_size;  // 0 for separate values
  float scale, soft_cap;
  std::vector<float> sinks;  // of the query heads; empty for none
  int64_t heads() const { return kv_heads * group; }
  int64_t values() const { return value_size ? value_size : size; }
};

// The expected contents of a row: all its keys and values, in the order of positions.
struct Row {
  std::vector<int32_t> blocks;
  std::vector<float> keys, values;  // [positions, kv heads, size]
  int64_t length = 0;
};

Shape random_shape(Random& random) {
  static const int64_t sizes[] = {16, 32, 48, 64, 80, 96, 128, 256};
  static const int64_t block_sizes[] = {16, 32, 48, 64};
  Shape s{};
  s.runs = random.between(1, 5);
  s.kv_heads = random.coin() ? random.between(1, 3) : random.between(1, 6);
  s.group = random.coin() ? random.between(1, 4) : random.between(1, s.kv_heads == 1 ? 40 : 13);
  s.size = sizes[random.below(8)];
  s.value_size = random.below(3) ? 0 : random.between(1, s.size);
  s.block_size = block_sizes[random.below(4)];
  s.kind = random.coin() ? DK_CACHE_BF16 : DK_CACHE_INT8;
  s.window = random.coin() ? 0 : random.between(1, 400);
  s.scale = 1.0f / std::sqrt(static_cast<float>(s.size));
  s.soft_cap = random.coin() ? 0.0f : 2.0f;
  for (int64_t h = 0, n = random.coin() ? 0 : s.heads(); h < n; ++h) {
    s.sinks.push_back(random.below(5) ? 4.0f * random.uniform() : -INFINITY);
  }
  return s;
}

int64_t block_bytes(const Shape& s) {
  return dk_attention_block_bytes(s.kv_heads, s.size, s.block_size, s.kind, s.value_size);
}

// One step over a cache, with exactly sized memory.
class Step {
 public:
  Step(Random& random, const Shape& s, std::vector<Row>& rows, Buffer<char>& cache)
      : s_(s), rows_(rows), start_(s.runs + 1), lens_(s.runs), table_(s.runs * s.width) {
    for (int64_t r = 0; r < s.runs; ++r) {
      const int64_t kinds[] = {1, 1, random.between(1, 9), random.between(0, 70)};
      const int64_t query_len = rows[r].length == 0 && random.coin() ? random.between(250, 300)
                                                                      : kinds[random.below(4)];
      start_[r + 1] = start_[r] + static_cast<int32_t>(query_len);
      rows[r].length += query_len;
      lens_[r] = static_cast<int32_t>(rows[r].length);
      for (size_t b = 0; b < rows[r].blocks.size(); ++b) {
        table_[r * s.width + b] = rows[r].blocks[b];
      }
    }
    run(random, cache);
  }

 private:
  void run(Random& random, Buffer<char>& cache) {
    const int64_t tokens = start_[s_.runs], all = s_.heads() + 2 * s_.kv_heads;
    const int64_t token_stride = all * s_.size + random.below(5);
    Buffer<uint16_t> qkv(tokens * token_stride, random.below(8));
    Buffer<uint16_t> out(tokens * s_.heads() * s_.values(), random.below(8));
    Buffer<int64_t> slots(tokens);
    const int64_t sizes[] = {0, 15000, 40000, 400000};  // the small ones are filled several times
    Buffer<float> workspace(sizes[random.below(4)]);
    cases::fill(qkv, random);
    for (int64_t r = 0; r < s_.runs; ++r) add_tokens(qkv, token_stride, slots, r);
    const dk_attention_batch batch{s_.runs, tokens};
    dk_attention_args a{};
    a.q = qkv.data();
    a.k = qkv.data() + s_.heads() * s_.size;
    a.v = s_.value_size ? nullptr : qkv.data() + (s_.heads() + s_.kv_heads) * s_.size;
    a.out = out.data();
    a.q_token_stride = a.k_token_stride = a.v_token_stride = token_stride;
    a.q_head_stride = a.k_head_stride = a.v_head_stride = s_.size;
    a.out_head_stride = s_.values();
    a.out_token_stride = s_.heads() * s_.values();
    a.cache = cache.data();
    a.block_stride = block_bytes(s_);
    a.batch = &batch;
    a.query_start = start_.data();
    a.seq_lens = lens_.data();
    a.block_table = table_.data();
    a.slot_mapping = slots.data();
    a.block_table_stride = s_.width;
    a.workspace = workspace.data();
    a.workspace_floats = workspace.size();
    a.num_heads = s_.heads();
    a.num_kv_heads = s_.kv_heads;
    a.head_size = s_.size;
    a.value_size = s_.value_size;
    a.block_size = s_.block_size;
    a.cache_kind = s_.kind;
    a.window = s_.window;
    a.scale = s_.scale;
    a.soft_cap = s_.soft_cap;
    a.sinks = s_.sinks.empty() ? nullptr : s_.sinks.data();
    dk_attention(&a);
    for (int n = 0; n < 12 && tokens; ++n) check_one(random, qkv, token_stride, out);
  }

  void add_tokens(Buffer<uint16_t>& qkv, int64_t token_stride, Buffer<int64_t>& slots, int64_t r) {
    Row& row = rows_[r];
    for (int64_t t = start_[r]; t < start_[r + 1]; ++t) {
      const int64_t position = row.length - start_[r + 1] + t;
      slots[t] = row.blocks[position / s_.block_size] * s_.block_size + position % s_.block_size;
      for (int64_t i = 0; i < s_.kv_heads * s_.size; ++i) {
        const int64_t at = t * token_stride + s_.heads() * s_.size + i;
        row.keys.push_back(cases::from_bf16(qkv[at]));
        const int64_t value = s_.value_size ? at : at + s_.kv_heads * s_.size;
        row.values.push_back(cases::from_bf16(qkv[value]));
      }
    }
  }

  void check_one(Random& random, Buffer<uint16_t>& qkv, int64_t token_stride,
                 Buffer<uint16_t>& out) {
    const int64_t t = random.below(start_[s_.runs]), head = random.below(s_.heads());
    int64_t r = 0;
    while (start_[r + 1] <= t) ++r;
    const Row& row = rows_[r];
    const int64_t position = row.length - start_[r + 1] + t, kv_head = head / s_.group;
    const int64_t first = s_.window && position + 1 > s_.window ? position + 1 - s_.window : 0;
    std::vector<double> weights;
    double sum = s_.sinks.empty() ? 0 : std::exp(static_cast<double>(s_.sinks[head]));
    for (int64_t p = first; p <= position; ++p) {
      double score = 0;
      for (int64_t d = 0; d < s_.size; ++d) {
        score += static_cast<double>(cases::from_bf16(qkv[t * token_stride + head * s_.size + d])) *
                 row.keys[(p * s_.kv_heads + kv_head) * s_.size + d];
      }
      score *= s_.scale;
      if (s_.soft_cap > 0) score = s_.soft_cap * std::tanh(score / s_.soft_cap);
      weights.push_back(std::exp(score));
      sum += weights.back();
    }
    for (int64_t d = 0; d < s_.values(); ++d) {
      double want = 0;
      for (int64_t p = first; p <= position; ++p) {
        want += weights[p - first] / sum * row.values[(p * s_.kv_heads + kv_head) * s_.size + d];
      }
      const double got = cases::from_bf16(out[(t * s_.heads() + head) * s_.values() + d]);
      const double tolerance = s_.kind == DK_CACHE_INT8 ? 0.03 : 0.012;
      cases::check(std::fabs(got - want) < tolerance, "attention is wrong");
    }
  }

  const Shape& s_;
  std::vector<Row>& rows_;
  Buffer<int32_t> start_, lens_, table_;
};

}  // namespace

DK_CASE(attention) {
  Shape s = random_shape(random);
  std::vector<Row> rows(s.runs);
  int32_t next = 1;
  s.width = 0;
  for (Row& row : rows) {
    const int64_t num_blocks = (2 * 300 + s.block_size - 1) / s.block_size;
    for (int64_t b = 0; b < num_blocks; ++b) row.blocks.push_back(next++);
    if (num_blocks > s.width) s.width = num_blocks;
  }
  Buffer<char> cache(next * block_bytes(s));
  memset(cache.data(), 0xff, cache.size());  // NaN in bf16 and float32
  Step(random, s, rows, cache);
  Step(random, s, rows, cache);
}

DK_CASE(bidirectional) {
  Shape s = random_shape(random);
  const int64_t group = s.group, heads = s.heads();
  Buffer<int32_t> start(s.runs + 1);
  for (int64_t r = 0; r < s.runs; ++r) {
    const int64_t lengths[] = {0, 1, random.between(2, 40), random.between(240, 300)};
    start[r + 1] = start[r] + static_cast<int32_t>(lengths[random.below(4)]);
  }
  const int64_t tokens = start[s.runs], all = heads + 2 * s.kv_heads;
  const int64_t stride = all * s.size + random.below(5);
  // The last token ends at the end of the memory.
  const int64_t count = tokens ? (tokens - 1) * stride + all * s.size : 0;
  Buffer<uint16_t> qkv(count, random.below(8));
  Buffer<uint16_t> out(tokens * heads * s.size, random.below(8));
  cases::fill(qkv, random);
  const dk_attention_batch batch{s.runs, tokens};
  dk_bidirectional_args a{};
  a.q = qkv.data();
  a.k = qkv.data() + heads * s.size;
  a.v = qkv.data() + (heads + s.kv_heads) * s.size;
  a.out = out.data();
  a.q_token_stride = a.k_token_stride = a.v_token_stride = stride;
  a.q_head_stride = a.k_head_stride = a.v_head_stride = a.out_head_stride = s.size;
  a.out_token_stride = heads * s.size;
  a.batch = &batch;
  a.query_start = start.data();
  a.num_heads = heads;
  a.num_kv_heads = s.kv_heads;
  a.head_size = s.size;
  a.window = s.window;
  a.scale = s.scale;
  dk_bidirectional(&a);
  const auto number = [&](int64_t token, int64_t head, int64_t d) {
    return static_cast<double>(cases::from_bf16(qkv[token * stride + head * s.size + d]));
  };
  for (int n = 0; n < 12 && tokens; ++n) {
    const int64_t t = random.below(tokens), head = random.below(heads), kv = heads + head / group;
    int64_t r = 0;
    while (start[r + 1] <= t) ++r;
    std::vector<double> want(s.size);
    double sum = 0;
    for (int64_t p = start[r]; p < start[r + 1]; ++p) {
      if (s.window && std::abs(p - t) >= s.window) continue;
      double score = 0;
      for (int64_t d = 0; d < s.size; ++d) score += number(t, head, d) * number(p, kv, d);
      const double weight = std::exp(score * s.scale);
      sum += weight;
      for (int64_t d = 0; d < s.size; ++d) want[d] += weight * number(p, kv + s.kv_heads, d);
    }
    for (int64_t d = 0; d < s.size; ++d) {
      const double got = cases::from_bf16(out[(t * heads + head) * s.size + d]);
      cases::check(std::fabs(got - want[d] / sum) < 0.012, "bidirectional attention is wrong");
    }
  }
}
