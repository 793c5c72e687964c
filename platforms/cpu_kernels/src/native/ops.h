// The small operations of a level, on a range of rows.
#pragma once
#include "dispatch.h"
#include "dovetail_ops.h"

namespace dk {

// A range of columns.
struct Span {
  int64_t begin, end;
};

struct OpsTable {
  void (*rms_norm)(const dk_rms_norm_args&, int64_t begin, int64_t end);  // of outer x inner rows
  void (*add_rms_norm)(const dk_add_rms_norm_args&, int64_t begin, int64_t end);
  void (*layer_norm)(const dk_layer_norm_args&, int64_t begin, int64_t end);
  void (*rotary)(const dk_rotary_args&, int64_t begin, int64_t end);
  void (*silu_mul)(const dk_silu_mul_args&, int64_t begin, int64_t end);
  void (*gated_norm)(const dk_gated_norm_args&, int64_t begin, int64_t end);  // of tokens x groups
  void (*sigmoid_mul)(const dk_gate_mul_args&, int64_t begin, int64_t end);
  void (*gelu_tanh_mul)(const dk_gate_mul_args&, int64_t begin, int64_t end);
  void (*add_shared)(const dk_add_shared_args&, int64_t begin, int64_t end);
  void (*scale)(const dk_scale_args&, Span columns, int64_t row);
  void (*soft_cap)(const dk_scale_args&, Span columns, int64_t row);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::OpsTable, ops_table)
