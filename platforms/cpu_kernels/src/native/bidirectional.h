// The interface from bidirectional.cpp, which distributes attention without a cache over the team,
// to the kernel of a level (bidirectional_level.cpp).
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "dovetail_attention.h"

namespace dk {

// Tokens of one run that attend to the whole run, for the query heads of one key-value head.
struct BidirectionalItem {
  int32_t run;
  int32_t first_token, num_tokens;  // of the run
  int32_t head;                     // key-value head
};

struct BidirectionalTable {
  int64_t (*scratch_bytes)(const dk_bidirectional_args& a, int64_t num_tokens);
  void (*attend)(const dk_bidirectional_args& a, const BidirectionalItem& item, char* scratch);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::BidirectionalTable, bidirectional_table)
