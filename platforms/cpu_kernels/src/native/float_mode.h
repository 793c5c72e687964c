// The floating-point mode of a thread: rounding, and whether subnormal numbers count as zero.
//
// The host program may change it for its threads (torch.set_flush_denormal), and threads inherit
// it. Operations compute in the default mode on every thread, so that bits do not depend on it.
#pragma once
#include <cstdint>

#include "dispatch.h"

namespace dk {

// The default mode while this object exists, then the thread's own mode again. The asm statements
// clobber memory, so that loads of operands do not move before them, nor stores after them.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(read()) {
    if ((before_ & ~kStatus) != kDefault) write(kDefault);
  }
  ~DefaultFloatMode() {
    if ((before_ & ~kStatus) != kDefault) write(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if DK_X86
  using Word = uint32_t;
  static constexpr Word kDefault = 0x1f80, kStatus = 0x3f;  // of MXCSR; status: sticky exceptions
  static Word read() {
    Word word;
    asm volatile("stmxcsr %0" : "=m"(word) : : "memory");
    return word;
  }
  static void write(Word word) { asm volatile("ldmxcsr %0" : : "m"(word) : "memory"); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0, kStatus = 0;  // of FPCR
  static Word read() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word) : : "memory");
    return word;
  }
  static void write(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word kDefault = 0, kStatus = 0;
  static Word read() { return kDefault; }
  static void write(Word) {}
#endif
  const Word before_;
};

}  // namespace dk
