/* The C ABI of paged attention. As in dovetail_kernels.h, arguments are not validated and strides
 * count elements.
 *
 * A block of the cache has the keys and values of `block_size` (a multiple of 16) tokens of one
 * layer, for K key-value heads of D features (a multiple of 16), as panels that the processor
 * multiplies without rearranging them:
 *     keys    [K][block_size / 16][D / 2][16 tokens][2]
 *     values  [K][D / 16][block_size / 2][16 features][2 tokens]
 * in bf16; or in int8, followed by float32 scales: keys [K][block_size], then values. A number is
 * its int8 times the scale of its token and head. Slots that no token has been written to may
 * contain anything, including NaN.
 *
 * With a value_size a block has only the keys, and their scales: the value of a token is the first
 * value_size features of its key, which are rearranged when they are read.
 */
#ifndef DOVETAIL_ATTENTION_H
#define DOVETAIL_ATTENTION_H

#include "dovetail_kernels.h"

enum { DK_CACHE_BF16 = 0, DK_CACHE_INT8 = 1 };

/* The shape of a step; filled once per step, read by every layer of a group. */
typedef struct dk_attention_batch {
  int64_t num_runs;   /* R; rows of query_start (R + 1), seq_lens and block_table in use */
  int64_t num_tokens; /* T; query_start[R] */
} dk_attention_batch;

/* Write the step's keys and values to the cache, then attend: token t of run r has position
 * p = seq_lens[r] - query_len + t and sees positions max(0, p - window + 1) .. p of its run.
 * score = scale * q.k, then soft_cap * tanh(score / soft_cap) where soft_cap > 0; softmax in
 * float32, over these scores and the sink of the query head, which has no value.
 *
 * The bits of a token's output depend only on its query, on the keys and values that it sees and on
 * the level: not on the other requests of the batch, the chunks of a prompt, block_size or
 * threads. (A value that is not finite may reach earlier tokens of its run in the same step.) */
typedef struct dk_attention_args {
  const void* q; /* bf16 [T, H, D] */
  const void* k; /* bf16 [T, K, D] */
  const void* v; /* bf16 [T, K, D]; not read with a value_size */
  void* out;     /* bf16 [T, H, D], or [T, H, value_size] */
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  int64_t out_token_stride, out_head_stride;
  void* cache;          /* this layer's first block */
  int64_t block_stride; /* bytes from a block to the next, at least dk_attention_block_bytes */
  const dk_attention_batch* batch;
  const int32_t* query_start;  /* [R + 1]; query_len is the difference, 0 allowed */
  const int32_t* seq_lens;     /* [R], including this step's tokens */
  const int32_t* block_table;  /* [R, block_table_stride]; blocks before a window are not read */
  const int64_t* slot_mapping; /* [T]; block * block_size + offset of each token */
  int64_t block_table_stride;
  float* workspace; /* results of chunks of long contexts; its size changes speed only */
  int64_t workspace_floats;
  int64_t num_heads, num_kv_heads, head_size; /* H a multiple of K; D of 16, 16 <= D <= 640 */
  int64_t value_size; /* 0 for separate values; otherwise 1 <= value_size <= D */
  int64_t block_size;
  int64_t cache_kind; /* DK_CACHE_BF16 or DK_CACHE_INT8 */
  int64_t window;     /* tokens that a token sees, including itself; 0 for all */
  float scale;        /* above 0 */
  float soft_cap;     /* 0 for none */
  const float* sinks; /* [H], or NULL: one more logit of each query head, -infinity allowed */
} dk_attention_args;
DK_API int64_t dk_attention(const dk_attention_args* args);

/* Attention of encoders: each token attends to all tokens of its run, without a cache. With a
 * window it attends to the tokens at a distance below it. score = scale * q.k; softmax in float32.
 *
 * The bits of a token's output depend only on its query, on the keys and values of its run and on
 * the level. (A value that is not finite may reach every token of its run.) */
typedef struct dk_bidirectional_args {
  const void* q; /* bf16 [T, H, D] */
  const void* k; /* bf16 [T, K, D] */
  const void* v; /* bf16 [T, K, D] */
  void* out;     /* bf16 [T, H, D] */
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t v_token_stride, v_head_stride;
  int64_t out_token_stride, out_head_stride;
  const dk_attention_batch* batch;
  const int32_t* query_start;                 /* [R + 1]; runs may be empty */
  int64_t num_heads, num_kv_heads, head_size; /* as in dk_attention_args */
  int64_t window;                             /* 0 for all */
  float scale;                                /* above 0 */
} dk_bidirectional_args;
DK_API int64_t dk_bidirectional(const dk_bidirectional_args* args);

/* How a call would be distributed over the team's threads; for tests and measurements. */
typedef struct dk_attention_work {
  int64_t num_items; /* that threads claim */
  int64_t num_waves; /* parts that run one after the other, because of the size of the workspace */
  int64_t cost;      /* of all items, in pairs of a query row and a position of about equal time */
  int64_t longest_cost; /* sum over waves of max(most expensive item, cost / threads) */
} dk_attention_work;
/* Reads neither tensors nor the cache. */
DK_API int64_t dk_attention_plan(const dk_attention_args* args, dk_attention_work* work);

/* Bytes of one block of one layer. */
DK_API int64_t dk_attention_block_bytes(int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                                        int64_t cache_kind, int64_t value_size);

#endif
