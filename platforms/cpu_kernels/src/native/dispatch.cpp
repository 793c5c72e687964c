// The CPU's features, the level in use, and the functions of the ABI that are not operations.
#include "dispatch.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "linear.h"

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

// Measured with one row: on Intel's processors a prefetch past the last-level cache halves the rate
// of a stream; on Zen 4 a prefetch into the first level halves the rate of codes of 8 bits, and one
// into the second level adds 8 to 30 % to it; on Zen 5 a prefetch past the last level helps.
StreamPrefetch choose_stream_prefetch() {
  constexpr unsigned kGenu = 0x756e6547, kAuth = 0x68747541;  // the first letters of the vendor
  constexpr unsigned kZen3And4 = 0x19;
  unsigned a, vendor, c, d;
  if (!__get_cpuid(0, &a, &vendor, &c, &d)) return StreamPrefetch::kNone;
  if (vendor == kGenu) return StreamPrefetch::kIntoAllLevels;
  unsigned version = 0, b;
  __get_cpuid(1, &version, &b, &c, &d);
  const unsigned family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
  if (vendor == kAuth && family == kZen3And4) return StreamPrefetch::kIntoSecondLevel;
  return StreamPrefetch::kPastLastLevel;
}

// Linux lets a process use the registers of matrix tiles only on request.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// The supported levels as bits.
unsigned detect_levels() {
  constexpr uint64_t kYmmState = 0x06, kZmmState = 0xe6, kTileState = 0x60000;
  unsigned a, b, c, d, found = 1u << DK_PORTABLE;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const bool fma = has(c, 12), f16c = has(c, 29), osxsave = has(c, 27), avx = has(c, 28);
  if (!(fma && f16c && osxsave && avx)) return found;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  const bool avx2 = has(b, 5), vnni = has(c, 11);
  const bool avx512 = has(b, 16) && has(b, 17) && has(b, 30) && has(b, 31);  // f, dq, bw, vl
  const bool tiles = has(d, 22) && has(d, 24) && has(d, 25);                 // bf16, tile, int8
  const uint64_t state = enabled_state();
  if (!avx2 || (state & kYmmState) != kYmmState) return found;
  found |= 1u << DK_AVX2;
  const bool more = __get_cpuid_count(7, 1, &a, &b, &c, &d);
  if (more && has(a, 4)) found |= 1u << DK_AVX2_VNNI;
  if (!avx512 || (state & kZmmState) != kZmmState) return found;
  found |= 1u << DK_AVX512;
  if (!vnni) return found;
  found |= 1u << DK_AVX512_VNNI;
  if (!more || !has(a, 5)) return found;
  found |= 1u << DK_AVX512_BF16;
  if (!tiles || (state & kTileState) != kTileState || !may_use_tiles()) return found;
  return found | 1u << DK_AVX512_AMX;
}
#else
StreamPrefetch choose_stream_prefetch() { return StreamPrefetch::kPastLastLevel; }
unsigned detect_levels() { return 1u << DK_PORTABLE; }
#endif

// Every level that was compiled has one of these tables.
const LinearKernels* const kGroupTables[kNumLevels] = DK_ALL_TABLES(linear_groups);
const LinearKernels* const kTileTables[kNumLevels] = DK_ALL_TABLES(group_tiles);

bool supports(int level) {
  if (level == DK_PORTABLE) return true;
  static const unsigned supported = detect_levels();
  return (supported >> level & 1) && (kGroupTables[level] || kTileTables[level]);
}

// The highest level up to `level` that is supported.
int possible_level(int level) {
  while (!supports(level)) --level;
  return level;
}

const int highest_level = possible_level(DK_AVX512_AMX);
std::atomic<int> level_in_use{highest_level};

constexpr int64_t kHugePage = 2 << 20;
int64_t whole_pages(int64_t num_bytes) {
  return (num_bytes + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

const StreamPrefetch stream_prefetch = choose_stream_prefetch();

int current_level() { return level_in_use.load(std::memory_order_relaxed); }

}  // namespace dk

int64_t dk_abi_version(void) { return DK_ABI_VERSION; }
int64_t dk_level(void) { return dk::current_level(); }
int64_t dk_highest_level(void) { return dk::highest_level; }

int64_t dk_supports_level(int64_t level) {
  return level >= DK_PORTABLE && level <= DK_AVX512_AMX && dk::supports(static_cast<int>(level));
}

int64_t dk_set_level(int64_t level) {
  const int64_t wished = std::clamp<int64_t>(level, DK_PORTABLE, DK_AVX512_AMX);
  dk::level_in_use.store(dk::possible_level(static_cast<int>(wished)));
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
