// Routers and sums of experts at a level.
#pragma once
#include "dispatch.h"
#include "dovetail_experts.h"

namespace dk {

// Tokens and experts whose logits are computed together.
constexpr int64_t kRouterTokens = 4, kRouterExperts = 4;

// The outputs of the experts of some rows.
struct ExpertOutputs {
  const dk_experts_args* args;
  const int64_t* slots;  // [num_rows]: token * top_k + the expert's place among those of the token
  const float* outputs;  // [num_rows, size]
  int64_t num_rows;
  float* sums;           // [num_tokens, size]
  bool begins, ends;     // the first rows: sums start at 0; the last rows: sums are stored to y
};

struct ExpertTables {
  // Logits of all experts, rows of `stride`, for blocks [begin, end) of kRouterTokens tokens times
  // kRouterExperts experts; all blocks of the same tokens follow one another.
  void (*logits)(const dk_select_experts_args& args, float* logits, int64_t stride, int64_t begin,
                 int64_t end);
  // Select the experts of tokens [begin, end). Logits: rows of `stride`, a multiple of 16 above
  // num_experts; changed.
  void (*select)(const dk_select_experts_args& args, float* logits, int64_t stride, int64_t begin,
                 int64_t end);
  // Add columns [begin, end) of the rows to the sums of their tokens, in order.
  void (*add_outputs)(const ExpertOutputs& rows, int64_t begin, int64_t end);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::ExpertTables, expert_tables)
