// Sampling at a level, for a range of rows.
#pragma once
#include "dispatch.h"
#include "dovetail_sampling.h"

namespace dk {

struct SamplingTable {
  void (*argmax)(const dk_argmax_args&, int64_t begin, int64_t end);
  void (*mask)(const dk_mask_args&, int64_t begin, int64_t end);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::SamplingTable, sampling_table)
