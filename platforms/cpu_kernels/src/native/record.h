// Record operations while they run: the first line of each exported operation is
// dk::note(dk_<op>, args). It only tests a flag if nothing is recorded.
#pragma once
#include <cstddef>

#include "dispatch.h"

namespace dk {

extern thread_local bool is_recording;

// Store the operation and a copy of its struct in this thread's record.
void note_call(int64_t (*operation)(const void*), const void* args, size_t num_bytes);

template <class Args>
DK_INLINE void note(int64_t (*operation)(const Args*), const Args* args) {
  if (!is_recording) return;
  note_call(reinterpret_cast<int64_t (*)(const void*)>(operation), args, sizeof(Args));
}

}  // namespace dk
