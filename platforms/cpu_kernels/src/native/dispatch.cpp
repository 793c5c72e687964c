// The CPU's features, the level in use, and the functions of the ABI that are not operations.
#include "dispatch.h"

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>

#if DK_X86
#include <cpuid.h>
#endif

namespace dk {
namespace {

#if DK_X86
// Bits of cpuid and xgetbv as numbered in the processor manuals.
bool has(unsigned word, int bit) { return word >> bit & 1; }

uint64_t enabled_state() {
  unsigned low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

int detect_level() {
  constexpr uint64_t kYmmState = 0x06, kZmmState = 0xe6;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return DK_PORTABLE;
  const bool fma = has(c, 12), f16c = has(c, 29), osxsave = has(c, 27), avx = has(c, 28);
  if (!(fma && f16c && osxsave && avx)) return DK_PORTABLE;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return DK_PORTABLE;
  const bool avx2 = has(b, 5), vnni = has(c, 11);
  const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // f, dq, bw, vl
  const uint64_t state = enabled_state();
  if (!avx2 || (state & kYmmState) != kYmmState) return DK_PORTABLE;
  if (!avx512 || (state & kZmmState) != kZmmState) return DK_AVX2;
  const bool bf16 = __get_cpuid_count(7, 1, &a, &b, &c, &d) && has(a, 5);
  return vnni && bf16 ? DK_AVX512_BF16 : DK_AVX512;
}
#else
int detect_level() { return DK_PORTABLE; }
#endif

const int highest_level = detect_level();
std::atomic<int> level_in_use{highest_level};

constexpr int64_t kHugePage = 2 << 20;
int64_t whole_pages(int64_t num_bytes) {
  return (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

int current_level() { return level_in_use.load(std::memory_order_relaxed); }

}  // namespace dk

int64_t dk_abi_version(void) { return DK_ABI_VERSION; }
int64_t dk_level(void) { return dk::current_level(); }
int64_t dk_highest_level(void) { return dk::highest_level; }

int64_t dk_set_level(int64_t level) {
  const int64_t possible = std::clamp<int64_t>(level, DK_PORTABLE, dk::highest_level);
  dk::level_in_use.store(static_cast<int>(possible));
  return dk_level();
}

void* dk_alloc(int64_t num_bytes) {
  // Map a huge page more than requested and unmap the parts before and after the aligned part.
  const int64_t size = dk::whole_pages(num_bytes), mapped = size + dk::kHugePage;
  const int protection = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS;
  char* const base = static_cast<char*>(mmap(nullptr, mapped, protection, kind, -1, 0));
  if (base == MAP_FAILED) return nullptr;
  const int64_t before = -reinterpret_cast<intptr_t>(base) & (dk::kHugePage - 1);
  if (before) munmap(base, before);
  munmap(base + before + size, dk::kHugePage - before);
#ifdef MADV_HUGEPAGE
  madvise(base + before, size, MADV_HUGEPAGE);  // a hint: if refused, small pages are used
#endif
  return base + before;
}

void dk_free(void* memory, int64_t num_bytes) {
  if (memory) munmap(memory, dk::whole_pages(num_bytes));
}
