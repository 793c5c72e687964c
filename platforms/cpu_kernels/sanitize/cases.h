// Cases of the sanitizer driver: random shapes on exactly sized memory, so that a read or write of
// one byte outside of it is detected. A case file registers itself and is compiled with all other
// files:
//
//     DK_CASE(linear_bf16) { ... dk_linear_bf16(&args); check(y.all_written(), "y"); }
//
// Each case runs many times at every level that the CPU has, with one thread and with three. A case
// of code that is compiled once is a DK_CASE_ONCE, which runs at the lowest level only.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "dovetail_kernels.h"

namespace cases {

// A small generator (xorshift64*); each case gets one that is seeded by its name and turn.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2685821657736338717ull + 1) {}
  uint64_t bits() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 2685821657736338717ull;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() >> 11) % n; }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool coin() { return bits() >> 63; }
  float uniform() { return static_cast<float>(below(1 << 20)) / (1 << 19) - 1.0f; }

 private:
  uint64_t state_;
};

// Exactly `count` elements on the heap, `skew` elements behind a 64 byte boundary; the sanitizer
// watches both ends.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count, int64_t skew = 0) : count_(count) {
    // aligned_alloc needs multiples of the alignment: the front is padded so that the end is exact.
    const size_t used = static_cast<size_t>(count + skew) * sizeof(T);
    front_ = skew * sizeof(T);
    if (posix_memalign(&memory_, 64, used ? used : 1)) abort();
    memset(memory_, 0, used);
  }
  ~Buffer() { free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() { return reinterpret_cast<T*>(static_cast<char*>(memory_) + front_); }
  T& operator[](int64_t i) { return data()[i]; }
  int64_t size() const { return count_; }

 private:
  void* memory_ = nullptr;
  size_t front_ = 0;
  int64_t count_;
};

inline uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
inline void fill(Buffer<uint16_t>& buffer, Random& random) {
  for (int64_t i = 0; i < buffer.size(); ++i) buffer[i] = to_bf16(random.uniform());
}
inline void fill(Buffer<float>& buffer, Random& random) {
  for (int64_t i = 0; i < buffer.size(); ++i) buffer[i] = random.uniform();
}

// Exit with a message that says what is wrong.
inline void check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "wrong: %s\n", what);
  exit(1);
}

struct Case {
  const char* name;
  void (*run)(Random&);
  bool runs_once;
  Case* next;
  Case(const char* name_, void (*run_)(Random&), bool runs_once_);
};

}  // namespace cases

#define DK_CASE_OF(name, runs_once)                                         \
  static void run_##name(cases::Random& random);                            \
  static cases::Case case_##name(#name, run_##name, runs_once);             \
  static void run_##name([[maybe_unused]] cases::Random& random)
#define DK_CASE(name) DK_CASE_OF(name, false)
#define DK_CASE_ONCE(name) DK_CASE_OF(name, true)
