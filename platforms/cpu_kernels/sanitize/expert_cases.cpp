// Routers and experts: random shapes and strides, compared with sums in double precision.
#include <cmath>
#include <vector>

#include "cases.h"
#include "dovetail_experts.h"

namespace {

using cases::Buffer;
using cases::Random;

struct Shape {
  int64_t kind, group, num_experts, top_k, num_tokens, size, inner, x_stride, y_stride;
};

// The weights [num_experts, N, K] and their packed form.
struct Stack {
  int64_t N, K;
  Buffer<uint16_t> weights, bias;
  Buffer<char> packed;

  Stack(Random& random, const Shape& s, int64_t N_, int64_t K_, int64_t flags)
      : N(N_),
        K(K_),
        weights(s.num_experts * N * K, random.below(8)),
        bias(s.num_experts * N, random.below(8)),
        packed(s.num_experts * dk_packed_bytes(s.kind, N, K, s.group, flags)) {
    fill(weights, random);
    fill(bias, random);
    const int64_t bytes = packed.size() / s.num_experts;
    for (int64_t e = 0; e < s.num_experts; ++e) {
      int64_t nonfinite = -1;
      const dk_pack_linear_args args{weights.data() + e * N * K, packed.data() + e * bytes,
                                     &nonfinite, N, K, K, s.group, flags, 0};
      if (s.kind == DK_BF16) dk_pack_linear_bf16(&args);
      if (s.kind == DK_INT8) dk_pack_linear_int8(&args);
      if (s.kind == DK_INT4) dk_pack_linear_int4(&args);
      cases::check(nonfinite == 0, "finite weights were counted as not finite");
    }
  }

  double product(int64_t expert, int64_t n, const double* x, bool with_bias) const {
    auto& all = const_cast<Stack&>(*this);
    double sum = with_bias ? cases::from_bf16(all.bias[expert * N + n]) : 0.0;
    for (int64_t k = 0; k < K; ++k) {
      sum += cases::from_bf16(all.weights[(expert * N + n) * K + k]) * x[k];
    }
    return sum;
  }
};

void run_experts(Random& random, int64_t kind) {
  Shape s{};
  s.kind = kind;
  s.group = kind == DK_INT4 ? 32 : 0;
  s.num_experts = random.between(1, 9);
  s.top_k = random.between(1, s.num_experts);
  s.num_tokens = random.coin() ? random.between(1, 5) : random.between(1, 400);
  s.size = random.between(1, 90);
  s.inner = random.between(1, 50);
  s.x_stride = s.size + random.below(4);
  s.y_stride = s.size + random.below(4);
  const Stack gate_up(random, s, 2 * s.inner, s.size, DK_GATE_UP);
  const Stack down(random, s, s.size, s.inner, 0);
  const bool with_bias = random.coin();
  Buffer<uint16_t> x((s.num_tokens - 1) * s.x_stride + s.size, random.below(8));
  Buffer<uint16_t> y((s.num_tokens - 1) * s.y_stride + s.size, random.below(8));
  Buffer<int64_t> experts(s.num_tokens * s.top_k);
  Buffer<float> weights(s.num_tokens * s.top_k);
  fill(x, random);
  fill(weights, random);
  for (int64_t t = 0; t < s.num_tokens; ++t) {
    // Consecutive experts from a random one: all different.
    const int64_t first = random.below(s.num_experts);
    for (int64_t k = 0; k < s.top_k; ++k) {
      experts[t * s.top_k + k] = (first + k) % s.num_experts;
    }
  }
  auto& first = const_cast<Stack&>(gate_up);
  auto& second = const_cast<Stack&>(down);
  dk_experts_args args{};
  args.x = x.data();
  args.experts = experts.data();
  args.weights = weights.data();
  args.gate_up = first.packed.data();
  args.gate_up_bias = with_bias ? first.bias.data() : nullptr;
  args.down = second.packed.data();
  args.down_bias = with_bias ? second.bias.data() : nullptr;
  args.y = y.data();
  args.num_tokens = s.num_tokens;
  args.num_experts = s.num_experts;
  args.top_k = s.top_k;
  args.size = s.size;
  args.inner = s.inner;
  args.x_stride = s.x_stride;
  args.y_stride = s.y_stride;
  args.gate_up_kind = args.down_kind = kind;
  args.gate_up_group = args.down_group = s.group;
  args.limit = random.coin() ? 1.5f : 0.0f;
  args.alpha = 1.702f;
  cases::check(dk_experts(&args) == DK_OK, "the experts had no memory");
  if (kind != DK_BF16) return;  // the unit tests compare quantized experts with single linears

  for (int64_t turn = 0; turn < 10; ++turn) {
    const int64_t t = random.below(s.num_tokens), n = random.below(s.size);
    std::vector<double> row(s.size);
    for (int64_t i = 0; i < s.size; ++i) row[i] = cases::from_bf16(x[t * s.x_stride + i]);
    double sum = 0, largest = 0;
    for (int64_t k = 0; k < s.top_k; ++k) {
      const int64_t expert = experts[t * s.top_k + k];
      std::vector<double> inner(s.inner);
      for (int64_t i = 0; i < s.inner; ++i) {
        double gate = gate_up.product(expert, i, row.data(), with_bias);
        double up = gate_up.product(expert, s.inner + i, row.data(), with_bias);
        double alpha = 1.0;
        if (args.limit > 0) {
          gate = fmin(gate, args.limit);
          up = fmax(-args.limit, fmin(args.limit, up)) + 1;
          alpha = args.alpha;
        }
        inner[i] = gate / (1 + exp(-alpha * gate)) * up;
        largest += fabs(inner[i]);
      }
      sum += weights[t * s.top_k + k] * down.product(expert, n, inner.data(), with_bias);
    }
    const double got = cases::from_bf16(y[t * s.y_stride + n]);
    const double allowed = largest / 128 + fabs(sum) / 128 + 1e-3;
    cases::check(fabs(got - sum) <= allowed, "an output of the experts");
  }
}

}  // namespace

DK_CASE(experts_bf16) { run_experts(random, DK_BF16); }
DK_CASE(experts_int8) { run_experts(random, DK_INT8); }
DK_CASE(experts_int4) { run_experts(random, DK_INT4); }

DK_CASE(select_experts) {
  const int64_t num_groups = random.between(1, 4), num_experts = num_groups * random.between(1, 20);
  const int64_t top_groups = random.between(1, num_groups);
  const int64_t top_k = random.between(1, num_experts / num_groups * top_groups);
  const int64_t num_tokens = random.between(1, 30), size = random.between(1, 100);
  const int64_t x_stride = size + random.below(4), weight_stride = size + random.below(4);
  Buffer<uint16_t> x((num_tokens - 1) * x_stride + size, random.below(8));
  Buffer<uint16_t> weight((num_experts - 1) * weight_stride + size, random.below(8));
  Buffer<uint16_t> bias(num_experts, random.below(8));
  Buffer<float> correction(num_experts), weights(num_tokens * top_k);
  Buffer<int64_t> experts(num_tokens * top_k);
  fill(x, random);
  fill(weight, random);
  fill(bias, random);
  fill(correction, random);
  if (!random.below(4)) x[random.below(x.size())] = 0x7fc0;  // NaN
  const bool with_bias = random.coin(), with_correction = random.coin();
  const dk_select_experts_args args{x.data(),
                                    weight.data(),
                                    with_bias ? bias.data() : nullptr,
                                    with_correction ? correction.data() : nullptr,
                                    experts.data(),
                                    weights.data(),
                                    num_tokens,
                                    num_experts,
                                    size,
                                    x_stride,
                                    weight_stride,
                                    top_k,
                                    num_groups,
                                    top_groups,
                                    random.coin(),
                                    random.coin(),
                                    1.5f};
  cases::check(dk_select_experts(&args) == DK_OK, "the router had no memory");
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::vector<bool> is_selected(num_experts);
    for (int64_t k = 0; k < top_k; ++k) {
      const int64_t expert = experts[t * top_k + k];
      cases::check(expert >= 0 && expert < num_experts, "an expert that does not exist");
      cases::check(!is_selected[expert], "an expert that was selected twice");
      is_selected[expert] = true;
    }
  }
}
