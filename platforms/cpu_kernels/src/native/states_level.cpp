// The kernels of operations with states at a level.
//
// Linear attention keeps a slice of a head's state in a local buffer, which fits the first cache,
// and computes the recurrence token by token: two passes over the slice with the delta rule, one
// without. Sums are in the order of the key's features.
#include <cstring>

#include "simd.h"
#include "states.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr int64_t kChannels = 2 * kWidth;

DK_INLINE VF load_n(const float* p, int64_t n) {
  if (n >= kWidth) return load(p);
  float room[kWidth] = {};
  for (int64_t i = 0; i < n; ++i) room[i] = p[i];
  return load(room);
}

DK_INLINE VF silu(VF x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// A vector of channels of a request: its inputs before and in the step.
struct Inputs {
  const uint16_t* before;  // [width - 1, kChannels], a copy of the state
  const uint16_t* x;       // of the request's first token
  int64_t x_stride, num_before;

  DK_INLINE VF at(int64_t token, int64_t channel, int64_t n) const {
    return load_bf16_n(row(token) + channel, n);
  }
  DK_INLINE const uint16_t* row(int64_t token) const {
    return token < 0 ? before + (num_before + token) * kChannels : x + token * x_stride;
  }
};

void convolve(const dk_causal_conv_args& a, const StateRequest& request, int64_t channel) {
  const int64_t num_before = a.width - 1;
  const int64_t n = a.channels - channel < kChannels ? a.channels - channel : kChannels;
  const dk_state_parts& parts = *a.parts;
  uint16_t before[(DK_MAX_CONV_WIDTH - 1) * kChannels] = {};
  auto* const states = static_cast<uint16_t*>(a.states) + channel;
  const int64_t read = parts.reads[request.part];
  for (int64_t i = 0; read >= 0 && i < num_before; ++i) {
    memcpy(before + i * kChannels, states + read * a.block_stride + i * a.channels, n * 2);
  }
  float weights[DK_MAX_CONV_WIDTH][kChannels] = {}, bias[kChannels] = {};
  for (int64_t c = 0; c < n; ++c) {
    const auto* own = static_cast<const uint16_t*>(a.weight) + (channel + c) * a.weight_stride;
    for (int64_t i = 0; i < a.width; ++i) weights[i][c] = bf16_to_float(own[i]);
    if (a.bias) bias[c] = bf16_to_float(static_cast<const uint16_t*>(a.bias)[channel + c]);
  }
  const auto* const x = static_cast<const uint16_t*>(a.x) + request.token * a.x_stride + channel;
  const Inputs inputs{before, x, a.x_stride, num_before};
  auto* const y = static_cast<uint16_t*>(a.y) + request.token * a.y_stride + channel;
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
        store_bf16_n(y + t * a.y_stride + c, silu(sum), n - c);
      }
    }
    uint16_t* const out = states + parts.writes[part] * a.block_stride;
    for (int64_t i = 0; i < num_before; ++i) {
      memcpy(out + i * a.channels, inputs.row(end - num_before + i), n * 2);
    }
  }
}

int64_t scratch_floats(const dk_linear_attention_args& a) { return a.key_size * kColumns; }

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

void recur(const dk_linear_attention_args& a, const StateRequest& request, int64_t head,
           int64_t column, float* state) {
  const dk_state_parts& parts = *a.parts;
  const int64_t n = a.value_size - column < kColumns ? a.value_size - column : kColumns;
  float* const states = a.states + head * a.key_size * a.value_size + column;
  const int64_t read = parts.reads[request.part];
  if (read < 0 || n < kColumns) memset(state, 0, a.key_size * kColumns * sizeof(float));
  if (read >= 0) {
    copy_rows(states + read * a.block_stride, a.value_size, state, kColumns, a.key_size, n);
  }
  const int64_t group = head / (a.num_heads / a.num_groups);
  int64_t t = request.token;
  for (int64_t part = request.part; part < request.part + request.num_parts; ++part) {
    for (const int64_t end = t + parts.sizes[part]; t < end; ++t) {
      const int64_t key = (t * a.num_groups + group) * a.key_size, value = t * a.num_heads + head;
      const float* const own = a.v + value * a.value_size + column;
      float* const out = a.y + value * a.value_size + column;
      VF v[kVectors], y[kVectors];
      DK_UNROLL for (int i = 0; i < kVectors; ++i) v[i] = load_n(own + i * kWidth, n - i * kWidth);
      if (a.betas) {
        step<true>(state, a.q + key, a.k + key, a.factors[value], a.betas[value], a.key_size, v, y);
      } else {
        step<false>(state, a.q + key, a.k + key, a.factors[value], 0.0f, a.key_size, v, y);
      }
      DK_UNROLL for (int i = 0; i < kVectors; ++i) {
        if (n > i * kWidth) store_n(out + i * kWidth, y[i], n - i * kWidth);
      }
    }
    copy_rows(state, kColumns, states + parts.writes[part] * a.block_stride, a.value_size,
              a.key_size, n);
  }
}

}  // namespace

const StatesTable states_table = {kChannels, kColumns, scratch_floats, convolve, recur};

}  // namespace dk::DK_LEVEL_NAMESPACE
