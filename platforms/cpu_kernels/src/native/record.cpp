// Recording: the operations of one thread, stored in one block of memory that can be replayed.
#include "record.h"

#include <stdlib.h>

#include <cstring>
#include <new>
#include <vector>

#include "float_mode.h"

namespace dk {

thread_local bool is_recording = false;

namespace {

constexpr size_t kAlignment = 16;

struct Noted {
  int64_t (*operation)(const void*);
  size_t offset;  // of its struct
};

thread_local std::vector<Noted> noted;
thread_local std::vector<char> structs;
thread_local bool is_incomplete = false;  // there was not enough memory for an operation

}  // namespace

void note_call(int64_t (*operation)(const void*), const void* args, size_t num_bytes) {
  // No exception may leave the C ABI: dk_record_end reports it.
  try {
    const size_t offset = structs.size();
    structs.resize(offset + (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
    memcpy(structs.data() + offset, args, num_bytes);
    noted.push_back({operation, offset});
  } catch (const std::bad_alloc&) {
    is_incomplete = true;
  }
}

}  // namespace dk

void dk_record_begin(void) {
  dk::noted.clear();
  dk::structs.clear();
  dk::is_incomplete = false;
  dk::is_recording = true;
}

const dk_call* dk_record_end(int64_t* num_calls) {
  using dk::noted;
  dk::is_recording = false;
  const size_t calls_bytes = noted.size() * sizeof(dk_call);  // a multiple of the alignment
  static_assert(sizeof(dk_call) % dk::kAlignment == 0 || sizeof(void*) < 8);
  auto* const memory = static_cast<char*>(malloc(calls_bytes + dk::structs.size() + 1));
  *num_calls = 0;
  if (!memory || dk::is_incomplete) {
    free(memory);
    return nullptr;
  }
  auto* const calls = reinterpret_cast<dk_call*>(memory);
  for (size_t i = 0; i < noted.size(); ++i) {
    calls[i] = {noted[i].operation, memory + calls_bytes + noted[i].offset};
  }
  if (!dk::structs.empty()) memcpy(memory + calls_bytes, dk::structs.data(), dk::structs.size());
  *num_calls = static_cast<int64_t>(noted.size());
  noted.clear();
  dk::structs.clear();
  return calls;
}

void dk_record_free(const dk_call* calls) { free(const_cast<dk_call*>(calls)); }

int64_t dk_replay(const dk_call* calls, int64_t n) {
  const dk::DefaultFloatMode mode;  // once, not for each operation
  int64_t result = DK_OK;
  for (int64_t i = 0; i < n && result == DK_OK; ++i) result = calls[i].fn(calls[i].args);
  return result;
}
