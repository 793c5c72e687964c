/* The C ABI of the native library: versions, levels, threads, memory, replay, and packed linears.
 *
 * Every operation has the form `void dk_<op>(const dk_<op>_args*)`: a plain struct of pointers,
 * int64_t and float, so that a recorder can keep (function, struct) and call it again with new
 * contents at the same addresses. Operations check nothing: whoever fills a struct answers for
 * shapes and pointers (the Python binding and the linear methods do). bf16 is a uint16_t with
 * the upper half of a float. Strides (`ld*`) count elements. The library knows no tensor
 * library and no model.
 */
#ifndef DOVETAIL_KERNELS_H
#define DOVETAIL_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
#define DK_API extern "C" __attribute__((visibility("default")))
#else
#define DK_API __attribute__((visibility("default")))
#endif

/* Raised whenever a struct, a function or a packed format changes. */
#define DK_ABI_VERSION 2

/* Instruction set levels, each including those below it. */
enum { DK_PORTABLE = 0, DK_AVX2 = 1, DK_AVX512 = 2, DK_AVX512_BF16 = 3 };

DK_API int64_t dk_abi_version(void);
DK_API int64_t dk_level(void);         /* the level in use */
DK_API int64_t dk_highest_level(void); /* the highest that this CPU and its system can run */
/* Use `level`, or the highest possible where `level` is above it. Returns the level in use. Not
 * while operations run. Packed weights are the same at every level. */
DK_API int64_t dk_set_level(int64_t level);

/* The team of this process: `n` threads (1 to 64) with the caller, made when first needed. */
DK_API void dk_set_num_threads(int64_t n);
DK_API int64_t dk_num_threads(void);

/* Memory on 2 MiB boundaries, asked to be huge pages, untouched and so zero; NULL: none left. */
DK_API void* dk_alloc(int64_t num_bytes);
DK_API void dk_free(void* memory, int64_t num_bytes);

/* A call of an operation, and `n` of them in their order. */
typedef struct dk_call {
  void (*fn)(const void* args);
  const void* args;
} dk_call;
DK_API void dk_replay(const dk_call* calls, int64_t n);

/* Between begin and end, the operations that this thread calls are done as ever and noted: which,
 * and a copy of the struct, but not of what that points to. Packing and probes are not noted.
 * dk_record_end returns the calls, to be replayed on any thread and freed by dk_record_free; NULL
 * where there is no memory for them. A new beginning drops what was noted before. */
DK_API void dk_record_begin(void);
DK_API const dk_call* dk_record_end(int64_t* num_calls);
DK_API void dk_record_free(const dk_call* calls);

/* --- packed linear ------------------------------------------------------------------------------
 * Weights of [N, K] in panels of 32 output columns, K contiguous within a panel, padded with
 * zeros. int8: symmetric, a float scale per output column. int4: a bf16 scale of either sign per
 * column and group of `group` (32, 64, 128) consecutive k. Activations of both are quantised as
 * they come: int8 per token (int8), int8 per token and group (int4). K <= 131072 for int8. */
enum { DK_BF16 = 0, DK_INT8 = 1, DK_INT4 = 2 };

/* Flags of packing and of the operation; DK_GATE_UP must be the same in both. */
enum {
  DK_GATE_UP = 1,       /* rows 0 .. N/2-1 are gates, the others ups: y[M, N/2] = silu(gate) * up */
  DK_OUT_F32 = 2,       /* y is float32, not bf16 */
  DK_BATCH_INVARIANT = 4 /* accepted, and true without it: see linear.cpp */
};

/* Bytes of packed weights; `group` counts for int4 only, of `flags` only DK_GATE_UP. */
DK_API int64_t dk_packed_bytes(int64_t kind, int64_t N, int64_t K, int64_t group, int64_t flags);

typedef struct dk_pack_linear_args {
  const void* weight;     /* bf16 [N, K] */
  void* packed;           /* dk_packed_bytes, on a 64 byte boundary */
  int64_t* num_nonfinite; /* out: how many weights are NaN or infinite; if any, forget `packed` */
  int64_t N, K;
  int64_t ld;             /* stride of weight's rows, >= K */
  int64_t group;          /* int4: 32, 64 or 128 */
  int64_t flags;          /* 0 or DK_GATE_UP (N even) */
} dk_pack_linear_args;
DK_API void dk_pack_linear_bf16(const dk_pack_linear_args* args);
DK_API void dk_pack_linear_int8(const dk_pack_linear_args* args);
DK_API void dk_pack_linear_int4(const dk_pack_linear_args* args);

/* y = epilogue(x W^T): plus bias, then silu(gate) * up with DK_GATE_UP, then plus residual;
 * summed in float32 (int8, int4: exact integers, then float32), rounded once to y's type. A row
 * of x with a NaN or an infinity gives no finite number in its row of y. y may be the residual. */
typedef struct dk_linear_args {
  const void* x;        /* bf16 [M, K] */
  const void* packed;   /* by dk_pack_linear_* for the same N, K, group, DK_GATE_UP */
  const void* bias;     /* bf16 [N] or NULL */
  const void* residual; /* bf16 [M, N or N/2] or NULL */
  void* y;              /* bf16 or float32 [M, N or N/2] */
  int64_t M, N, K;
  int64_t ldx, ldy, ld_residual;
  int64_t group; /* int4 */
  int64_t flags;
} dk_linear_args;
DK_API void dk_linear_bf16(const dk_linear_args* args);
DK_API void dk_linear_int8(const dk_linear_args* args);
DK_API void dk_linear_int4(const dk_linear_args* args);

/* --- probes: the bounds of this machine, for benchmarks ------------------------------------------
 * Time them from outside. Reading takes whole pieces of 256 KiB. */
typedef struct dk_probe_read_args {
  const void* memory;
  int64_t* result; /* out: some sum of what was read */
  int64_t num_bytes;
} dk_probe_read_args;
DK_API void dk_probe_read(const dk_probe_read_args* args);

typedef struct dk_probe_multiply_args {
  int64_t* result; /* out: operations done by all threads, a product and a sum counting as two */
  int64_t kind;    /* DK_BF16 or DK_INT8 */
  int64_t iterations;
} dk_probe_multiply_args;
DK_API void dk_probe_multiply(const dk_probe_multiply_args* args);

#endif
