// The last failure of each thread.
#include "failure.h"

namespace dk {
namespace {

struct Failure {
  const char* operation = "";
  int64_t num_bytes = 0;
};
thread_local Failure last;

}  // namespace

int64_t note_failure(const char* operation, size_t num_bytes) {
  last = {operation, static_cast<int64_t>(num_bytes)};
  return DK_NO_MEMORY;
}

}  // namespace dk

const char* dk_failed_operation(void) { return dk::last.operation; }
int64_t dk_failed_bytes(void) { return dk::last.num_bytes; }
