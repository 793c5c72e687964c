// Recurrent operations: random parts, shapes and strides, compared with sums in double precision.
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
  int64_t num_tokens = 0, num_blocks = 1, num_requests;
  dk_state_parts args;

  Parts(Random& random, int64_t most_tokens) : num_requests(random.between(1, 4)) {
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
    args = {sizes.data(), num_parts.data(), reads.data(), writes.data(), &num_requests};
  }
  Parts(const Parts&) = delete;

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

// Values of one type in rows with gaps between tokens: bf16, or float.
struct Rows {
  const bool is_float32;
  const int64_t stride;
  Buffer<uint16_t> halves;
  Buffer<float> floats;

  Rows(Random& random, bool is_float32_, int64_t tokens, int64_t size)
      : is_float32(is_float32_),
        stride(size + random.below(4)),
        halves(is_float32 ? 0 : (tokens - 1) * stride + size, random.below(8)),
        floats(is_float32 ? (tokens - 1) * stride + size : 0, random.below(8)) {
    is_float32 ? fill(floats, random) : fill(halves, random);
  }
  void* data() { return is_float32 ? static_cast<void*>(floats.data()) : halves.data(); }
  double at(int64_t token, int64_t i) {
    const int64_t index = token * stride + i;
    return is_float32 ? floats[index] : cases::from_bf16(halves[index]);
  }
};

double softplus(double x) { return x > 30 ? x : log1p(exp(x)); }

// A query or key of a group, with the length that it has in the kernel.
std::vector<double> key_of(Rows& rows, int64_t token, int64_t first, int64_t size, double eps,
                           double length) {
  std::vector<double> key(size);
  double sum = 0;
  for (int64_t f = 0; f < size; ++f) {
    key[f] = rows.at(token, first + f);
    sum += key[f] * key[f];
  }
  if (eps > 0) {
    for (double& value : key) value *= length / sqrt(sum + eps);
  }
  return key;
}

}  // namespace

DK_CASE(causal_conv) {
  const Parts parts(random, 9);
  const int64_t channels = random.between(1, 90), width = random.between(2, DK_MAX_CONV_WIDTH);
  const int64_t before = width - 1, weight_stride = width + random.below(3);
  const int64_t block_stride = before * channels + random.below(8);
  const int64_t state_size = (parts.num_blocks - 1) * block_stride + before * channels;
  const bool with_bias = random.coin(), is_plain = random.coin(), is_float32 = random.coin();
  Rows x(random, is_float32, parts.num_tokens, channels);
  Rows y(random, is_float32, parts.num_tokens, channels);
  Rows weight(random, is_float32, 1, (channels - 1) * weight_stride + width);
  Rows bias(random, is_float32, 1, channels), states(random, is_float32, 1, state_size);
  std::vector<double> expected(state_size);
  for (int64_t i = 0; i < state_size; ++i) expected[i] = states.at(0, i);
  const dk_causal_conv_args args{&parts.args,   x.data(),      weight.data(),
                                 with_bias ? bias.data() : nullptr,
                                 states.data(), y.data(),      channels,
                                 width,         x.stride,      weight_stride,
                                 block_stride,  y.stride,      is_plain,
                                 is_float32};
  cases::check(dk_causal_conv(&args) == DK_OK, "the convolution had no memory");
  parts.each_part([&](int64_t part, int64_t begin, int64_t end) {
    const int64_t read = parts.reads[part];
    for (int64_t c = 0; c < channels; ++c) {
      std::vector<double> inputs;
      for (int64_t i = 0; i < before; ++i) {
        inputs.push_back(read < 0 ? 0 : expected[read * block_stride + i * channels + c]);
      }
      for (int64_t t = begin; t < end; ++t) {
        inputs.push_back(x.at(t, c));
        double sum = with_bias ? bias.at(0, c) : 0.0;
        for (int64_t i = 0; i < width; ++i) {
          sum += weight.at(0, c * weight_stride + i) * inputs[inputs.size() - width + i];
        }
        const double right = is_plain ? sum : silu(sum);
        const double tolerance = is_float32 ? 1e-5 : fabs(right) / 128 + 1e-4;
        cases::check(fabs(y.at(t, c) - right) <= tolerance, "a convolution");
      }
      for (int64_t i = 0; i < before; ++i) {
        expected[parts.writes[part] * block_stride + i * channels + c] =
            inputs[inputs.size() - before + i];
      }
    }
  });
  for (int64_t i = 0; i < state_size; ++i) {
    cases::check(states.at(0, i) == expected[i], "a state of the convolution");
  }
}

DK_CASE(linear_attention) {
  const Parts parts(random, 40);
  const int64_t groups = random.between(1, 3), heads = groups * random.between(1, 3);
  const int64_t K = random.between(1, 40), V = random.between(1, 150), tokens = parts.num_tokens;
  const int64_t block_stride = heads * K * V + random.below(8);
  const bool with_betas = random.coin(), with_skip = random.coin(), is_float32 = random.coin();
  // Without the rule and without normalization, sums of many products grow.
  const float key_eps = with_betas || random.coin() ? 1e-6f : 0.0f;
  Rows q(random, is_float32, tokens, groups * K), k(random, is_float32, tokens, groups * K);
  Rows v(random, is_float32, tokens, heads * V), steps(random, is_float32, tokens, heads);
  Rows betas(random, is_float32, tokens, heads);
  Buffer<float> bias(heads), rates(heads), skip(heads), y(tokens * heads * V);
  Buffer<float> states((parts.num_blocks - 1) * block_stride + heads * K * V);
  for (Buffer<float>* buffer : {&bias, &rates, &skip, &states}) fill(*buffer, random);
  for (int64_t h = 0; h < heads; ++h) rates[h] = -fabsf(rates[h]) * (random.coin() ? 1 : 300);
  const float low = random.coin() ? 0.0f : 0.4f, high = random.coin() ? INFINITY : 0.9f;
  std::vector<double> expected(states.data(), states.data() + states.size());
  dk_linear_attention_args args{};
  args.parts = &parts.args;
  args.q = q.data();
  args.k = k.data();
  args.v = v.data();
  args.steps = steps.data();
  args.betas = with_betas ? betas.data() : nullptr;
  args.step_bias = bias.data();
  args.rates = rates.data();
  args.skip = with_skip ? skip.data() : nullptr;
  args.states = states.data();
  args.y = y.data();
  args.num_heads = heads;
  args.num_groups = groups;
  args.key_size = K;
  args.value_size = V;
  args.q_stride = q.stride;
  args.k_stride = k.stride;
  args.v_stride = v.stride;
  args.steps_stride = steps.stride;
  args.betas_stride = betas.stride;
  args.block_stride = block_stride;
  args.is_float32 = is_float32;
  args.min_step = low;
  args.max_step = high;
  args.key_eps = key_eps;
  cases::check(dk_linear_attention(&args) == DK_OK, "linear attention had no memory");
  parts.each_part([&](int64_t part, int64_t begin, int64_t end) {
    for (int64_t h = 0; h < heads; ++h) {
      std::vector<double> state(K * V);
      const int64_t offset = h * K * V, group = h / (heads / groups) * K;
      const int64_t read = parts.reads[part];
      for (int64_t i = 0; read >= 0 && i < K * V; ++i) {
        state[i] = expected[read * block_stride + offset + i];
      }
      for (int64_t t = begin; t < end; ++t) {
        const std::vector<double> query = key_of(q, t, group, K, key_eps, 1 / sqrt(double(K)));
        const std::vector<double> key = key_of(k, t, group, K, key_eps, 1);
        const double step = fmin(fmax(softplus(steps.at(t, h) + bias[h]), low), high);
        for (double& number : state) number *= exp(rates[h] * step);
        for (int64_t i = 0; i < V; ++i) {
          const double own = v.at(t, h * V + i);
          double value = own * step, result = with_skip ? skip[h] * own : 0;
          if (with_betas) {
            value = own;
            for (int64_t f = 0; f < K; ++f) value -= key[f] * state[f * V + i];
            value /= 1 + exp(-betas.at(t, h));
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

DK_CASE(gated_recurrence) {
  const Parts parts(random, 40);
  const int64_t channels = random.between(1, 90), tokens = parts.num_tokens;
  const int64_t block_stride = channels + random.below(8);
  const bool is_float32 = random.coin();
  Rows x(random, is_float32, tokens, channels), y(random, is_float32, tokens, channels);
  Rows input_gates(random, is_float32, tokens, channels);
  Rows decay_gates(random, is_float32, tokens, channels);
  Buffer<float> input_bias(channels), decay_bias(channels), rates(channels);
  Buffer<float> states((parts.num_blocks - 1) * block_stride + channels);
  for (Buffer<float>* buffer : {&input_bias, &decay_bias, &rates, &states}) fill(*buffer, random);
  const float scales[] = {1e-7f, 1e-3f, 1.0f, 1e4f}, bias_scale = random.coin() ? 1.0f : 200.0f;
  for (int64_t c = 0; c < channels; ++c) {
    rates[c] = -fabsf(rates[c]) * scales[random.below(4)];
    input_bias[c] *= bias_scale;
    decay_bias[c] *= bias_scale;
  }
  std::vector<double> expected(states.data(), states.data() + states.size());
  dk_gated_recurrence_args args{};
  args.parts = &parts.args;
  args.x = x.data();
  args.input_gates = input_gates.data();
  args.decay_gates = decay_gates.data();
  args.input_bias = input_bias.data();
  args.decay_bias = decay_bias.data();
  args.rates = rates.data();
  args.states = states.data();
  args.y = y.data();
  args.channels = channels;
  args.x_stride = x.stride;
  args.input_gates_stride = input_gates.stride;
  args.decay_gates_stride = decay_gates.stride;
  args.block_stride = block_stride;
  args.y_stride = y.stride;
  args.is_float32 = is_float32;
  cases::check(dk_gated_recurrence(&args) == DK_OK, "the gated recurrence had no memory");
  const auto sigmoid = [](double logit) { return 1 / (1 + exp(-logit)); };
  parts.each_part([&](int64_t part, int64_t begin, int64_t end) {
    const int64_t read = parts.reads[part];
    for (int64_t c = 0; c < channels; ++c) {
      double state = read < 0 ? 0 : expected[read * block_stride + c];
      for (int64_t t = begin; t < end; ++t) {
        const double exponent = rates[c] * sigmoid(decay_gates.at(t, c) + decay_bias[c]);
        const double scale = read < 0 && t == begin ? 1 : sqrt(-expm1(2 * exponent));
        const double input = sigmoid(input_gates.at(t, c) + input_bias[c]) * x.at(t, c);
        state = exp(exponent) * state + scale * input;
        const double tolerance = 1e-5 + (is_float32 ? 0 : fabs(state) / 128);
        cases::check(fabs(y.at(t, c) - state) <= tolerance, "a gated recurrence");
      }
      expected[parts.writes[part] * block_stride + c] = state;
    }
  });
  for (int64_t i = 0; i < states.size(); ++i) {
    cases::check(fabs(states[i] - expected[i]) <= 1e-5, "a state of the gated recurrence");
  }
}
