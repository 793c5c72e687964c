// Probes for benchmarks: the limits that a kernel is compared with, measured with the same team at
// the same time.
#include "probe.h"

#include <atomic>

#include "team.h"

int64_t dk_probe_read(const dk_probe_read_args* args) {
  constexpr int64_t kPiece = 256 << 10;
  const auto* const memory = static_cast<const char*>(args->memory);
  const auto& kernels = DK_PICK(probe);
  std::atomic<int64_t> sum{0};
  dk::parallel_for(args->num_bytes / kPiece, 1, [&](int64_t begin, int64_t end) {
    sum += kernels.read_memory(memory + begin * kPiece, (end - begin) * kPiece);
  });
  *args->result = sum;
  return DK_OK;
}

int64_t dk_probe_multiply(const dk_probe_multiply_args* args) {
  const auto& kernels = DK_PICK(probe);
  const auto multiply = args->kind == DK_BF16 ? kernels.multiply_floats : kernels.multiply_bytes;
  std::atomic<int64_t> sum{0};
  const int64_t pieces = 64 * dk::num_threads(), each = args->iterations / 64;
  dk::parallel_for(pieces, 1, [&](int64_t, int64_t) { sum += multiply(each); });
  *args->result = sum;
  return DK_OK;
}
