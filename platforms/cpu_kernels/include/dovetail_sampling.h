/* The C ABI of sampling. As in dovetail_kernels.h, arguments are not validated and strides count
 * elements. A row's result depends on that row only.
 */
#ifndef DOVETAIL_SAMPLING_H
#define DOVETAIL_SAMPLING_H

#include "dovetail_kernels.h"

/* ids[r] = the column of the maximum of row r, the first one of equals. A row in which all numbers
 * are -infinity gives 0; a NaN counts as the maximum. */
typedef struct dk_argmax_args {
  const void* logits; /* float32 or bf16 [rows, size] */
  int64_t* ids;       /* out: [rows] */
  float* logsumexp;   /* out: [rows], of the natural exponentials; NULL: not requested */
  int64_t num_rows;
  int64_t stride;
  int64_t size;
  int64_t is_float32;
} dk_argmax_args;
DK_API int64_t dk_argmax(const dk_argmax_args* args);

#endif
