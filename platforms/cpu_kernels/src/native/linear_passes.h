// How a packed linear is divided into passes over its rows, for sources of the baseline that run
// such passes (linear.cpp, experts.cpp).
#pragma once
#include "linear.h"

namespace dk {

// The kernels of a kind of weights for so many rows.
const LinearKernels& kernels_for(int64_t kind, int64_t num_rows);

// How the rows of a linear are split into passes of whole tiles.
class Passes {
 public:
  Passes(const LinearKernels& kernels, int64_t kind, const dk_linear_args& args);
  int64_t count() const { return count_; }
  // The job of a pass, before `use_memory`. `args` must outlive it.
  LinearJob job(const dk_linear_args& args, int64_t pass) const;

 private:
  int64_t kind_, num_units_;
  int64_t tile_rows_, num_tiles_, count_;
};

// Bytes of a job's packed activations and of its four arrays of a number per row and group; if
// groups are refined, also of their low parts. A multiple of 64.
int64_t memory_of(const LinearKernels& kernels, const LinearJob& job);
// Complete a job with its rows of args->x and its memory.
void use_memory(const LinearKernels& kernels, LinearJob& job, char* memory);

}  // namespace dk
