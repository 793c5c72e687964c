// Kernels of the probes, per level. Each returns a value that depends on all of its work.
#pragma once
#include "dispatch.h"

namespace dk {

struct ProbeKernels {
  int64_t (*read_memory)(const char* memory, int64_t num_bytes);
  int64_t (*multiply_floats)(int64_t iterations);  // returns floating point operations done
  int64_t (*multiply_bytes)(int64_t iterations);   // returns integer operations done
};

}  // namespace dk

DK_DECLARE_TABLES(dk::ProbeKernels, probe)
