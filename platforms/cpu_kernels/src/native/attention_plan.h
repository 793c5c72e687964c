// The plan of one call of attention: the items that the team processes, in waves.
#pragma once
#include <vector>

#include "attention.h"

namespace dk {

// Rows of a split that one thread combines.
struct CombinePiece {
  int64_t split, first_row, end_row;
};

// Items that run together, then what is combined of their results. Counts up to its end.
struct AttentionWave {
  int64_t end_item, end_piece;
};

struct AttentionPlan {
  std::vector<AttentionItem> items, dealt;
  std::vector<AttentionSplit> splits;
  std::vector<CombinePiece> pieces;
  std::vector<AttentionWave> waves;
  std::vector<int64_t> writes;  // pairs: first and last token to write before anything attends
  int64_t scratch_bytes = 0;
};

// Make the plan of a call for the present number of threads. Throws std::bad_alloc.
void make_plan(const dk_attention_args& a, AttentionPlan& plan);

}  // namespace dk
