// Recurrent operations: the team processes slices of channels, or of the columns of each head's
// state, of every request. The tokens of a request are processed in sequence.
#include "states.h"

#include <vector>

#include "failure.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

thread_local std::vector<StateRequest> thread_requests;

const std::vector<StateRequest>& list_requests(const dk_state_parts& parts) {
  std::vector<StateRequest>& requests = thread_requests;
  requests.clear();
  int64_t token = 0, part = 0;
  for (int64_t r = 0; r < *parts.num_requests; ++r) {
    requests.push_back({token, part, parts.num_parts[r]});
    for (int64_t end = part + parts.num_parts[r]; part < end; ++part) token += parts.sizes[part];
  }
  return requests;
}

int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

void run_conv(const dk_causal_conv_args& a) {
  const StatesTable& table = DK_PICK(states_table);
  const std::vector<StateRequest>& requests = list_requests(*a.parts);
  const int64_t count = pieces(a.channels, table.num_channels);
  const int64_t num_items = static_cast<int64_t>(requests.size()) * count;
  parallel_for(num_items, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.convolve(a, requests[i / count], i % count * table.num_channels);
    }
  });
}

void run_recurrence(const dk_gated_recurrence_args& a) {
  const StatesTable& table = DK_PICK(states_table);
  const std::vector<StateRequest>& requests = list_requests(*a.parts);
  const int64_t count = pieces(a.channels, table.num_channels);
  const int64_t num_items = static_cast<int64_t>(requests.size()) * count;
  // The items of short requests take little more time than their claims.
  bool is_long = false;
  for (const StateRequest& request : requests) is_long |= a.parts->sizes[request.part] >= 8;
  parallel_for(num_items, is_long ? 1 : 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.recur_gated(a, requests[i / count], i % count * table.num_channels);
    }
  });
}

void run_attention(const dk_linear_attention_args& a) {
  const StatesTable& table = DK_PICK(states_table);
  const std::vector<StateRequest>& requests = list_requests(*a.parts);
  const int64_t count = pieces(a.value_size, table.num_columns), per_request = a.num_heads * count;
  const int64_t num_items = static_cast<int64_t>(requests.size()) * per_request;
  const int64_t num_bytes = table.scratch_floats(a) * static_cast<int64_t>(sizeof(float));
  parallel_ranges(num_items, 1, [&](auto&& next) {
    auto* const memory = reinterpret_cast<float*>(scratch(kRegionScratch, num_bytes));
    int64_t begin, end;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t rest = i % per_request;
        table.recur(a, requests[i / per_request], rest / count, rest % count * table.num_columns,
                    memory);
      }
    }
  });
}

}  // namespace
}  // namespace dk

int64_t dk_causal_conv(const dk_causal_conv_args* args) {
  dk::note(dk_causal_conv, args);
  return dk::result_of("dk_causal_conv", [args] { dk::run_conv(*args); });
}

int64_t dk_gated_recurrence(const dk_gated_recurrence_args* args) {
  dk::note(dk_gated_recurrence, args);
  return dk::result_of("dk_gated_recurrence", [args] { dk::run_recurrence(*args); });
}

int64_t dk_linear_attention(const dk_linear_attention_args* args) {
  dk::note(dk_linear_attention, args);
  return dk::result_of("dk_linear_attention", [args] { dk::run_attention(*args); });
}
