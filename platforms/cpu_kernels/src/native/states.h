// The interface from states.cpp, which distributes recurrent operations over the team, to the
// kernels of a level (states_level.cpp).
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "dovetail_states.h"

namespace dk {

// A request of a step: its first token and its first part.
struct StateRequest {
  int64_t token, part, num_parts;
};

struct StatesTable {
  int64_t num_channels;  // of an item of the convolution, and of the gated recurrence
  int64_t num_columns;   // of the state, of an item of linear attention
  // The state's part that linear attention keeps, for one thread.
  int64_t (*scratch_floats)(const dk_linear_attention_args& a);
  void (*convolve)(const dk_causal_conv_args& a, const StateRequest& request, int64_t channel);
  void (*recur)(const dk_linear_attention_args& a, const StateRequest& request, int64_t head,
                int64_t column, float* scratch);
  void (*recur_gated)(const dk_gated_recurrence_args& a, const StateRequest& request,
                      int64_t channel);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::StatesTable, states_table)
