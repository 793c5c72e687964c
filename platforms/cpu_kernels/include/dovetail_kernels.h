/* The C ABI of the native library: versions, levels, threads, memory, replay, and packed linears.
 *
 * Every operation has the form `int64_t dk_<op>(const dk_<op>_args*)`: a plain struct of pointers,
 * int64_t and float, so that a recorder can keep (function, struct) and call it again with new
 * contents at the same addresses. It returns DK_OK or DK_NO_MEMORY. Operations do not validate
 * arguments: the caller is responsible for shapes and pointers (the Python binding and the linear
 * methods check them). bf16 is a uint16_t with the upper half of a float. Strides (`ld*`) count
 * elements. The library does not depend on a tensor library or a model.
 */
#ifndef DOVETAIL_KERNELS_H
#define DOVETAIL_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
#define DK_API extern "C" __attribute__((visibility("default")))
#else
#define DK_API __attribute__((visibility("default")))
#endif

/* Incremented whenever a struct or a function changes. */
#define DK_ABI_VERSION 17
/* Incremented whenever packed weights have other bytes: files of packed weights have its number. */
#define DK_PACK_VERSION 5

/* Instruction set levels, slowest first. A CPU may have a higher level and lack AVX2_VNNI or
 * AVX512_VNNI (byte products, without bf16). */
enum {
  DK_PORTABLE = 0,
  DK_AVX2 = 1,
  DK_AVX2_VNNI = 2,
  DK_AVX512 = 3,
  DK_AVX512_VNNI = 4,
  DK_AVX512_BF16 = 5, /* and VNNI */
  DK_AVX512_AMX = 6   /* and the matrix tiles of bytes and bf16 */
};

/* Results of operations. An operation without memory has written none or some of its outputs, which
 * are undefined, and nothing else; it may be called again. */
enum { DK_OK = 0, DK_NO_MEMORY = 1 };
/* Of the last operation of this thread that returned DK_NO_MEMORY: its name, and the bytes that the
 * system refused (0: unknown). */
DK_API const char* dk_failed_operation(void);
DK_API int64_t dk_failed_bytes(void);

DK_API int64_t dk_abi_version(void);
DK_API int64_t dk_pack_version(void);
/* The size of the struct with this name, or 0: bindings compare it with theirs. */
DK_API int64_t dk_struct_bytes(const char* name);
DK_API int64_t dk_level(void);         /* the level in use */
DK_API int64_t dk_highest_level(void); /* the highest that the CPU and the system support */
DK_API int64_t dk_supports_level(int64_t level); /* 1, or 0: not the CPU or not the library */
/* Use `level`, or the next lower one that the CPU and the system support and that the library was
 * compiled for. Returns the level in use. Must not be called while operations run. Packed weights
 * are the same at every level. */
DK_API int64_t dk_set_level(int64_t level);

/* The team of this process: `n` threads (1 to 64) including the caller, started on first use. */
DK_API void dk_set_num_threads(int64_t n);
DK_API int64_t dk_num_threads(void);

/* Zeroed memory on 2 MiB boundaries, with huge pages requested; NULL: out of memory. */
DK_API void* dk_alloc(int64_t num_bytes);
DK_API void dk_free(void* memory, int64_t num_bytes);

/* A call of an operation, and `n` calls in order, until one fails; returns its result. */
typedef struct dk_call {
  int64_t (*fn)(const void* args);
  const void* args;
} dk_call;
DK_API int64_t dk_replay(const dk_call* calls, int64_t n);

/* Between begin and end, the operations that this thread calls are run as usual and recorded: the
 * function, and a copy of the struct, but not of the memory that it points to. Packing and probes
 * are not recorded. dk_record_end returns the calls, which may be replayed on any thread and are
 * freed by dk_record_free; NULL: out of memory. A new begin drops an unfinished recording. */
DK_API void dk_record_begin(void);
DK_API const dk_call* dk_record_end(int64_t* num_calls);
DK_API void dk_record_free(const dk_call* calls);

/* --- packed linear ------------------------------------------------------------------------------
 * Weights of [N, K] in panels of 32 output columns, K contiguous within a panel, padded with
 * zeros. All kinds but bf16 have codes of 4, 6 or 8 bits in groups of consecutive k with a scale,
 * and some a minimum, per column and group: weight = scale * code + minimum. Activations are
 * quantized dynamically to int8, with a float scale per token and group. With DK_REFINE a group of
 * a token whose scale is above 2 times (DK_REFINE_MOST: 0.7 times) the mean scale of the token's
 * groups has 15 bits, which costs a second product with the weights of this group.
 *
 * int8: symmetric, a bf16 scale per group of 32. int4: a bf16 scale of either sign per group of
 * `group` (32, 64, 128). The others are the block types of GGUF files with their own codes, scales
 * and minima; K is a multiple of the block (32; 256 for the K types).
 *     codes of 4 bits: Q4_0, Q4_1, Q4_K       of 6 bits: Q6_K
 *     of 8 bits: Q5_0, Q5_1, Q8_0, Q5_K
 *     a float16 per group: Q4_0, Q4_1 (and minimum), Q5_0, Q5_1 (and minimum), Q8_0
 *     an int8 per group times a float16 per 256 k: Q4_K and Q5_K (and minimum), Q6_K (groups of 16)
 */
enum {
  DK_BF16 = 0,
  DK_INT8 = 1,
  DK_INT4 = 2,
  DK_Q4_0 = 3,
  DK_Q4_1 = 4,
  DK_Q5_0 = 5,
  DK_Q5_1 = 6,
  DK_Q8_0 = 7,
  DK_Q4_K = 8,
  DK_Q5_K = 9,
  DK_Q6_K = 10
};

/* Flags of packing and of the operation; DK_GATE_UP must be the same in both. At most one
 * activation, and none with DK_GATE_UP. */
enum {
  DK_GATE_UP = 1,       /* rows 0 .. N/2-1 are gates, the rest ups: y[M, N/2] = act(gate, up) */
  DK_OUT_F32 = 2,       /* y is float32, not bf16 */
  DK_BATCH_INVARIANT = 4, /* accepted, and always true: see linear.cpp */
  DK_ROUND = 8,         /* packing of Q4_1, Q4_K and Q6_K: the weight is bf16 and is rounded */
  DK_GELU = 16,         /* the operation's activation: x * (1 + erf(x / sqrt(2))) / 2 */
  DK_GELU_TANH = 32,    /* its approximation x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) */
  DK_RELU = 64,
  DK_SILU = 128,
  DK_REFINE = 256,     /* of the operation: activations in groups with a large scale have 15 bits */
  DK_REFINE_MOST = 512 /* those in most groups do; at most one of the two, and not for bf16 */
};

/* Bytes of packed weights. `group` is used for int4 only; of `flags` only DK_GATE_UP. */
DK_API int64_t dk_packed_bytes(int64_t kind, int64_t N, int64_t K, int64_t group, int64_t flags);

typedef struct dk_pack_linear_args {
  const void* weight;     /* bf16 [N, K], or N rows of blocks (without DK_ROUND) */
  void* packed;           /* dk_packed_bytes, on a 64 byte boundary */
  int64_t* num_nonfinite; /* out: number of NaN or infinite weights, or scales and minima of blocks;
                             if any, discard `packed` */
  int64_t N, K;
  int64_t ld;    /* stride of weight's rows, >= K; of blocks in bytes */
  int64_t group; /* int4: 32, 64 or 128 */
  int64_t flags; /* DK_GATE_UP (N even), DK_ROUND */
  int64_t kind;  /* dk_pack_linear_blocks: DK_Q4_0 ... DK_Q6_K */
} dk_pack_linear_args;
DK_API int64_t dk_pack_linear_bf16(const dk_pack_linear_args* args);
DK_API int64_t dk_pack_linear_int8(const dk_pack_linear_args* args);
DK_API int64_t dk_pack_linear_int4(const dk_pack_linear_args* args);
DK_API int64_t dk_pack_linear_blocks(const dk_pack_linear_args* args);

/* y = f(x W^T + bias) + residual, summed in float32 (groups: exact integers, then float32), rounded
 * once to y's type. f is the activation, or act(gate, up), or nothing. y may be the residual.
 * act(gate, up) = silu(gate) * up if limit is 0. Otherwise gate is at most limit, up is within
 * +-limit, and act(gate, up) = gate * sigmoid(alpha * gate) * (up + 1).
 * If a row of x has a NaN or an infinity, all numbers of its row of x W^T are NaN or infinite. f
 * keeps NaN, but f of an infinity may be finite: relu(-infinity) is 0, and limit bounds gate and
 * up. */
typedef struct dk_linear_args {
  const void* x;        /* bf16 [M, K] */
  const void* packed;   /* by dk_pack_linear_* for the same N, K, group, kind, DK_GATE_UP */
  const void* bias;     /* bf16 [N] or NULL */
  const void* residual; /* bf16 [M, N or N/2] or NULL */
  void* y;              /* bf16 or float32 [M, N or N/2] */
  int64_t M, N, K;
  int64_t ldx, ldy, ld_residual;
  int64_t group; /* int4 */
  int64_t flags;
  int64_t kind;  /* dk_linear_blocks */
  float limit, alpha; /* DK_GATE_UP */
} dk_linear_args;
DK_API int64_t dk_linear_bf16(const dk_linear_args* args);
DK_API int64_t dk_linear_int8(const dk_linear_args* args);
DK_API int64_t dk_linear_int4(const dk_linear_args* args);
DK_API int64_t dk_linear_blocks(const dk_linear_args* args);

/* --- probes: the limits of this machine, for benchmarks ------------------------------------------
 * The caller measures the time. Reads whole pieces of 256 KiB. */
typedef struct dk_probe_read_args {
  const void* memory;
  int64_t* result; /* out: a sum of the data read */
  int64_t num_bytes;
} dk_probe_read_args;
DK_API int64_t dk_probe_read(const dk_probe_read_args* args);

typedef struct dk_probe_multiply_args {
  int64_t* result; /* out: operations of all threads; a multiply-add counts as two */
  int64_t kind;    /* DK_BF16 or DK_INT8 */
  int64_t iterations;
} dk_probe_multiply_args;
DK_API int64_t dk_probe_multiply(const dk_probe_multiply_args* args);

#endif
