// The small operations: random sizes, strides and skews, compared with plain sums in double.
#include <cmath>
#include <vector>

#include "cases.h"
#include "dovetail_ops.h"
#include "dovetail_sampling.h"

namespace {

using cases::Buffer;
using cases::from_bf16;
using cases::Random;

void check_close(double got, double want, const char* what) {
  cases::check(std::fabs(got - want) <= 0.006 * std::fmax(1.0, std::fabs(want)), what);
}

double scale_of(Buffer<uint16_t>& x, int64_t first, int64_t size, double eps) {
  double sum = 0;
  for (int64_t i = 0; i < size; ++i) sum += std::pow(from_bf16(x[first + i]), 2);
  return 1 / std::sqrt(sum / size + eps);
}

// The last row ends at the end of the memory.
int64_t extent(int64_t rows, int64_t stride, int64_t size) { return (rows - 1) * stride + size; }

void run_gate(Random& random, int64_t (*function)(const dk_gate_mul_args*), double (*of)(double)) {
  const int64_t rows = random.between(1, 9), size = random.between(1, 100);
  const int64_t x_stride = size + random.below(3), gate_stride = size + random.below(3);
  const int64_t y_stride = size + random.below(3);
  Buffer<uint16_t> x(extent(rows, x_stride, size), random.below(8));
  Buffer<uint16_t> gate(extent(rows, gate_stride, size), random.below(8));
  Buffer<uint16_t> y(extent(rows, y_stride, size), random.below(8));
  cases::fill(x, random);
  cases::fill(gate, random);
  const dk_gate_mul_args args{x.data(), gate.data(), y.data(),    rows,
                              size,     x_stride,    gate_stride, y_stride};
  function(&args);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      const double want = of(from_bf16(gate[r * gate_stride + i])) * from_bf16(x[r * x_stride + i]);
      check_close(from_bf16(y[r * y_stride + i]), want, "a product with a gate is wrong");
    }
  }
}

}  // namespace

DK_CASE(rms_norm) {
  const int64_t outer = random.between(1, 6), inner = random.between(1, 4);
  const int64_t size = random.between(1, 200), inner_stride = size + random.below(3);
  const int64_t outer_stride = inner * inner_stride + random.below(3);
  const int64_t count = (outer - 1) * outer_stride + extent(inner, inner_stride, size);
  Buffer<uint16_t> x(count, random.below(8)), y(count, random.below(8));
  Buffer<uint16_t> weight(size, random.below(8));
  cases::fill(x, random);
  cases::fill(weight, random);
  const float offset = random.coin() ? 1.0f : 0.0f;
  dk_rms_norm_args args{};
  args.x = x.data();
  args.y = y.data();
  args.num_outer = outer;
  args.num_inner = inner;
  args.x_outer_stride = args.y_outer_stride = outer_stride;
  args.x_inner_stride = args.y_inner_stride = inner_stride;
  args.weight = weight.data();
  args.size = size;
  args.eps = 1e-5f;
  args.weight_offset = offset;
  dk_rms_norm(&args);
  for (int64_t row = 0; row < outer * inner; ++row) {
    const int64_t first = row / inner * outer_stride + row % inner * inner_stride;
    const double scale = scale_of(x, first, size, 1e-5);
    for (int64_t i = 0; i < size; ++i) {
      const double want = from_bf16(x[first + i]) * scale * (from_bf16(weight[i]) + offset);
      check_close(from_bf16(y[first + i]), want, "a norm is wrong");
    }
  }
}

DK_CASE(layer_norm) {
  const int64_t rows = random.between(1, 9), size = random.between(1, 200);
  const int64_t x_stride = size + random.below(3), y_stride = size + random.below(3);
  const int64_t sum_stride = size + random.below(3);
  Buffer<uint16_t> x(extent(rows, x_stride, size), random.below(8));
  Buffer<uint16_t> y(extent(rows, y_stride, size), random.below(8));
  Buffer<uint16_t> sum(extent(rows, sum_stride, size), random.below(8));
  Buffer<uint16_t> weight(size, random.below(8)), bias(size, random.below(8));
  for (auto* buffer : {&x, &sum, &weight, &bias}) cases::fill(*buffer, random);
  const bool adds = random.coin(), with_weight = random.coin(), with_bias = random.coin();
  dk_layer_norm_args args{};
  args.x = x.data();
  args.residual = adds ? sum.data() : nullptr;
  args.y = y.data();
  args.num_rows = rows;
  args.x_stride = x_stride;
  args.residual_stride = sum_stride;
  args.y_stride = y_stride;
  args.weight = with_weight ? weight.data() : nullptr;
  args.bias = with_bias ? bias.data() : nullptr;
  args.size = size;
  args.eps = 1e-2f;
  dk_layer_norm(&args);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<double> numbers(size);
    double mean = 0, variance = 0;
    for (int64_t i = 0; i < size; ++i) {
      numbers[i] = from_bf16(adds ? sum[row * sum_stride + i] : x[row * x_stride + i]);
      mean += numbers[i] / size;
    }
    for (const double number : numbers) variance += (number - mean) * (number - mean) / size;
    for (int64_t i = 0; i < size; ++i) {
      double want = (numbers[i] - mean) / std::sqrt(variance + 1e-2);
      if (with_weight) want *= from_bf16(weight[i]);
      if (with_bias) want += from_bf16(bias[i]);
      check_close(from_bf16(y[row * y_stride + i]), want, "a layer norm is wrong");
    }
  }
}

DK_CASE(add_rms_norm) {
  const int64_t rows = random.between(1, 9), size = random.between(1, 200);
  const int64_t stride = size + random.below(4);
  const int64_t count = extent(rows, stride, size);
  Buffer<uint16_t> x(count, random.below(8)), residual(count, random.below(8));
  Buffer<uint16_t> y(count, random.below(8)), weight(size, random.below(8));
  for (auto* buffer : {&x, &residual, &weight}) cases::fill(*buffer, random);
  const dk_add_rms_norm_args args{x.data(), residual.data(), y.data(), rows,  stride, stride,
                                  stride,   weight.data(),   size,     1e-5f, 0.0f};
  dk_add_rms_norm(&args);
  for (int64_t row = 0; row < rows; ++row) {
    const double scale = scale_of(residual, row * stride, size, 1e-5);
    for (int64_t i = 0; i < size; ++i) {
      const double want = from_bf16(residual[row * stride + i]) * scale * from_bf16(weight[i]);
      check_close(from_bf16(y[row * stride + i]), want, "a norm of a sum is wrong");
    }
  }
}

DK_CASE(rotary) {
  const int64_t tokens = random.between(1, 9), heads = random.between(1, 4);
  const int64_t kv_heads = random.between(1, 2), all = heads + kv_heads;
  const int64_t half = random.between(1, 40), size = 2 * half + random.below(20);
  Buffer<uint16_t> qk(tokens * all * size, random.below(8));
  Buffer<uint16_t> out(tokens * all * size, random.below(8));
  Buffer<float> table(30 * 2 * half);
  Buffer<int64_t> positions(tokens);
  cases::fill(qk, random);
  cases::fill(table, random);
  for (int64_t t = 0; t < tokens; ++t) positions[t] = random.below(30);
  dk_rotary_args args{};
  args.q = qk.data();
  args.k = qk.data() + heads * size;
  args.q_out = out.data();
  args.k_out = out.data() + heads * size;
  args.positions = positions.data();
  args.num_tokens = tokens;
  args.q_token_stride = args.k_token_stride = all * size;
  args.q_out_token_stride = args.k_out_token_stride = all * size;
  args.q_head_stride = args.k_head_stride = args.q_out_head_stride = args.k_out_head_stride = size;
  args.cos_sin = table.data();
  args.num_heads = heads;
  args.num_kv_heads = kv_heads;
  args.head_size = size;
  args.rotary_dim = 2 * half;
  dk_rotary(&args);
  for (int64_t row = 0; row < tokens * all; ++row) {
    const int64_t angles = positions[row / all] * 2 * half;
    for (int64_t i = 0; i < size; ++i) {
      double want = from_bf16(qk[row * size + i]);
      if (i < 2 * half) {
        const double cosine = table[angles + i % half], sine = table[angles + half + i % half];
        const double other = from_bf16(qk[row * size + (i + half) % (2 * half)]);
        want = want * cosine + (i < half ? -other : other) * sine;
      }
      check_close(from_bf16(out[row * size + i]), want, "a rotary embedding is wrong");
    }
  }
}

DK_CASE(silu_mul) {
  const int64_t rows = random.between(1, 9), size = random.between(1, 100);
  const int64_t x_stride = 2 * size + random.below(4), y_stride = size + random.below(4);
  Buffer<uint16_t> x(extent(rows, x_stride, 2 * size), random.below(8));
  Buffer<uint16_t> y(extent(rows, y_stride, size), random.below(8));
  cases::fill(x, random);
  const dk_silu_mul_args args{x.data(), y.data(), rows, x_stride, y_stride, size};
  dk_silu_mul(&args);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      const double gate = from_bf16(x[r * x_stride + i]);
      const double up = from_bf16(x[r * x_stride + size + i]);
      check_close(from_bf16(y[r * y_stride + i]), gate / (1 + std::exp(-gate)) * up,
                  "a gated silu is wrong");
    }
  }
}

DK_CASE(sigmoid_mul) {
  run_gate(random, dk_sigmoid_mul, [](double x) { return 1 / (1 + std::exp(-x)); });
}

DK_CASE(gelu_tanh_mul) {
  run_gate(random, dk_gelu_tanh_mul, [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
  });
}

DK_CASE(embedding) {
  const int64_t tokens = random.between(1, 40), rows = random.between(1, 30);
  const int64_t size = random.between(1, 90);
  Buffer<uint16_t> table(rows * size, random.below(8)), y(tokens * size, random.below(8));
  Buffer<int64_t> ids(tokens);
  cases::fill(table, random);
  for (int64_t t = 0; t < tokens; ++t) ids[t] = random.below(rows);
  const dk_embedding_args args{ids.data(), y.data(), tokens, size, table.data(), size, size};
  dk_embedding(&args);
  for (int64_t t = 0; t < tokens; ++t) {
    const bool same = !memcmp(y.data() + t * size, table.data() + ids[t] * size, size * 2);
    cases::check(same, "an embedding is wrong");
  }
}

DK_CASE(mask) {
  const int64_t rows = random.between(1, 4), size = random.between(1, 300);
  const int64_t stride = size + random.below(4), row_bytes = 4 * ((size + 31) / 32);
  Buffer<uint16_t> logits(extent(rows, stride, size), random.below(8));
  Buffer<int64_t> places(rows);
  Buffer<uint8_t> bits(rows * row_bytes);
  cases::fill(logits, random);
  for (int64_t r = 0; r < rows; ++r) places[r] = rows - 1 - r;
  for (int64_t i = 0; i < rows * row_bytes; ++i) {
    bits[i] = random.below(2) ? random.below(256) : 255 * random.below(2);
  }
  const dk_mask_args args{logits.data(), places.data(), bits.data(), rows, stride, size,
                          row_bytes,     0};
  dk_mask(&args);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      const bool allowed = bits[r * row_bytes + i / 8] >> i % 8 & 1;
      const float x = from_bf16(logits[places[r] * stride + i]);
      cases::check(allowed == (x > -1e30f), "a mask is wrong");
    }
  }
}

DK_CASE(argmax) {
  const int64_t rows = random.between(1, 5), size = random.between(1, 2500);
  const int64_t stride = size + random.below(4);
  Buffer<uint16_t> logits(extent(rows, stride, size), random.below(8));
  Buffer<int64_t> ids(rows);
  Buffer<float> sums(rows);
  cases::fill(logits, random);
  const dk_argmax_args args{logits.data(), ids.data(), sums.data(), rows, stride, size, 0};
  dk_argmax(&args);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t best = 0;
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const float x = from_bf16(logits[r * stride + i]);
      if (x > from_bf16(logits[r * stride + best])) best = i;
      sum += std::exp(x);
    }
    cases::check(ids[r] == best, "an argmax is wrong");
    check_close(sums[r], std::log(sum), "a logsumexp is wrong");
  }
}

DK_CASE(gated_norm) {
  const int64_t tokens = random.between(1, 6), groups = random.between(1, 4);
  const int64_t size = random.between(1, 200), gate_stride = groups * size + random.below(3);
  Buffer<float> x(tokens * groups * size, random.below(8));
  Buffer<uint16_t> gate(extent(tokens, gate_stride, groups * size), random.below(8));
  Buffer<uint16_t> y(x.size(), random.below(8));
  const bool shares_weight = random.coin(), norm_first = random.coin();
  Buffer<uint16_t> weight(shares_weight ? size : groups * size, random.below(8));
  cases::fill(x, random);
  cases::fill(gate, random);
  cases::fill(weight, random);
  const std::vector<double> before(x.data(), x.data() + x.size());
  dk_gated_norm_args args{};
  args.x = x.data();
  args.gate = gate.data();
  args.weight = weight.data();
  args.y = y.data();
  args.num_tokens = tokens;
  args.num_groups = groups;
  args.size = size;
  args.gate_stride = gate_stride;
  args.weight_stride = shares_weight ? 0 : size;
  args.norm_first = norm_first;
  args.eps = 1e-3f;
  dk_gated_norm(&args);
  for (int64_t row = 0; row < tokens * groups; ++row) {
    const int64_t group = row % groups;
    std::vector<double> gates(size), values(size);
    double sum = 0;
    for (int64_t i = 0; i < size; ++i) {
      const double g = from_bf16(gate[row / groups * gate_stride + group * size + i]);
      gates[i] = g / (1 + std::exp(-g));
      values[i] = before[row * size + i] * (norm_first ? 1 : gates[i]);
      sum += values[i] * values[i];
    }
    for (int64_t i = 0; i < size; ++i) {
      const double w = from_bf16(weight[(shares_weight ? 0 : group * size) + i]);
      const double want = values[i] / std::sqrt(sum / size + 1e-3) * w;
      check_close(from_bf16(y[row * size + i]), want * (norm_first ? gates[i] : 1), "a gated norm");
    }
  }
}

DK_CASE(add_shared) {
  const int64_t tokens = random.between(1, 9), size = random.between(1, 100);
  const int64_t x_stride = size + random.below(3), y_stride = size + random.below(3);
  const int64_t shared_stride = size + random.below(3);
  Buffer<uint16_t> x(extent(tokens, x_stride, size), random.below(8));
  Buffer<uint16_t> y(extent(tokens, y_stride, size), random.below(8));
  Buffer<uint16_t> shared(extent(tokens, shared_stride, size), random.below(8));
  Buffer<uint16_t> gate(size, random.below(8));
  for (auto* buffer : {&x, &y, &shared, &gate}) cases::fill(*buffer, random);
  const std::vector<uint16_t> before(y.data(), y.data() + y.size());
  const bool with_gate = random.coin();
  dk_add_shared_args args{};
  args.y = y.data();
  args.shared = shared.data();
  args.x = with_gate ? x.data() : nullptr;
  args.gate = with_gate ? gate.data() : nullptr;
  args.num_tokens = tokens;
  args.size = size;
  args.y_stride = y_stride;
  args.shared_stride = shared_stride;
  args.x_stride = x_stride;
  dk_add_shared(&args);
  for (int64_t t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int64_t i = 0; i < size; ++i) dot += from_bf16(x[t * x_stride + i]) * from_bf16(gate[i]);
    const double factor = with_gate ? 1 / (1 + std::exp(-dot)) : 1;
    for (int64_t i = 0; i < size; ++i) {
      const double part = from_bf16(shared[t * shared_stride + i]) * factor;
      check_close(from_bf16(y[t * y_stride + i]), from_bf16(before[t * y_stride + i]) + part,
                  "the sum with a shared expert");
    }
  }
}

DK_CASE(head_linear) {
  const int64_t tokens = random.between(1, 9), heads = random.between(1, 4);
  const int64_t inputs = random.between(1, 90), outputs = random.between(1, 150);
  const bool inputs_first = random.coin();
  const int64_t rows = inputs_first ? inputs : outputs, columns = inputs_first ? outputs : inputs;
  dk_head_linear_args args{};
  args.x_head_stride = inputs + random.below(3);
  args.x_stride = heads * args.x_head_stride + random.below(3);
  args.y_head_stride = outputs + random.below(3);
  args.y_stride = heads * args.y_head_stride + random.below(3);
  args.weight_stride = columns + random.below(3);
  args.weight_head_stride = rows * args.weight_stride + random.below(3);
  Buffer<uint16_t> x((tokens - 1) * args.x_stride + extent(heads, args.x_head_stride, inputs),
                     random.below(8));
  Buffer<uint16_t> y((tokens - 1) * args.y_stride + extent(heads, args.y_head_stride, outputs),
                     random.below(8));
  Buffer<uint16_t> weight(
      (heads - 1) * args.weight_head_stride + extent(rows, args.weight_stride, columns),
      random.below(8));
  cases::fill(x, random);
  cases::fill(weight, random);
  args.x = x.data();
  args.weight = weight.data();
  args.y = y.data();
  args.num_tokens = tokens;
  args.num_heads = heads;
  args.num_inputs = inputs;
  args.num_outputs = outputs;
  args.inputs_first = inputs_first;
  cases::check(dk_head_linear(&args) == DK_OK, "the products of heads had no memory");
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t o = 0; o < outputs; ++o) {
        double sum = 0;
        for (int64_t i = 0; i < inputs; ++i) {
          const int64_t row = inputs_first ? i : o, column = inputs_first ? o : i;
          const int64_t at = h * args.weight_head_stride + row * args.weight_stride + column;
          sum += from_bf16(x[t * args.x_stride + h * args.x_head_stride + i]) *
                 from_bf16(weight[at]);
        }
        check_close(from_bf16(y[t * args.y_stride + h * args.y_head_stride + o]), sum,
                    "a product of a head");
      }
    }
  }
}
