// The end of a packed linear, for some rows and one panel: bias, act(gate, up), residual,
// rounding, and the store into rows of any stride. Independent of the kind of weights: sums are
// floats.
#pragma once
#include "linear.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {

// The destination of one panel's outputs.
struct PanelOutput {
  int64_t first_column, num_columns;  // of the output; the existing part of the panel
  const uint16_t* bias;               // of the first column, or null
  const uint16_t* up_bias;            // with DK_GATE_UP
};

DK_INLINE PanelOutput panel_output(const dk_linear_args& args, int64_t panel) {
  const int64_t outputs = num_outputs(args.N, args.flags), width = outputs_per_panel(args.flags);
  PanelOutput out{panel * width, outputs - panel * width, nullptr, nullptr};
  if (out.num_columns > width) out.num_columns = width;
  if (args.bias) {
    out.bias = static_cast<const uint16_t*>(args.bias) + out.first_column;
    out.up_bias = out.bias + outputs;
  }
  return out;
}

// x * sigmoid(alpha * x).
DK_INLINE VF gated_linear(VF x, VF alpha) {
  return div(x, add(set1(1.0f), exp(sub(zero(), mul(alpha, x)))));
}

constexpr int64_t kActivations = DK_GELU | DK_GELU_TANH | DK_RELU | DK_SILU;

// x (1 + erf(x / sqrt(2))) / 2. erf(z) is z P(z^2) / Q(z^2) for |z| <= 3.9, beyond which it is 1 to
// 4e-8; the coefficients minimize the largest error, 1.5e-8.
DK_INLINE VF gelu(VF x) {
  const VF z = max(set1(-3.9f), min(set1(3.9f), mul(x, set1(0.70710678f)))), s = mul(z, z);
  VF p = fma(s, set1(2.050386708e-06f), set1(2.874570610e-04f));
  VF q = fma(s, set1(3.823072631e-05f), set1(1.181733138e-03f));
  p = fma(p, s, set1(3.836871301e-03f));
  q = fma(q, s, set1(1.510919424e-02f));
  p = fma(p, s, set1(5.296690194e-02f));
  q = fma(q, s, set1(1.147581575e-01f));
  p = fma(p, s, set1(1.919409094e-01f));
  q = fma(q, s, set1(5.034349801e-01f));
  p = fma(p, s, set1(1.128379032e+00f));
  q = fma(q, s, set1(1.0f));
  // Of numbers far below 0 the difference of 1 and erf must not remain.
  const VF half = mul(max(set1(-6.0f), x), set1(0.5f));
  return fma(half, div(mul(z, p), q), half);
}

DK_INLINE VF gelu_tanh(VF x) {
  constexpr float kFactor = 2.0f * 0.7978845608f;
  const VF inner = mul(x, fma(mul(x, x), set1(kFactor * 0.044715f), set1(kFactor)));
  return div(x, add(set1(1.0f), exp(sub(zero(), inner))));
}

DK_INLINE VF activate(VF gate, VF up, float limit, float alpha) {
  if (limit == 0.0f) return mul(gated_linear(gate, set1(1.0f)), up);
  // This order preserves a NaN.
  gate = min(set1(limit), gate);
  up = max(set1(-limit), min(set1(limit), up));
  return mul(gated_linear(gate, set1(alpha)), add(up, set1(1.0f)));
}

DK_INLINE void store_output(const dk_linear_args& args, int64_t row, int64_t column, VF v,
                            int64_t n) {
  if (args.residual) {
    const auto* residual = static_cast<const uint16_t*>(args.residual) + row * args.ld_residual;
    v = add(v, load_bf16_n(residual + column, n));
  }
  if (args.flags & DK_OUT_F32) {
    store_n(static_cast<float*>(args.y) + row * args.ldy + column, v, n);
  } else {
    store_bf16_n(static_cast<uint16_t*>(args.y) + row * args.ldy + column, v, n);
  }
}

// Fetch the lines of y that finish_tile will write, while its sums are computed: a store waits for
// its line, and the lines of a panel are a row apart.
DK_INLINE void prefetch_outputs(const dk_linear_args& args, const PanelOutput& out,
                                int64_t first_row, int64_t num_rows) {
  const int64_t size = args.flags & DK_OUT_F32 ? 4 : 2;
  const char* y = static_cast<const char*>(args.y);
  y += (first_row * args.ldy + out.first_column) * size;
  for (int64_t r = 0; r < num_rows; ++r, y += args.ldy * size) __builtin_prefetch(y, 1);
}

// Activate whole rows of a panel, in place. A function of its own, so that each kernel stays small.
static __attribute__((noinline)) void activate_rows(int64_t flags, float* values, int64_t n) {
  const auto each = [&](auto&& function) {
    for (int64_t i = 0; i < n; i += kWidth) store(values + i, function(load(values + i)));
  };
  switch (flags & kActivations) {
    case DK_GELU: return each([](VF x) { return gelu(x); });
    case DK_GELU_TANH: return each([](VF x) { return gelu_tanh(x); });
    case DK_RELU: return each([](VF x) { return max(zero(), x); });
    case DK_SILU: return each([](VF x) { return gated_linear(x, set1(1.0f)); });
  }
}

// Finish rows first_row to first_row + num_rows - 1 of y. sum(r, vector) returns kWidth columns of
// the scaled sums of row first_row + r. Elements are independent of each other.
template <class Sum>
DK_INLINE void finish_tile(const dk_linear_args& args, const PanelOutput& out, int64_t first_row,
                           int64_t num_rows, Sum sum) {
  const bool whole = out.num_columns == kColumns, activated = args.flags & kActivations;
  if (whole && !args.residual && !(args.flags & (DK_GATE_UP | DK_OUT_F32))) {
    // Fast path of the usual case: the epilogue is a tenth of the work for small k.
    auto* y = static_cast<uint16_t*>(args.y) + first_row * args.ldy + out.first_column;
    VF bias[kVectorsPerPanel];
    DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) {
      bias[v] = out.bias ? load_bf16(out.bias + v * kWidth) : zero();
    }
    for (int64_t r = 0; r < num_rows; ++r, y += args.ldy) {
      VF row[kVectorsPerPanel];
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) row[v] = add(sum(r, v), bias[v]);
      if (activated) {
        float values[kColumns];
        DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) store(values + v * kWidth, row[v]);
        activate_rows(args.flags, values, kColumns);
        DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) row[v] = load(values + v * kWidth);
      }
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) store_bf16(y + v * kWidth, row[v]);
    }
    return;
  }
  const bool gated = args.flags & DK_GATE_UP;
  const int vectors = gated ? kVectorsPerPanel / 2 : kVectorsPerPanel;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int v = 0; v < vectors; ++v) {
      const int64_t offset = v * kWidth, left = out.num_columns - offset;
      if (left <= 0) break;
      VF value = sum(r, v);
      if (out.bias) value = add(value, load_bf16_n(out.bias + offset, left));
      if (gated) {
        VF up = sum(r, v + vectors);
        if (out.bias) up = add(up, load_bf16_n(out.up_bias + offset, left));
        value = activate(value, up, args.limit, args.alpha);
      }
      if (activated) {
        float values[kWidth];
        store(values, value);
        activate_rows(args.flags, values, kWidth);
        value = load(values);
      }
      store_output(args, first_row + r, out.first_column + offset, value, left);
    }
  }
}

// Finish all rows of a job in a panel, from their sums [row][32].
DK_INLINE void finish_panel(const LinearJob& job, int64_t panel, const float* sums) {
  finish_tile(*job.args, panel_output(*job.args, panel), job.first_row, job.num_rows,
              [&](int64_t r, int v) { return load(sums + r * kPanel + v * kWidth); });
}

}  // namespace dk::DK_LEVEL_NAMESPACE
