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

/* Sets the numbers of forbidden columns to -infinity, in place. Bit c % 8 of byte c / 8 of a row's
 * bits is 1 if column c is allowed. Row i of the bits belongs to row rows[i] of the logits. */
typedef struct dk_mask_args {
  void* logits;        /* float32 or bf16 [any, size] */
  const int64_t* rows; /* [num_rows], each at most once */
  const uint8_t* bits; /* [num_rows, row_bytes] */
  int64_t num_rows;
  int64_t stride;
  int64_t size;
  int64_t row_bytes; /* at least size / 8, rounded up */
  int64_t is_float32;
} dk_mask_args;
DK_API int64_t dk_mask(const dk_mask_args* args);

#endif
