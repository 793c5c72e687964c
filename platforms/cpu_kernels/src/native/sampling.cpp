// Sampling: rows are distributed over the team.
#include "sampling.h"

#include "record.h"
#include "team.h"

int64_t dk_argmax(const dk_argmax_args* args) {
  dk::note(dk_argmax, args);
  const auto& table = DK_PICK(sampling_table);
  dk::parallel_for(args->num_rows, 1,
                   [&](int64_t begin, int64_t end) { table.argmax(*args, begin, end); });
  return DK_OK;
}

int64_t dk_mask(const dk_mask_args* args) {
  const auto& table = DK_PICK(sampling_table);
  dk::parallel_for(args->num_rows, 1,
                   [&](int64_t begin, int64_t end) { table.mask(*args, begin, end); });
  return DK_OK;
}
