// The kernels of recurrent operations at a level.
//
// Linear attention keeps a slice of a head's state in a local buffer, which fits the first cache,
// and computes the recurrence token by token: two passes over the slice with the delta rule, one
// without. Sums are in the order of the key's features. Step sizes and decays of kWidth tokens are
// computed at once; each lane depends on its own token only.
#include <cstring>

#include "simd.h"
#include "states.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int64_t kChannels = 2 * kWidth;

// The first n elements from `index` on, followed by zeros; n may be negative.
template <class T>
DK_INLINE VF load_n(const void* base, int64_t index, int64_t n) {
  const T* const p = static_cast<const T*>(base) + index;
  if constexpr (sizeof(T) == 2) {
    return n >= kWidth ? load_bf16(p) : load_bf16_n(p, n > 0 ? n : 0);
  } else {
    if (n >= kWidth) return load(p);
    float room[kWidth] = {};
    for (int64_t i = 0; i < n; ++i) room[i] = p[i];
    return load(room);
  }
}

template <class T>
DK_INLINE void store_as(void* base, int64_t index, VF v, int64_t n) {
  T* const p = static_cast<T*>(base) + index;
  if constexpr (sizeof(T) == 2) {
    n >= kWidth ? store_bf16(p, v) : store_bf16_n(p, v, n);
  } else {
    store_n(p, v, n);
  }
}

template <class T>
DK_INLINE float value_of(T x) {
  if constexpr (sizeof(T) == 2) return bf16_to_float(x);
  return static_cast<float>(x);
}

DK_INLINE VF silu(VF x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// A vector of channels of a request: its inputs before and in the step.
template <class T>
struct Inputs {
  const T* before;  // [width - 1, kChannels], a copy of the state
  const T* x;       // of the request's first token
  int64_t x_stride, num_before;

  DK_INLINE VF at(int64_t token, int64_t channel, int64_t n) const {
    return load_n<T>(row(token), channel, n);
  }
  DK_INLINE const T* row(int64_t token) const {
    return token < 0 ? before + (num_before + token) * kChannels : x + token * x_stride;
  }
};

template <class T, bool kPlain>
void convolve_as(const dk_causal_conv_args& a, const StateRequest& request, int64_t channel) {
  const int64_t num_before = a.width - 1;
  const int64_t n = a.channels - channel < kChannels ? a.channels - channel : kChannels;
  const dk_state_parts& parts = *a.parts;
  T before[(DK_MAX_CONV_WIDTH - 1) * kChannels];  // only the rows in use are initialized
  memset(before, 0, num_before * kChannels * sizeof(T));
  auto* const states = static_cast<T*>(a.states) + channel;
  const int64_t read = parts.reads[request.part];
  for (int64_t i = 0; read >= 0 && i < num_before; ++i) {
    memcpy(before + i * kChannels, states + read * a.block_stride + i * a.channels, n * sizeof(T));
  }
  float weights[DK_MAX_CONV_WIDTH][kChannels], bias[kChannels] = {};
  memset(weights, 0, a.width * sizeof(weights[0]));
  for (int64_t c = 0; c < n; ++c) {
    const auto* own = static_cast<const T*>(a.weight) + (channel + c) * a.weight_stride;
    for (int64_t i = 0; i < a.width; ++i) weights[i][c] = value_of(own[i]);
    if (a.bias) bias[c] = value_of(static_cast<const T*>(a.bias)[channel + c]);
  }
  const auto* const x = static_cast<const T*>(a.x) + request.token * a.x_stride + channel;
  const Inputs<T> inputs{before, x, a.x_stride, num_before};
  auto* const y = static_cast<T*>(a.y) + request.token * a.y_stride + channel;
  int64_t end = 0;
  for (int64_t part = request.part; part < request.part + request.num_parts; ++part) {
    const int64_t start = end;
    end += parts.sizes[part];
    for (int64_t t = start; t < end; ++t) {
      for (int64_t c = 0; c < n; c += kWidth) {
        VF sum = load(bias + c);
        for (int64_t i = 0; i < a.width; ++i) {
          sum = fma(inputs.at(t - num_before + i, c, n - c), load(weights[i] + c), sum);
        }
        store_as<T>(y, t * a.y_stride + c, kPlain ? sum : silu(sum), n - c);
      }
    }
    T* const out = states + parts.writes[part] * a.block_stride;
    for (int64_t i = 0; i < num_before; ++i) {
      memcpy(out + i * a.channels, inputs.row(end - num_before + i), n * sizeof(T));
    }
  }
}

void convolve(const dk_causal_conv_args& a, const StateRequest& request, int64_t channel) {
  if (a.is_float32) {
    a.is_plain ? convolve_as<float, true>(a, request, channel)
               : convolve_as<float, false>(a, request, channel);
  } else {
    a.is_plain ? convolve_as<uint16_t, true>(a, request, channel)
               : convolve_as<uint16_t, false>(a, request, channel);
  }
}

// e^x for x from -87 to 87, clamped outside, as (1 + rest) * power; NaN stays NaN. `rest` is the
// series of e^r - 1 for the remainder r of x, as in `exp`; it is precise near 0. (The order of the
// operands of max and min is the one that keeps NaN.)
struct Exponential {
  VF rest, power;

  DK_INLINE explicit Exponential(VF x) {
    x = min(set1(87.0f), max(set1(-87.0f), x));
    const VI n_int = round_to_int(mul(x, set1(1.44269504f)));
    const VF n = to_float(n_int);
    const VF r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    VF p = fma(r, set1(1.9875691500e-4f), set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    rest = fma(mul(r, r), p, r);
    power = as_float(shift_left(add_int(n_int, set1_int(127)), 23));
  }
  DK_INLINE VF value() const { return fma(rest, power, power); }
  // The value, or 0 instead of e^-87: products with the least numbers are slow.
  DK_INLINE VF decay() const { return max(zero(), sub(value(), set1(1.7e-38f))); }
  DK_INLINE VF minus_one() const { return fma(rest, power, sub(power, set1(1.0f))); }
};

// 1 / (1 + e^-x), at least e^-80: products with the least numbers are slow.
DK_INLINE VF sigmoid(VF x) {
  const VF one = set1(1.0f);
  return div(one, add(one, Exponential(min(set1(80.0f), sub(zero(), x))).value()));
}

// One token of kWidth channels: the decay, and what is added to the decayed state.
struct GatedStep {
  VF decay, value;

  // is_first: whether no state precedes the token.
  DK_INLINE GatedStep(VF decay_gate, VF rates, VF input_gate, VF x, bool is_first) {
    const Exponential exponential(mul(rates, sigmoid(decay_gate)));
    const VF factor = exponential.value(), one = set1(1.0f);
    // 1 - a^2 = (1 - a)(1 + a)
    const VF scale = sqrt(mul(sub(zero(), exponential.minus_one()), add(one, factor)));
    const VF gated = mul(sigmoid(input_gate), x);
    value = is_first ? gated : mul(scale, gated);
    decay = exponential.decay();
  }
};

template <class T>
void recur_gated_as(const dk_gated_recurrence_args& a, const StateRequest& request,
                    int64_t channel) {
  constexpr int kParts = kChannels / kWidth;
  const dk_state_parts& parts = *a.parts;
  const int64_t n = a.channels - channel < kChannels ? a.channels - channel : kChannels;
  const int64_t read = parts.reads[request.part];
  VF state[kParts], input_bias[kParts], decay_bias[kParts], rates[kParts];
  DK_UNROLL for (int i = 0; i < kParts; ++i) {
    const int64_t left = n - i * kWidth, c = channel + i * kWidth;
    const bool is_kept = left > 0 && read >= 0;
    state[i] = is_kept ? load_n<float>(a.states, read * a.block_stride + c, left) : zero();
    input_bias[i] = left > 0 ? load_n<float>(a.input_bias, c, left) : zero();
    decay_bias[i] = left > 0 ? load_n<float>(a.decay_bias, c, left) : zero();
    rates[i] = left > 0 ? load_n<float>(a.rates, c, left) : zero();
  }
  int64_t t = request.token;
  for (int64_t part = request.part; part < request.part + request.num_parts; ++part) {
    for (const int64_t end = t + parts.sizes[part]; t < end; ++t) {
      DK_UNROLL for (int i = 0; i < kParts; ++i) {
        const int64_t left = n - i * kWidth, c = channel + i * kWidth;
        if (left <= 0) break;
        const VF decay_gate = load_n<T>(a.decay_gates, t * a.decay_gates_stride + c, left);
        const VF input_gate = load_n<T>(a.input_gates, t * a.input_gates_stride + c, left);
        const GatedStep step(add(decay_gate, decay_bias[i]), rates[i],
                             add(input_gate, input_bias[i]),
                             load_n<T>(a.x, t * a.x_stride + c, left),
                             read < 0 && t == request.token);
        state[i] = fma(step.decay, state[i], step.value);
        store_as<T>(a.y, t * a.y_stride + c, state[i], left);
      }
    }
    float* const out = a.states + parts.writes[part] * a.block_stride + channel;
    DK_UNROLL for (int i = 0; i < kParts; ++i) {
      if (n > i * kWidth) store_n(out + i * kWidth, state[i], n - i * kWidth);
    }
  }
}

void recur_gated(const dk_gated_recurrence_args& a, const StateRequest& request, int64_t channel) {
  a.is_float32 ? recur_gated_as<float>(a, request, channel)
               : recur_gated_as<uint16_t>(a, request, channel);
}

int64_t padded(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

// The slice of the state, a query and a key.
int64_t scratch_floats(const dk_linear_attention_args& a) {
  return a.key_size * kColumns + 2 * padded(a.key_size);
}

// log(1 + e^x): max(x, 0) + log(1 + t) with t = e^-|x|; log(1 + t) = 2 artanh(t / (2 + t)), whose
// series ends when a term is below the precision, because the argument is at most 1/3. NaN stays
// NaN.
DK_INLINE VF softplus(VF x) {
  const VF t = exp(min(x, sub(zero(), x)));
  const VF s = div(t, add(t, set1(2.0f))), z = mul(s, s);
  VF p = set1(1.0f / 15.0f);
  DK_UNROLL for (int i = 13; i > 0; i -= 2) p = fma(p, z, set1(1.0f / static_cast<float>(i)));
  return fma(add(s, s), p, max(zero(), x));
}

// The factors of kWidth tokens of a head: on the state, and on the value or its correction.
struct Gates {
  float decays[kWidth], scales[kWidth];
};

template <class T, bool kDelta>
DK_INLINE void compute_gates(const dk_linear_attention_args& a, int64_t head, int64_t token,
                             int64_t count, Gates& gates) {
  float logits[kWidth] = {}, betas[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    const auto at = [&](const void* base, int64_t stride) {
      return value_of(static_cast<const T*>(base)[(token + i) * stride + head]);
    };
    logits[i] = at(a.steps, a.steps_stride);
    if (kDelta) betas[i] = at(a.betas, a.betas_stride);
  }
  VF step = softplus(add(load(logits), set1(a.step_bias[head])));
  step = min(set1(a.max_step), max(set1(a.min_step), step));  // this order keeps NaN
  store(gates.decays, Exponential(mul(step, set1(a.rates[head]))).decay());
  store(gates.scales, kDelta ? sigmoid(load(betas)) : step);
}

// Store a query or key as floats, with zeros behind; its length is `length` if eps > 0.
template <class T>
DK_INLINE void read_key(const void* base, int64_t index, int64_t size, float eps, float length,
                        float* out) {
  VF squares = zero();
  for (int64_t i = 0; i < size; i += kWidth) {
    const VF x = load_n<T>(base, index + i, size - i);
    squares = fma(x, x, squares);
    store(out + i, x);
  }
  if (!(eps > 0)) return;
  float lanes[kWidth], sum = 0;
  store(lanes, squares);
  for (int i = 0; i < kWidth; ++i) sum += lanes[i];
  const VF scale = set1(length / __builtin_sqrtf(sum + eps));
  for (int64_t i = 0; i < size; i += kWidth) store(out + i, mul(load(out + i), scale));
}

// One token: the slice [key_size, kColumns] of the state, and the result in `y`.
template <bool kDelta>
DK_INLINE void step(float* state, const float* q, const float* k, float factor, float beta,
                    int64_t key_size, const VF* v, VF* y) {
  VF u[kVectors];
  const VF scale = set1(factor);
  if (kDelta) {
    VF known[kVectors];
    DK_UNROLL for (int i = 0; i < kVectors; ++i) known[i] = zero();
    for (int64_t f = 0; f < key_size; ++f) {
      float* const row = state + f * kColumns;
      const VF key = set1(k[f]);
      DK_UNROLL for (int i = 0; i < kVectors; ++i) {
        const VF s = mul(load(row + i * kWidth), scale);
        store(row + i * kWidth, s);
        known[i] = fma(key, s, known[i]);
      }
    }
    DK_UNROLL for (int i = 0; i < kVectors; ++i) u[i] = mul(set1(beta), sub(v[i], known[i]));
  } else {
    DK_UNROLL for (int i = 0; i < kVectors; ++i) u[i] = v[i];
  }
  VF sums[kVectors];
  DK_UNROLL for (int i = 0; i < kVectors; ++i) sums[i] = zero();
  for (int64_t f = 0; f < key_size; ++f) {
    float* const row = state + f * kColumns;
    const VF key = set1(k[f]), query = set1(q[f]);
    DK_UNROLL for (int i = 0; i < kVectors; ++i) {
      VF s = load(row + i * kWidth);
      if (!kDelta) s = mul(s, scale);
      s = fma(key, u[i], s);
      store(row + i * kWidth, s);
      sums[i] = fma(query, s, sums[i]);
    }
  }
  DK_UNROLL for (int i = 0; i < kVectors; ++i) y[i] = sums[i];
}

void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows,
               int64_t n) {
  for (int64_t f = 0; f < rows; ++f) memcpy(to + f * to_stride, from + f * from_stride, n * 4);
}

template <class T, bool kDelta>
void recur_as(const dk_linear_attention_args& a, const StateRequest& request, int64_t head,
              int64_t column, float* state) {
  const dk_state_parts& parts = *a.parts;
  const int64_t n = a.value_size - column < kColumns ? a.value_size - column : kColumns;
  float* const q = state + a.key_size * kColumns;
  float* const k = q + padded(a.key_size);
  float* const states = a.states + head * a.key_size * a.value_size + column;
  const int64_t read = parts.reads[request.part];
  if (read < 0 || n < kColumns) memset(state, 0, a.key_size * kColumns * sizeof(float));
  if (read >= 0) {
    copy_rows(states + read * a.block_stride, a.value_size, state, kColumns, a.key_size, n);
  }
  const int64_t group = head / (a.num_heads / a.num_groups) * a.key_size;
  const float query_length = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_size));
  const VF skip = set1(a.skip ? a.skip[head] : 0.0f);
  int64_t t = request.token;
  for (int64_t part = request.part; part < request.part + request.num_parts; ++part) {
    for (const int64_t end = t + parts.sizes[part]; t < end;) {
      const int64_t count = end - t < kWidth ? end - t : kWidth;
      Gates gates;
      compute_gates<T, kDelta>(a, head, t, count, gates);
      for (int64_t i = 0; i < count; ++i, ++t) {
        read_key<T>(a.q, t * a.q_stride + group, a.key_size, a.key_eps, query_length, q);
        read_key<T>(a.k, t * a.k_stride + group, a.key_size, a.key_eps, 1.0f, k);
        const int64_t value = t * a.v_stride + head * a.value_size + column;
        VF v[kVectors], u[kVectors], y[kVectors];
        DK_UNROLL for (int j = 0; j < kVectors; ++j) {
          const int64_t left = n - j * kWidth;
          v[j] = left > 0 ? load_n<T>(a.v, value + j * kWidth, left) : zero();
          u[j] = kDelta ? v[j] : mul(v[j], set1(gates.scales[i]));
        }
        step<kDelta>(state, q, k, gates.decays[i], gates.scales[i], a.key_size, u, y);
        float* const out = a.y + (t * a.num_heads + head) * a.value_size + column;
        DK_UNROLL for (int j = 0; j < kVectors; ++j) {
          const int64_t left = n - j * kWidth;
          const VF sum = a.skip ? fma(skip, v[j], y[j]) : y[j];
          if (left > 0) store_n(out + j * kWidth, sum, left);
        }
      }
    }
    copy_rows(state, kColumns, states + parts.writes[part] * a.block_stride, a.value_size,
              a.key_size, n);
  }
}

void recur(const dk_linear_attention_args& a, const StateRequest& request, int64_t head,
           int64_t column, float* state) {
  if (a.is_float32) {
    a.betas ? recur_as<float, true>(a, request, head, column, state)
            : recur_as<float, false>(a, request, head, column, state);
  } else {
    a.betas ? recur_as<uint16_t, true>(a, request, head, column, state)
            : recur_as<uint16_t, false>(a, request, head, column, state);
  }
}

}  // namespace

const StatesTable states_table = {kChannels, kColumns, scratch_floats,
                                  convolve,  recur,    recur_gated};

}  // namespace dk::DK_LEVEL_NAMESPACE
