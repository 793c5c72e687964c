// The end of a packed linear, for one tile of rows and one panel: bias, act(gate, up), residual,
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

// Finish rows [0, num_rows) of a tile that begins at `first_row` of y; sum(row, vector) returns
// kWidth columns of the scaled sums. Elements are independent of each other.
template <class Sum>
DK_INLINE void finish_tile(const dk_linear_args& args, const PanelOutput& out, int64_t first_row,
                           int64_t num_rows, Sum sum) {
  const bool whole = out.num_columns == kColumns;
  if (whole && !args.bias && !args.residual && !(args.flags & (DK_GATE_UP | DK_OUT_F32))) {
    // Fast path of the usual case: the epilogue is a tenth of the work for small k.
    auto* y = static_cast<uint16_t*>(args.y) + first_row * args.ldy + out.first_column;
    for (int64_t r = 0; r < num_rows; ++r, y += args.ldy) {
      DK_UNROLL for (int v = 0; v < kVectorsPerPanel; ++v) store_bf16(y + v * kWidth, sum(r, v));
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
      store_output(args, first_row + r, out.first_column + offset, value, left);
    }
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
