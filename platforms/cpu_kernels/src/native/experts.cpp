// Mixtures of experts: routers, and packed linears of the tokens that each expert gets.
//
// Rows are pairs of a token and one of its experts, sorted by expert and then by token. They are
// computed in waves, which bounds the memory. A token's outputs are added in the order of its
// experts' numbers and the bits of a row do not depend on other rows (linear.cpp), so a token's
// result does not depend on the batch.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "failure.h"
#include "float_mode.h"
#include "linear_passes.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

constexpr int64_t kWaveRows = 1024;            // at most so many rows are computed together
constexpr int64_t kNumbersPerPiece = 32 << 10; // of work that one thread does in some microseconds
constexpr int64_t kSharedPacking = 8192;       // fewer activations are packed by the caller alone

int64_t pieces(int64_t numbers) { return std::max<int64_t>(1, kNumbersPerPiece / numbers); }

// Consecutive rows of one expert.
struct Segment {
  int64_t expert, begin, end;
};

// The sorted rows of a call.
struct Rows {
  std::vector<int64_t> slots;      // [num_tokens * top_k], of each row: its index in `experts`
  std::vector<Segment> segments;   // at most kWaveRows rows each

  explicit Rows(const dk_experts_args& args) : slots(args.num_tokens * args.top_k) {
    std::vector<int64_t> ends(args.num_experts + 1);
    const int64_t num_rows = static_cast<int64_t>(slots.size());
    for (int64_t slot = 0; slot < num_rows; ++slot) ++ends[args.experts[slot] + 1];
    for (int64_t expert = 0; expert < args.num_experts; ++expert) {
      int64_t begin = ends[expert];
      ends[expert + 1] += begin;
      for (; begin < ends[expert + 1]; begin += kWaveRows) {
        segments.push_back({expert, begin, std::min(begin + kWaveRows, ends[expert + 1])});
      }
    }
    for (int64_t slot = 0; slot < num_rows; ++slot) slots[ends[args.experts[slot]]++] = slot;
  }
};

// The packed weights of one of the two linears of all experts.
struct ExpertLinear {
  dk_linear_args args;  // of an expert, without rows
  int64_t kind, num_panels, expert_bytes;
  int64_t bias_size;    // of an expert

  ExpertLinear(const void* packed, const void* bias, int64_t N, int64_t K, int64_t kind_,
               int64_t group, int64_t flags)
      : args{}, kind(kind_), bias_size(N) {
    const PackedShape shape = packed_shape(kind, N, K, group);
    num_panels = shape.num_panels;
    expert_bytes = shape.num_panels * shape.panel_bytes;
    args.packed = packed;
    args.bias = bias;
    args.N = N;
    args.K = args.ldx = K;
    args.ldy = num_outputs(N, flags);
    args.group = group;
    args.flags = flags;
  }
};

// The product of a wave's rows with their experts: one or more jobs of each segment.
class WaveProduct {
 public:
  WaveProduct(const ExpertLinear& linear, const Segment* segments, size_t num_segments)
      : linear_(linear), args_(num_segments, linear.args) {
    for (size_t i = 0; i < num_segments; ++i) {
      const Segment& segment = segments[i];
      dk_linear_args& args = args_[i];
      args.M = segment.end - segment.begin;
      args.packed = static_cast<const char*>(args.packed) + segment.expert * linear.expert_bytes;
      if (args.bias) {
        args.bias = static_cast<const uint16_t*>(args.bias) + segment.expert * linear.bias_size;
      }
      const LinearKernels& kernels = kernels_for(linear.kind, args.M);
      const Passes passes(kernels, linear.kind, args);
      for (int64_t pass = 0; pass < passes.count(); ++pass) {
        const LinearJob job = passes.job(args, pass);
        jobs_.push_back({&kernels, job, num_bytes_});
        num_bytes_ += memory_of(kernels, job);
      }
    }
  }

  int64_t num_bytes() const { return num_bytes_; }

  // x: bf16 [rows, K] of the wave. y: its outputs. memory: of num_bytes.
  void use(const void* x, void* y, char* memory) {
    const int64_t y_bytes = linear_.args.ldy * (linear_.args.flags & DK_OUT_F32 ? 4 : 2);
    int64_t row = 0;
    for (dk_linear_args& args : args_) {
      args.x = static_cast<const uint16_t*>(x) + row * args.ldx;
      args.y = static_cast<char*>(y) + row * y_bytes;
      row += args.M;
    }
    for (Item& item : jobs_) use_memory(*item.kernels, item.job, memory + item.offset);
    num_rows_ = row;
  }

  // Pack the activations. get_rows(job) provides the job's rows of x, if they are not there yet.
  template <class F>
  void pack(F get_rows) {
    const auto num_jobs = static_cast<int64_t>(jobs_.size());
    const bool is_small = num_rows_ * linear_.args.K < kSharedPacking;
    parallel_for(num_jobs, is_small ? num_jobs : 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        get_rows(jobs_[i].job);
        jobs_[i].kernels->pack_rows(jobs_[i].job, 0, jobs_[i].job.num_tiles());
      }
    });
  }

  void compute() const {
    const int64_t num_panels = linear_.num_panels;
    const auto num_items = static_cast<int64_t>(jobs_.size()) * num_panels;
    parallel_for(num_items, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Item& item = jobs_[i / num_panels];
        item.kernels->compute(item.job, i % num_panels, i % num_panels + 1);
      }
    });
  }

 private:
  struct Item {
    const LinearKernels* kernels;
    LinearJob job;
    int64_t offset;  // of its memory
  };
  const ExpertLinear& linear_;
  std::vector<dk_linear_args> args_;  // of each segment; jobs point to them
  std::vector<Item> jobs_;
  int64_t num_bytes_ = 0, num_rows_ = 0;
};

int64_t aligned(int64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

// Compute the outputs of some segments and add them to the sums.
void run_wave(const dk_experts_args& args, const ExpertLinear& gate_up, const ExpertLinear& down,
              const Segment* segments, size_t num_segments, ExpertOutputs& rows) {
  const int64_t num_rows = rows.num_rows;
  const int64_t x_bytes = aligned(num_rows * args.size * 2);
  const int64_t inner_bytes = aligned(num_rows * args.inner * 2);
  const int64_t y_bytes = aligned(num_rows * args.size * 4);
  WaveProduct first(gate_up, segments, num_segments), second(down, segments, num_segments);
  const int64_t shared_bytes = std::max(first.num_bytes(), second.num_bytes());
  char* const x = scratch(kOtherScratch, x_bytes + inner_bytes + y_bytes + shared_bytes);
  char *const inner = x + x_bytes, *const y = inner + inner_bytes, *const memory = y + y_bytes;
  first.use(x, inner, memory);
  first.pack([&](const LinearJob& job) {
    const int64_t begin = (job.x - reinterpret_cast<const uint16_t*>(x)) / args.size;
    auto* to = reinterpret_cast<uint16_t*>(x) + begin * args.size;
    for (int64_t r = 0; r < job.num_rows; ++r, to += args.size) {
      const int64_t token = rows.slots[begin + r] / args.top_k;
      memcpy(to, static_cast<const uint16_t*>(args.x) + token * args.x_stride, args.size * 2);
    }
  });
  first.compute();
  second.use(inner, y, memory);
  second.pack([](const LinearJob&) {});
  second.compute();
  rows.outputs = reinterpret_cast<const float*>(y);
  const auto& tables = DK_PICK(expert_tables);
  const int64_t grain = std::max<int64_t>(64, pieces(num_rows) / 64 * 64);
  parallel_for(args.size, grain,
               [&](int64_t begin, int64_t end) { tables.add_outputs(rows, begin, end); });
}

void run_experts(const dk_experts_args& args) {
  if (args.num_tokens == 0) return;
  const DefaultFloatMode mode;
  ExpertLinear gate_up(args.gate_up, args.gate_up_bias, 2 * args.inner, args.size,
                       args.gate_up_kind, args.gate_up_group, DK_GATE_UP);
  gate_up.args.limit = args.limit;
  gate_up.args.alpha = args.alpha;
  const ExpertLinear down(args.down, args.down_bias, args.size, args.inner, args.down_kind,
                          args.down_group, DK_OUT_F32);
  const Rows sorted(args);
  const std::vector<Segment>& segments = sorted.segments;
  char* const sums = scratch(kOperationScratch, args.num_tokens * args.size * sizeof(float));
  ExpertOutputs rows{&args, nullptr, nullptr, 0, reinterpret_cast<float*>(sums), true, false};
  for (size_t i = 0, end = 0; i < segments.size(); i = end) {
    const int64_t begin = segments[i].begin;
    while (end < segments.size() && segments[end].end - begin <= kWaveRows) ++end;
    rows.slots = sorted.slots.data() + begin;
    rows.num_rows = segments[end - 1].end - begin;
    rows.ends = end == segments.size();
    run_wave(args, gate_up, down, &segments[i], end - i, rows);
    rows.begins = false;
  }
}

void run_router(const dk_select_experts_args& args) {
  if (args.num_tokens == 0) return;
  const DefaultFloatMode mode;
  const auto& tables = DK_PICK(expert_tables);
  const int64_t stride = (args.num_experts + 15) / 16 * 16;
  auto* const logits = reinterpret_cast<float*>(
      scratch(kOperationScratch, args.num_tokens * stride * sizeof(float)));
  const int64_t num_blocks = (args.num_tokens + kRouterTokens - 1) / kRouterTokens *
                             ((args.num_experts + kRouterExperts - 1) / kRouterExperts);
  const int64_t block_tokens = std::min(args.num_tokens, kRouterTokens);
  const auto compute = [&](int64_t begin, int64_t end) {
    tables.logits(args, logits, stride, begin, end);
  };
  parallel_for(num_blocks, pieces(block_tokens * kRouterExperts * args.size), compute);
  const auto select = [&](int64_t begin, int64_t end) {
    tables.select(args, logits, stride, begin, end);
  };
  parallel_for(args.num_tokens, pieces(args.num_experts * (args.top_k + 4)), select);
}

}  // namespace
}  // namespace dk

int64_t dk_select_experts(const dk_select_experts_args* args) {
  dk::note(dk_select_experts, args);
  return dk::result_of("dk_select_experts", [args] { dk::run_router(*args); });
}

int64_t dk_experts(const dk_experts_args* args) {
  dk::note(dk_experts, args);
  return dk::result_of("dk_experts", [args] { dk::run_experts(*args); });
}
