// Operations with states: random parts, shapes and strides, compared with sums in double precision.
#include <cmath>
#include <vector>

#include "cases.h"
#include "dovetail_states.h"

namespace {

using cases::Buffer;
using cases::Random;

// Random parts of up to four requests. Blocks are in random order, and no two parts share one.
struct Parts {
  std::vector<int64_t> sizes, num_parts, reads, writes;
  int64_t num_tokens = 0, num_blocks = 1;
  dk_state_parts args;

  Parts(Random& random, int64_t most_tokens) {
    const int64_t num_requests = random.between(1, 4);
    for (int64_t r = 0; r < num_requests; ++r) {
      const int64_t first = num_blocks++, count = random.between(1, 3);
      int64_t before = random.coin() ? first : -1;
      for (int64_t i = 0; i < count; ++i) {
        sizes.push_back(random.coin() ? 1 : random.between(1, most_tokens));
        num_tokens += sizes.back();
        reads.push_back(before);
        before = i + 1 == count && random.coin() ? first : num_blocks++;
        writes.push_back(before);
      }
      num_parts.push_back(count);
    }
    args = {sizes.data(), num_parts.data(), reads.data(), writes.data(), num_requests};
  }

  // Call body(part, first token, end) for each part.
  template <class F>
  void each_part(F body) const {
    int64_t token = 0, part = 0;
    for (const int64_t count : num_parts) {
      for (int64_t i = 0; i < count; ++i, ++part) {
        body(part, token, token + sizes[part]);
        token += sizes[part];
      }
    }
  }
};

double silu(double x) { return x / (1 + exp(-x)); }

}  // namespace

DK_CASE(causal_conv) {
  const Parts parts(random, 9);
  const int64_t channels = random.between(1, 90), width = random.between(2, DK_MAX_CONV_WIDTH);
  const int64_t before = width - 1, x_stride = channels + random.below(4);
  const int64_t y_stride = channels + random.below(4), weight_stride = width + random.below(3);
  const int64_t block_stride = before * channels + random.below(8);
  const bool with_bias = random.coin();
  Buffer<uint16_t> x((parts.num_tokens - 1) * x_stride + channels, random.below(8));
  Buffer<uint16_t> y((parts.num_tokens - 1) * y_stride + channels, random.below(8));
  Buffer<uint16_t> weight((channels - 1) * weight_stride + width, random.below(8));
  Buffer<uint16_t> bias(channels, random.below(8));
  Buffer<uint16_t> states((parts.num_blocks - 1) * block_stride + before * channels);
  fill(x, random);
  fill(weight, random);
  fill(bias, random);
  fill(states, random);
  std::vector<uint16_t> expected(states.data(), states.data() + states.size());
  const dk_causal_conv_args args{&parts.args,   x.data(),     weight.data(),
                                 with_bias ? bias.data() : nullptr,
                                 states.data(), y.data(),     channels,
                                 width,         x_stride,     weight_stride,
                                 block_stride,  y_stride};
  cases::check(dk_causal_conv(&args) == DK_OK, "the convolution had no memory");
  parts.each_part([&](int64_t part, int64_t begin, int64_t end) {
    const int64_t read = parts.reads[part];
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<uint16_t> inputs;
      for (int64_t i = 0; i < before; ++i) {
        inputs.push_back(read < 0 ? 0 : expected[read * block_stride + i * channels + c]);
      }
      for (int64_t t = begin; t < end; ++t) {
        inputs.push_back(x[t * x_stride + c]);
        double sum = with_bias ? cases::from_bf16(bias[c]) : 0.0;
        for (int64_t i = 0; i < width; ++i) {
          sum += cases::from_bf16(weight[c * weight_stride + i]) *
                 cases::from_bf16(inputs[inputs.size() - width + i]);
        }
        const double got = cases::from_bf16(y[t * y_stride + c]);
        cases::check(fabs(got - silu(sum)) <= fabs(silu(sum)) / 128 + 1e-4, "a convolution");
      }
      for (int64_t i = 0; i < before; ++i) {
        expected[parts.writes[part] * block_stride + i * channels + c] =
            inputs[inputs.size() - before + i];
      }
    }
  });
  for (int64_t i = 0; i < states.size(); ++i) {
    cases::check(states[i] == expected[i], "a state of the convolution");
  }
}

DK_CASE(linear_attention) {
  const Parts parts(random, 7);
  const int64_t groups = random.between(1, 3), heads = groups * random.between(1, 3);
  const int64_t K = random.between(1, 40), V = random.between(1, 150), tokens = parts.num_tokens;
  const int64_t block_stride = heads * K * V + random.below(8);
  const bool with_betas = random.coin();
  Buffer<float> q(tokens * groups * K), k(tokens * groups * K), v(tokens * heads * V);
  Buffer<float> factors(tokens * heads), betas(tokens * heads), y(tokens * heads * V);
  Buffer<float> states((parts.num_blocks - 1) * block_stride + heads * K * V);
  for (Buffer<float>* buffer : {&q, &k, &v, &factors, &betas, &states}) fill(*buffer, random);
  for (int64_t i = 0; i < factors.size(); ++i) factors[i] = fabsf(factors[i]);
  for (int64_t i = 0; i < k.size(); ++i) k[i] /= sqrtf(static_cast<float>(K));
  std::vector<double> expected(states.data(), states.data() + states.size());
  const dk_linear_attention_args args{&parts.args, q.data(), k.data(), v.data(), factors.data(),
                                      with_betas ? betas.data() : nullptr,
                                      states.data(), y.data(), heads, groups, K, V, block_stride};
  cases::check(dk_linear_attention(&args) == DK_OK, "linear attention had no memory");
  parts.each_part([&](int64_t part, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> state(K * V);
      const int64_t offset = h * K * V, group = h / (heads / groups);
      const int64_t read = parts.reads[part];
      for (int64_t i = 0; read >= 0 && i < K * V; ++i) {
        state[i] = expected[read * block_stride + offset + i];
      }
      for (int64_t t = begin; t < end; ++t) {
        const float* const key = k.data() + (t * groups + group) * K;
        const float* const query = q.data() + (t * groups + group) * K;
        for (double& number : state) number *= factors[t * heads + h];
        for (int64_t i = 0; i < V; ++i) {
          double value = v[(t * heads + h) * V + i], result = 0;
          if (with_betas) {
            for (int64_t f = 0; f < K; ++f) value -= key[f] * state[f * V + i];
            value *= betas[t * heads + h];
          }
          for (int64_t f = 0; f < K; ++f) {
            state[f * V + i] += key[f] * value;
            result += query[f] * state[f * V + i];
          }
          const double got = y[(t * heads + h) * V + i];
          cases::check(fabs(got - result) <= 1e-3 * (1 + fabs(result)), "linear attention");
        }
      }
      for (int64_t i = 0; i < K * V; ++i) {
        expected[parts.writes[part] * block_stride + offset + i] = state[i];
      }
    }
  });
  for (int64_t i = 0; i < states.size(); ++i) {
    const double error = fabs(states[i] - expected[i]);
    cases::check(error <= 1e-3 * (1 + fabs(expected[i])), "a state of linear attention");
  }
}
