/* The C ABI of the small operations between the products. As in dovetail_kernels.h, arguments are
 * not validated and strides count elements. Inputs and outputs are bf16, arithmetic is float32.
 * Rows may be views: of [outer, inner, size] only the last dimension is contiguous. A row's bits
 * depend on that row only. */
#ifndef DOVETAIL_OPS_H
#define DOVETAIL_OPS_H

#include "dovetail_kernels.h"

/* y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension. y may be x. */
typedef struct dk_rms_norm_args {
  const void* x; /* bf16 [outer, inner, size] */
  void* y;       /* bf16, the same shape */
  int64_t num_outer, num_inner;
  int64_t x_outer_stride, x_inner_stride;
  int64_t y_outer_stride, y_inner_stride;
  const void* weight; /* bf16 [size] */
  int64_t size;
  float eps;
  float weight_offset; /* 1 if weights are stored as differences from 1, else 0 */
} dk_rms_norm_args;
DK_API int64_t dk_rms_norm(const dk_rms_norm_args* args);

/* residual = x + residual, rounded to bf16; y = the norm of that, as above. y may be x. */
typedef struct dk_add_rms_norm_args {
  const void* x;  /* bf16 [rows, size] */
  void* residual; /* bf16 [rows, size]; changed */
  void* y;        /* bf16 [rows, size] */
  int64_t num_rows;
  int64_t x_stride, residual_stride, y_stride;
  const void* weight; /* bf16 [size] */
  int64_t size;
  float eps;
  float weight_offset;
} dk_add_rms_norm_args;
DK_API int64_t dk_add_rms_norm(const dk_add_rms_norm_args* args);

/* y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension. With a
 * residual, first residual = x + residual, rounded to bf16, and y is the norm of that. y may be
 * x. */
typedef struct dk_layer_norm_args {
  const void* x;  /* bf16 [rows, size] */
  void* residual; /* bf16 [rows, size], changed; or NULL */
  void* y;        /* bf16 [rows, size] */
  int64_t num_rows;
  int64_t x_stride, residual_stride, y_stride;
  const void* weight; /* bf16 [size], or NULL for 1 */
  const void* bias;   /* bf16 [size], or NULL for 0 */
  int64_t size;
  float eps;
} dk_layer_norm_args;
DK_API int64_t dk_layer_norm(const dk_layer_norm_args* args);

/* Rotate queries and keys by their positions, in halves: of the first `rotary_dim` features, i of
 * the first half is paired with i of the second. The rest is copied. Outputs may be inputs. */
typedef struct dk_rotary_args {
  const void* q; /* bf16 [tokens, heads, head_size] */
  const void* k; /* bf16 [tokens, kv heads, head_size] */
  void* q_out;
  void* k_out;
  const int64_t* positions; /* [tokens] */
  int64_t num_tokens;
  int64_t q_token_stride, q_head_stride;
  int64_t k_token_stride, k_head_stride;
  int64_t q_out_token_stride, q_out_head_stride;
  int64_t k_out_token_stride, k_out_head_stride;
  const float* cos_sin; /* [positions, rotary_dim]: cosines, then sines; rows contiguous */
  int64_t num_heads, num_kv_heads, head_size;
  int64_t rotary_dim; /* even */
} dk_rotary_args;
DK_API int64_t dk_rotary(const dk_rotary_args* args);

/* y[i] = silu(x[i]) * x[size + i]. */
typedef struct dk_silu_mul_args {
  const void* x; /* bf16 [rows, 2 size] */
  void* y;       /* bf16 [rows, size] */
  int64_t num_rows;
  int64_t x_stride, y_stride;
  int64_t size;
} dk_silu_mul_args;
DK_API int64_t dk_silu_mul(const dk_silu_mul_args* args);

/* RMS norm in groups, with a gate: the norm of x * silu(gate), times weight; or with norm_first,
 * the norm of x, times weight, times silu(gate). x is changed. */
typedef struct dk_gated_norm_args {
  float* x;           /* [tokens, groups, size], contiguous; changed */
  const void* gate;   /* bf16 [tokens, groups, size]; rows of tokens contiguous */
  const void* weight; /* bf16 [size], or [groups, size] */
  void* y;            /* bf16 [tokens, groups, size], contiguous */
  int64_t num_tokens, num_groups, size;
  int64_t gate_stride;
  int64_t weight_stride; /* between groups; 0 if they share the weight */
  int64_t norm_first;
  float eps;
} dk_gated_norm_args;
DK_API int64_t dk_gated_norm(const dk_gated_norm_args* args);

/* y = x * f(gate): f = sigmoid, or gelu by its tanh form. y may be x or gate. */
typedef struct dk_gate_mul_args {
  const void* x;    /* bf16 [rows, size] */
  const void* gate; /* bf16 [rows, size] */
  void* y;          /* bf16 [rows, size] */
  int64_t num_rows, size;
  int64_t x_stride, gate_stride, y_stride;
} dk_gate_mul_args;
DK_API int64_t dk_sigmoid_mul(const dk_gate_mul_args* args);
DK_API int64_t dk_gelu_tanh_mul(const dk_gate_mul_args* args);

/* In place: x = x * factor (dk_scale), or x = factor * tanh(x / factor) (dk_soft_cap). */
typedef struct dk_scale_args {
  void* x; /* float32 or bf16 [rows, size]; changed */
  int64_t num_rows, size;
  int64_t stride;
  int64_t is_float32;
  float factor; /* of dk_soft_cap: positive */
} dk_scale_args;
DK_API int64_t dk_scale(const dk_scale_args* args);
DK_API int64_t dk_soft_cap(const dk_scale_args* args);

/* y = y + shared, or with a gate, y + sigmoid(x . gate) * shared. */
typedef struct dk_add_shared_args {
  void* y;            /* bf16 [tokens, size]; changed */
  const void* shared; /* bf16 [tokens, size] */
  const void* x;      /* bf16 [tokens, size]; not read without a gate */
  const void* gate;   /* bf16 [size] or NULL */
  int64_t num_tokens, size;
  int64_t y_stride, shared_stride, x_stride;
} dk_add_shared_args;
DK_API int64_t dk_add_shared(const dk_add_shared_args* args);

/* A product of each head: y[t, h] = W[h] x[t, h]. A token's bits do not depend on other tokens. */
typedef struct dk_head_linear_args {
  const void* x;      /* bf16 [tokens, heads, inputs] */
  const void* weight; /* bf16 [heads, outputs, inputs]; if inputs_first, [heads, inputs, outputs] */
  void* y;            /* bf16 [tokens, heads, outputs] */
  int64_t num_tokens, num_heads, num_inputs, num_outputs;
  int64_t x_stride, x_head_stride, y_stride, y_head_stride;
  int64_t weight_head_stride, weight_stride; /* between heads, and between rows of a head */
  int64_t inputs_first;
} dk_head_linear_args;
DK_API int64_t dk_head_linear(const dk_head_linear_args* args);

/* y[t] = table[ids[t]]. */
typedef struct dk_embedding_args {
  const int64_t* ids; /* [tokens], each a row of the table */
  void* y;            /* bf16 [tokens, size] */
  int64_t num_tokens;
  int64_t y_stride;
  const void* table; /* bf16 [rows, size] */
  int64_t table_stride;
  int64_t size;
} dk_embedding_args;
DK_API int64_t dk_embedding(const dk_embedding_args* args);

#endif
