// The small operations at a level: 16 numbers at a time, the rest of a row in a padded vector.
//
// Sums of squares use two chains of fused products, then add both, for every row of a size.
#include "attention_simd.h"
#include "ops.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

// The first n < 16 numbers, followed by zeros.
Vec load_bf16_first(const uint16_t* p, int64_t n) {
  uint16_t room[kLanes] = {};
  memcpy(room, p, n * 2);
  return load_bf16(room);
}
void store_bf16_first(uint16_t* p, Vec x, int64_t n) {
  uint16_t room[kLanes];
  store_bf16(room, x);
  memcpy(p, room, n * 2);
}

float scale_of_row(const uint16_t* x, int64_t size, float eps) {
  Vec even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Vec a = load_bf16(x + i), b = load_bf16(x + i + kLanes);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < size; i += kLanes) {
    const Vec a = size - i >= kLanes ? load_bf16(x + i) : load_bf16_first(x + i, size - i);
    even = fma(a, a, even);
  }
  return 1.f / __builtin_sqrtf(reduce_add(add(even, odd)) / static_cast<float>(size) + eps);
}

void normalize(const uint16_t* x, const uint16_t* weight, float offset, float eps, int64_t size,
               uint16_t* y) {
  const Vec scale = set(scale_of_row(x, size, eps)), one = set(offset);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store_bf16(y + i, mul(mul(load_bf16(x + i), scale), add(load_bf16(weight + i), one)));
  }
  if (i < size) {
    const Vec w = add(load_bf16_first(weight + i, size - i), one);
    store_bf16_first(y + i, mul(mul(load_bf16_first(x + i, size - i), scale), w), size - i);
  }
}

void rms_norm(const dk_rms_norm_args& a, int64_t begin, int64_t end) {
  const auto* const weight = static_cast<const uint16_t*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t outer = row / a.num_inner, inner = row % a.num_inner;
    const int64_t x = outer * a.x_outer_stride + inner * a.x_inner_stride;
    const int64_t y = outer * a.y_outer_stride + inner * a.y_inner_stride;
    normalize(static_cast<const uint16_t*>(a.x) + x, weight, a.weight_offset, a.eps, a.size,
              static_cast<uint16_t*>(a.y) + y);
  }
}

void add_rows(const uint16_t* x, int64_t size, uint16_t* sum) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store_bf16(sum + i, add(load_bf16(x + i), load_bf16(sum + i)));
  }
  if (i < size) {
    const int64_t n = size - i;
    store_bf16_first(sum + i, add(load_bf16_first(x + i, n), load_bf16_first(sum + i, n)), n);
  }
}

void add_rms_norm(const dk_add_rms_norm_args& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* const x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
    uint16_t* const sum = static_cast<uint16_t*>(a.residual) + row * a.residual_stride;
    add_rows(x, a.size, sum);
    normalize(sum, static_cast<const uint16_t*>(a.weight), a.weight_offset, a.eps, a.size,
              static_cast<uint16_t*>(a.y) + row * a.y_stride);
  }
}

// The mean, then the sum of squared differences from it: no cancellation for a mean far from 0.
struct Moments {
  float mean, scale;
  Moments(const uint16_t* x, int64_t size, float eps) {
    const int last = static_cast<int>(size % kLanes);
    const int64_t whole = size - last;
    Vec even = zero(), odd = zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      even = add(even, load_bf16(x + i));
      odd = add(odd, load_bf16(x + i + kLanes));
    }
    for (; i < whole; i += kLanes) even = add(even, load_bf16(x + i));
    if (last) odd = add(odd, load_bf16_first(x + whole, last));
    mean = reduce_add(add(even, odd)) / static_cast<float>(size);
    even = odd = zero();
    const Vec middle = set(mean);
    for (i = 0; i + 2 * kLanes <= whole; i += 2 * kLanes) {
      const Vec a = sub(load_bf16(x + i), middle), b = sub(load_bf16(x + i + kLanes), middle);
      even = fma(a, a, even);
      odd = fma(b, b, odd);
    }
    for (; i < whole; i += kLanes) {
      const Vec a = sub(load_bf16(x + i), middle);
      even = fma(a, a, even);
    }
    if (last) {
      const Vec a = sub(load_bf16_first(x + whole, last), middle);
      const Vec b = keep_lanes(a, 0, last, zero());
      odd = fma(b, b, odd);
    }
    const float variance = reduce_add(add(even, odd)) / static_cast<float>(size);
    scale = 1.f / __builtin_sqrtf(variance + eps);
  }
};

void layer_norm(const dk_layer_norm_args& a, int64_t begin, int64_t end) {
  const auto* const weight = static_cast<const uint16_t*>(a.weight);
  const auto* const bias = static_cast<const uint16_t*>(a.bias);
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
    uint16_t* const y = static_cast<uint16_t*>(a.y) + row * a.y_stride;
    if (a.residual) {
      uint16_t* const sum = static_cast<uint16_t*>(a.residual) + row * a.residual_stride;
      add_rows(x, a.size, sum);
      x = sum;
    }
    const Moments moments(x, a.size, a.eps);
    const Vec mean = set(moments.mean), scale = set(moments.scale);
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const int64_t n = a.size - i < kLanes ? a.size - i : kLanes;
      const bool whole = n == kLanes;
      const auto part = [&](const uint16_t* p) {
        return whole ? load_bf16(p + i) : load_bf16_first(p + i, n);
      };
      Vec v = mul(sub(part(x), mean), scale);
      if (weight) v = mul(v, part(weight));
      if (bias) v = add(v, part(bias));
      whole ? store_bf16(y + i, v) : store_bf16_first(y + i, v, n);
    }
  }
}

// One head: features of the first half with their partners in the second.
void turn(const uint16_t* x, const float* cosines, int64_t half, int64_t passed, uint16_t* y) {
  const float* const sines = cosines + half;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load_bf16(x + i), b = load_bf16(x + half + i);
    const Vec c = load(cosines + i), s = load(sines + i), minus = sub(zero(), s);
    store_bf16(y + i, fma(b, minus, mul(a, c)));
    store_bf16(y + half + i, fma(a, s, mul(b, c)));
  }
  for (; i < half; ++i) {
    const float a = float_of_bf16(x[i]), b = float_of_bf16(x[half + i]);
    y[i] = bf16_of_float(a * cosines[i] - b * sines[i]);
    y[half + i] = bf16_of_float(b * cosines[i] + a * sines[i]);
  }
  if (y != x && passed) memcpy(y + 2 * half, x + 2 * half, passed * 2);
}

void rotary(const dk_rotary_args& a, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2, passed = a.head_size - a.rotary_dim;
  for (int64_t t = begin; t < end; ++t) {
    const float* const cosines = a.cos_sin + a.positions[t] * a.rotary_dim;
    const auto* const q = static_cast<const uint16_t*>(a.q) + t * a.q_token_stride;
    const auto* const k = static_cast<const uint16_t*>(a.k) + t * a.k_token_stride;
    auto* const q_out = static_cast<uint16_t*>(a.q_out) + t * a.q_out_token_stride;
    auto* const k_out = static_cast<uint16_t*>(a.k_out) + t * a.k_out_token_stride;
    for (int64_t h = 0; h < a.num_heads; ++h) {
      turn(q + h * a.q_head_stride, cosines, half, passed, q_out + h * a.q_out_head_stride);
    }
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      turn(k + h * a.k_head_stride, cosines, half, passed, k_out + h * a.k_out_head_stride);
    }
  }
}

struct Sigmoid {
  static DK_INLINE Vec of(Vec x) { return sigmoid_of(x); }
};
struct Silu {
  static DK_INLINE Vec of(Vec x) { return mul(x, sigmoid_of(x)); }
};
// Hendrycks and Gimpel 2016, arXiv:1606.08415: x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
struct GeluTanh {
  static DK_INLINE Vec of(Vec x) {
    constexpr float kFactor = 2.f * 0.7978845608f;
    const Vec inner = mul(x, fma(mul(x, x), set(kFactor * 0.044715f), set(kFactor)));
    return mul(x, sigmoid_of(inner));
  }
};

void silu_mul(const dk_silu_mul_args& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* const gate = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
    const uint16_t* const up = gate + a.size;
    uint16_t* const y = static_cast<uint16_t*>(a.y) + row * a.y_stride;
    int64_t i = 0;
    for (; i + kLanes <= a.size; i += kLanes) {
      store_bf16(y + i, mul(Silu::of(load_bf16(gate + i)), load_bf16(up + i)));
    }
    if (i < a.size) {
      const int64_t n = a.size - i;
      const Vec last = mul(Silu::of(load_bf16_first(gate + i, n)), load_bf16_first(up + i, n));
      store_bf16_first(y + i, last, n);
    }
  }
}

// Each 16 numbers of a row: body(index, number of numbers).
template <class F>
DK_INLINE void each_part(int64_t size, F body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, size - i);
}
DK_INLINE Vec part_of(const uint16_t* p, int64_t n) {
  return n == kLanes ? load_bf16(p) : load_bf16_first(p, n);
}
DK_INLINE void store_part(uint16_t* p, Vec x, int64_t n) {
  n == kLanes ? store_bf16(p, x) : store_bf16_first(p, x, n);
}
DK_INLINE Vec part_of(const float* p, int64_t n) {
  if (n == kLanes) return load(p);
  float room[kLanes] = {};
  memcpy(room, p, n * sizeof(float));
  return load(room);
}
DK_INLINE void store_part(float* p, Vec x, int64_t n) {
  if (n == kLanes) return store(p, x);
  float room[kLanes];
  store(room, x);
  memcpy(p, room, n * sizeof(float));
}

void gated_norm(const dk_gated_norm_args& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / a.num_groups, group = row % a.num_groups;
    float* const x = a.x + row * a.size;
    const auto* const gate =
        static_cast<const uint16_t*>(a.gate) + token * a.gate_stride + group * a.size;
    const auto* const weight = static_cast<const uint16_t*>(a.weight) + group * a.weight_stride;
    auto* const y = static_cast<uint16_t*>(a.y) + row * a.size;
    Vec even = zero(), odd = zero();
    each_part(a.size, [&](int64_t i, int64_t n) {
      Vec v = part_of(x + i, n);
      if (!a.norm_first) {
        v = mul(v, Silu::of(part_of(gate + i, n)));
        store_part(x + i, v, n);
      }
      Vec& sum = i / kLanes % 2 ? odd : even;
      sum = fma(v, v, sum);
    });
    const float mean = reduce_add(add(even, odd)) / static_cast<float>(a.size);
    const Vec scale = set(1.f / __builtin_sqrtf(mean + a.eps));
    each_part(a.size, [&](int64_t i, int64_t n) {
      Vec v = mul(mul(part_of(x + i, n), scale), part_of(weight + i, n));
      if (a.norm_first) v = mul(v, Silu::of(part_of(gate + i, n)));
      store_part(y + i, v, n);
    });
  }
}

template <class Function>
void gate_mul(const dk_gate_mul_args& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const auto* const x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
    const auto* const gate = static_cast<const uint16_t*>(a.gate) + row * a.gate_stride;
    auto* const y = static_cast<uint16_t*>(a.y) + row * a.y_stride;
    each_part(a.size, [&](int64_t i, int64_t n) {
      store_part(y + i, mul(part_of(x + i, n), Function::of(part_of(gate + i, n))), n);
    });
  }
}

void add_shared(const dk_add_shared_args& a, int64_t begin, int64_t end) {
  const auto* const weight = static_cast<const uint16_t*>(a.gate);
  for (int64_t row = begin; row < end; ++row) {
    const auto* const shared = static_cast<const uint16_t*>(a.shared) + row * a.shared_stride;
    auto* const y = static_cast<uint16_t*>(a.y) + row * a.y_stride;
    Vec factor = set(1.f);
    if (weight) {
      const auto* const x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
      Vec even = zero(), odd = zero();
      each_part(a.size, [&](int64_t i, int64_t n) {
        Vec& sum = i / kLanes % 2 ? odd : even;
        sum = fma(part_of(x + i, n), part_of(weight + i, n), sum);
      });
      factor = sigmoid_of(set(reduce_add(add(even, odd))));
    }
    each_part(a.size, [&](int64_t i, int64_t n) {
      store_part(y + i, fma(part_of(shared + i, n), factor, part_of(y + i, n)), n);
    });
  }
}

struct Scale {
  Vec factor;
  explicit Scale(float value) : factor(set(value)) {}
  DK_INLINE Vec of(Vec x) const { return mul(x, factor); }
};
struct SoftCap {
  Vec cap;
  explicit SoftCap(float value) : cap(set(value)) {}
  DK_INLINE Vec of(Vec x) const { return mul(tanh_of(div(x, cap)), cap); }
};

template <class Function, class T>
void change(T* x, const Function& function, int64_t size) {
  each_part(size, [&](int64_t i, int64_t n) {
    store_part(x + i, function.of(part_of(x + i, n)), n);
  });
}

template <class Function>
void change_columns(const dk_scale_args& a, Span columns, int64_t row) {
  const Function function(a.factor);
  const int64_t first = row * a.stride + columns.begin, size = columns.end - columns.begin;
  if (a.is_float32) {
    change(static_cast<float*>(a.x) + first, function, size);
  } else {
    change(static_cast<uint16_t*>(a.x) + first, function, size);
  }
}

}  // namespace

const OpsTable ops_table = {
    rms_norm,
    add_rms_norm,
    layer_norm,
    rotary,
    silu_mul,
    gated_norm,
    gate_mul<Sigmoid>,
    gate_mul<GeluTanh>,
    add_shared,
    change_columns<Scale>,
    change_columns<SoftCap>,
};

}  // namespace dk::DK_LEVEL_NAMESPACE
