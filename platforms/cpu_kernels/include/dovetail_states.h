/* The C ABI of recurrent operations: causal convolution, linear attention and the gated linear
 * recurrence. As in dovetail_kernels.h, arguments are not validated and strides count elements. A
 * request's results depend on that request only, bitwise.
 *
 * A part is a sequence of consecutive tokens of one request. Parts contain all tokens, in order.
 * The state before the first part of a request is that of block `reads`, or zeros if it is
 * negative; the state before another part is that after the previous one. The state after a part is
 * written to block `writes`.
 */
#ifndef DOVETAIL_STATES_H
#define DOVETAIL_STATES_H

#include "dovetail_kernels.h"

#define DK_MAX_CONV_WIDTH 64

typedef struct dk_state_parts {
  const int64_t* sizes;        /* [parts]; tokens of each part, at least 1 */
  const int64_t* num_parts;    /* [requests]; at least 1 */
  const int64_t* reads;        /* [parts] */
  const int64_t* writes;       /* [parts] */
  const int64_t* num_requests; /* [1]; read in each call, so that a replay has other requests */
} dk_state_parts;

/* y[t] = silu(bias + the sum of weight[i] * x[t - width + 1 + i]) in float32, for each channel;
 * without silu if is_plain. The state holds the last width - 1 inputs, the oldest first. All values
 * are bf16, or float if is_float32. */
typedef struct dk_causal_conv_args {
  const dk_state_parts* parts;
  const void* x;      /* [tokens, channels] */
  const void* weight; /* [channels, width] */
  const void* bias;   /* [channels] or NULL */
  void* states;       /* [blocks, width - 1, channels] */
  void* y;            /* [tokens, channels] */
  int64_t channels;
  int64_t width; /* 2 ... DK_MAX_CONV_WIDTH */
  int64_t x_stride, weight_stride, block_stride, y_stride;
  int64_t is_plain, is_float32;
} dk_causal_conv_args;
DK_API int64_t dk_causal_conv(const dk_causal_conv_args* args);

/* For each token and head, with the state S [key_size, value_size]:
 *   step = softplus(steps + step_bias), from min_step to max_step; S = exp(rate * step) * S;
 *   u = step * v, or with betas, u = sigmoid(betas) * (v - S^T k);
 *   S = S + k u^T; y = S^T q, with skip: + skip * v.
 * With key_eps > 0, queries and keys are divided by sqrt(sum of squares + key_eps), and queries by
 * sqrt(key_size), too. Head h uses the query and key of group h / (num_heads / num_groups). */
typedef struct dk_linear_attention_args {
  const dk_state_parts* parts;
  const void* q;          /* [tokens, num_groups, key_size]; this and the next four are bf16, or */
  const void* k;          /* float if is_float32, with any stride between tokens */
  const void* v;          /* [tokens, num_heads, value_size] */
  const void* steps;      /* [tokens, num_heads] */
  const void* betas;      /* [tokens, num_heads] or NULL */
  const float* step_bias; /* [num_heads] */
  const float* rates;     /* [num_heads]; not positive */
  const float* skip;      /* [num_heads] or NULL */
  float* states;          /* [blocks, num_heads, key_size, value_size] */
  float* y;               /* [tokens, num_heads, value_size], contiguous */
  int64_t num_heads, num_groups, key_size, value_size;
  int64_t q_stride, k_stride, v_stride, steps_stride, betas_stride, block_stride;
  int64_t is_float32;
  float min_step, max_step, key_eps;
} dk_linear_attention_args;
DK_API int64_t dk_linear_attention(const dk_linear_attention_args* args);

/* For each token and channel, with the state s:
 *   a = exp(rate * sigmoid(decay_gate + decay_bias));
 *   s = a * s + sqrt(1 - a^2) * sigmoid(input_gate + input_bias) * x; y = s.
 * The first token of a request without a state has the factor 1 instead of sqrt(1 - a^2). */
typedef struct dk_gated_recurrence_args {
  const dk_state_parts* parts;
  const void* x;           /* [tokens, channels]; this, the next two and y are bf16, or float if */
  const void* input_gates; /* is_float32, with any stride between tokens */
  const void* decay_gates;
  const float* input_bias; /* [channels] */
  const float* decay_bias; /* [channels] */
  const float* rates;      /* [channels]; not positive */
  float* states;           /* [blocks, channels] */
  void* y;                 /* [tokens, channels] */
  int64_t channels;
  int64_t x_stride, input_gates_stride, decay_gates_stride, block_stride, y_stride;
  int64_t is_float32;
} dk_gated_recurrence_args;
DK_API int64_t dk_gated_recurrence(const dk_gated_recurrence_args* args);

#endif
