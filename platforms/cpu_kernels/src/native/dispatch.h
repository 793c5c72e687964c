// Levels: how a kernel is compiled once for each instruction set, and how one is selected.
//
// A source named `*_level.cpp` is compiled once per level with that level's flags and with
//     DK_LEVEL            0 portable, 1 avx2, 2 avx512 (f, bw, vl, dq), 3 avx512_bf16 (vnni, bf16)
//     DK_LEVEL_NAMESPACE  portable, avx2, avx512, avx512_bf16
// All other sources are compiled once for the baseline of the architecture. A level source
// defines, in namespace dk::DK_LEVEL_NAMESPACE, a constant table of function pointers; a baseline
// source declares the table of every level and picks one when called:
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

#if DK_X86
#define DK_DECLARE_TABLES(Type, name)                          \
  namespace dk { namespace portable { extern const Type name; } } \
  namespace dk { namespace avx2 { extern const Type name; } }     \
  namespace dk { namespace avx512 { extern const Type name; } }   \
  namespace dk { namespace avx512_bf16 { extern const Type name; } }
#define DK_ALL_TABLES(name) \
  &dk::portable::name, &dk::avx2::name, &dk::avx512::name, &dk::avx512_bf16::name
#else
#define DK_DECLARE_TABLES(Type, name) \
  namespace dk { namespace portable { extern const Type name; } }
#define DK_ALL_TABLES(name) &dk::portable::name
#endif

namespace dk {

// The level in use, one of DK_PORTABLE ... DK_AVX512_BF16.
int current_level();

// The table of the level in use, from one pointer per compiled level, lowest first.
template <class Table, class... Pointers>
DK_INLINE const Table& pick(const Table* lowest, Pointers... higher) {
  const Table* tables[] = {lowest, higher...};
  return *tables[current_level()];
}
#define DK_PICK(name) dk::pick(DK_ALL_TABLES(name))

}  // namespace dk
