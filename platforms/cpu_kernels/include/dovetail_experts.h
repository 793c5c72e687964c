/* The C ABI of mixtures of experts. As in dovetail_kernels.h, arguments are not validated and
 * strides count elements. A token's result depends on that token only.
 */
#ifndef DOVETAIL_EXPERTS_H
#define DOVETAIL_EXPERTS_H

#include "dovetail_kernels.h"

/* Select the top_k experts of each token, best first; equal ones by number. logits = x . weight +
 * bias in float32; scores are their softmax or sigmoid; an expert's rank is its score plus its
 * correction. Only experts of the `top_groups` best of `num_groups` equal groups are selected: a
 * group counts as much as its best rank, or with a correction as the sum of its two best ranks.
 * weights = the scores of the selected experts, divided by their sum if `renormalize`, times
 * `scale`. */
typedef struct dk_select_experts_args {
  const void* x;           /* bf16 [tokens, size] */
  const void* weight;      /* bf16 [num_experts, size] */
  const void* bias;        /* bf16 [num_experts] or NULL */
  const float* correction; /* [num_experts] or NULL */
  int64_t* experts;        /* out: [tokens, top_k], all different */
  float* weights;          /* out: [tokens, top_k] */
  int64_t num_tokens, num_experts, size;
  int64_t x_stride, weight_stride;
  int64_t top_k;                  /* at most num_experts / num_groups * top_groups */
  int64_t num_groups, top_groups; /* 1 and 1 for no groups; num_experts a multiple of num_groups */
  int64_t sigmoid;                /* 0: softmax */
  int64_t renormalize;
  float scale;
} dk_select_experts_args;
DK_API int64_t dk_select_experts(const dk_select_experts_args* args);

/* y[t] = the sum of weights[t, k] * down(act(gate_up(x[t]))) over the experts e = experts[t, k], in
 * the order of their numbers. The packed weights of the experts are of equal size, one after the
 * other: of gate_up, [2 inner, size] with DK_GATE_UP; of down, [size, inner]. act(gate, up) is that
 * of dk_linear_args with `limit` and `alpha`, rounded to bf16; sums are float32. */
typedef struct dk_experts_args {
  const void* x;          /* bf16 [tokens, size] */
  const int64_t* experts; /* [tokens, top_k], each below num_experts, those of a token different */
  const float* weights;   /* [tokens, top_k] */
  const void* gate_up;
  const void* gate_up_bias; /* bf16 [num_experts, 2 inner] or NULL */
  const void* down;
  const void* down_bias; /* bf16 [num_experts, size] or NULL */
  void* y;               /* bf16 [tokens, size] */
  int64_t num_tokens, num_experts, top_k, size, inner;
  int64_t x_stride, y_stride;
  int64_t gate_up_kind, gate_up_group; /* see dk_pack_linear_args */
  int64_t down_kind, down_group;
  float limit, alpha;
} dk_experts_args;
DK_API int64_t dk_experts(const dk_experts_args* args);

#endif
