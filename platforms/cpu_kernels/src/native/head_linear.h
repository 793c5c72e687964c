// Products of heads at a level.
#pragma once
#include "dispatch.h"
#include "dovetail_ops.h"

namespace dk {

struct HeadLinearTable {
  int64_t num_columns;  // outputs that are computed together
  // For each thread: `num_inputs` floats of some tokens.
  int64_t (*scratch_floats)(const dk_head_linear_args& a);
  // Outputs [first, first + num_columns) of a head, of all tokens.
  void (*multiply)(const dk_head_linear_args& a, int64_t head, int64_t first, float* scratch);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::HeadLinearTable, head_linear_table)
