// A product of each head: the team computes blocks of outputs of every head, for all tokens.
#include "head_linear.h"

#include "failure.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

void multiply_heads(const dk_head_linear_args& a) {
  const HeadLinearTable& table = DK_PICK(head_linear_table);
  const int64_t count = (a.num_outputs + table.num_columns - 1) / table.num_columns;
  const int64_t num_bytes = table.scratch_floats(a) * static_cast<int64_t>(sizeof(float));
  parallel_ranges(a.num_heads * count, 1, [&](auto&& next) {
    auto* const memory = reinterpret_cast<float*>(scratch(kRegionScratch, num_bytes));
    int64_t begin, end;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) {
        table.multiply(a, i / count, i % count * table.num_columns, memory);
      }
    }
  });
}

}  // namespace
}  // namespace dk

int64_t dk_head_linear(const dk_head_linear_args* args) {
  dk::note(dk_head_linear, args);
  return dk::result_of("dk_head_linear", [args] { dk::multiply_heads(*args); });
}
