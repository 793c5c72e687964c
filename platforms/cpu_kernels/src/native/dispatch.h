// Levels: how a kernel is compiled for each instruction set, and how one is selected.
//
// A source named `*_level.cpp` is compiled once per level with that level's flags (setup.py) and
// with
//     DK_LEVEL            0 portable, 1 avx2, 2 avx512 (f, bw, vl, dq), 3 avx512_bf16 (vnni, bf16)
//     DK_LEVEL_NAMESPACE  the level's name
// Levels with an extension of another (avx2_vnni, avx512_vnni, avx512_amx) have its DK_LEVEL; only
// the sources that use the extension are compiled for them, and test the compiler's own macros. All
// other sources are compiled once for the baseline of the architecture. A level source defines, in
// namespace dk::DK_LEVEL_NAMESPACE, a constant table of function pointers; a baseline source
// declares the tables and picks one when called:
//
//     struct OpsTable { void (*rms_norm)(const Job&, int64_t begin, int64_t end); };
//     DK_DECLARE_TABLES(OpsTable, ops_table)                        // in ops.h, global scope
//     namespace dk::DK_LEVEL_NAMESPACE { const OpsTable ops_table = {...}; }       // ops_level.cpp
//     DK_PICK(ops_table).rms_norm(job, 0, n);                                       // ops.cpp
//
// A level source must not emit code that other sources may share: no std containers, and inline
// functions of other namespaces only if always inlined. The linker keeps one copy of such a
// function; a copy compiled for AVX-512 would crash an older CPU. (Lower levels are linked first.)
#pragma once
#include <cstdint>

#include "dovetail_kernels.h"

#if defined(__x86_64__)
#define DK_X86 1
#else
#define DK_X86 0
#endif

#define DK_INLINE inline __attribute__((always_inline))

// A level that was not compiled, or has no table of its own, has a null address.
#ifdef DK_LEVEL
#define DK_IF_COMPILED
#else
#define DK_IF_COMPILED __attribute__((weak))
#endif
#define DK_DECLARE_TABLE(level, Type, name) \
  namespace dk { namespace level { extern const Type name DK_IF_COMPILED; } }
#define DK_DECLARE_TABLES(Type, name)       \
  DK_DECLARE_TABLE(portable, Type, name)    \
  DK_DECLARE_TABLE(avx2, Type, name)        \
  DK_DECLARE_TABLE(avx2_vnni, Type, name)   \
  DK_DECLARE_TABLE(avx512, Type, name)      \
  DK_DECLARE_TABLE(avx512_vnni, Type, name) \
  DK_DECLARE_TABLE(avx512_bf16, Type, name) \
  DK_DECLARE_TABLE(avx512_amx, Type, name)
// Addresses by level: DK_PORTABLE ... DK_AVX512_AMX.
#define DK_ALL_TABLES(name)                                                             \
  {&dk::portable::name,    &dk::avx2::name,        &dk::avx2_vnni::name, &dk::avx512::name, \
   &dk::avx512_vnni::name, &dk::avx512_bf16::name, &dk::avx512_amx::name}

namespace dk {

constexpr int kNumLevels = DK_AVX512_AMX + 1;

// How kernels prefetch data that is read once per step. Past the last-level cache, that cache keeps
// the data of code that runs between kernels (the step of the engine). Into the second level: every
// other line, a short distance ahead.
enum class StreamPrefetch { kNone, kIntoAllLevels, kPastLastLevel, kIntoSecondLevel };
extern const StreamPrefetch stream_prefetch;

// The level in use, one of DK_PORTABLE ... DK_AVX512_AMX.
int current_level();

// The table of the level in use, or of the next lower one that has a table.
template <class Table>
DK_INLINE const Table& pick(const Table* const (&tables)[kNumLevels]) {
  int level = current_level();
  while (!tables[level]) --level;
  return *tables[level];
}
#define DK_PICK(name) dk::pick(DK_ALL_TABLES(name))

}  // namespace dk
