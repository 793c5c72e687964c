// Out of memory: thrown inside the library, a result at the C ABI.
//
// The caller of an operation sees DK_NO_MEMORY, on whichever thread of the team it happened.
#pragma once
#include <cstddef>
#include <cstdint>
#include <new>

#include "dovetail_kernels.h"

namespace dk {

struct NoMemory {
  size_t num_bytes;  // above 0
};

// Keep for dk_failed_operation; returns DK_NO_MEMORY. operation: lives as long as the library.
int64_t note_failure(const char* operation, size_t num_bytes);

// Run an operation's body and return its result. No exception leaves the C ABI.
template <class F>
int64_t result_of(const char* operation, F body) {
  try {
    body();
  } catch (const NoMemory& failure) {
    return note_failure(operation, failure.num_bytes);
  } catch (const std::bad_alloc&) {
    return note_failure(operation, 0);
  }
  return DK_OK;
}

}  // namespace dk
