/* The C ABI of choosing tokens. As in dovetail_kernels.h: nothing is checked here, strides count
 * elements. A row's result depends on that row only.
 */
#ifndef DOVETAIL_SAMPLING_H
#define DOVETAIL_SAMPLING_H

#include "dovetail_kernels.h"

/* ids[r] = the column of row r's greatest number, the first where several are. A row of nothing but
 * -infinity gives 0; a NaN counts as the greatest. */
typedef struct dk_argmax_args {
  const void* logits; /* float32 or bf16 [rows, size] */
  int64_t* ids;       /* out: [rows] */
  float* logsumexp;   /* out: [rows], of the natural exponentials; NULL: not asked for */
  int64_t num_rows;
  int64_t stride;
  int64_t size;
  int64_t is_float32;
} dk_argmax_args;
DK_API void dk_argmax(const dk_argmax_args* args);

#endif
