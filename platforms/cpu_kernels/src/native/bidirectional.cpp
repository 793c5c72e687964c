// Attention without a cache: the team processes blocks of queries of every run and key-value head.
#include "bidirectional.h"

#include <algorithm>
#include <vector>

#include "failure.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

// Query rows of an item. Each item packs the keys and values of its run again, which costs little
// with so many rows; fewer rows would keep more threads busy with one short prompt.
constexpr int64_t kItemRows = 192;

thread_local std::vector<BidirectionalItem> thread_items;

void list_items(const dk_bidirectional_args& a, int64_t most_tokens,
                std::vector<BidirectionalItem>& items) {
  items.clear();
  for (int64_t run = 0; run < a.batch->num_runs; ++run) {
    const int64_t length = a.query_start[run + 1] - a.query_start[run];
    const int64_t count = (length + most_tokens - 1) / most_tokens;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t first = length * i / count, end = length * (i + 1) / count;
        items.push_back({static_cast<int32_t>(run), static_cast<int32_t>(first),
                         static_cast<int32_t>(end - first), static_cast<int32_t>(head)});
      }
    }
  }
}

void run_bidirectional(const dk_bidirectional_args& a) {
  const BidirectionalTable& table = DK_PICK(bidirectional_table);
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t most_tokens = std::max<int64_t>(1, kItemRows / group);
  std::vector<BidirectionalItem>& items = thread_items;
  list_items(a, most_tokens, items);
  const int64_t num_bytes = table.scratch_bytes(a, most_tokens);
  parallel_ranges(static_cast<int64_t>(items.size()), 1, [&](auto&& next) {
    char* const memory = scratch(kRegionScratch, num_bytes);
    int64_t begin, end;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) table.attend(a, items[i], memory);
    }
  });
}

}  // namespace
}  // namespace dk

int64_t dk_bidirectional(const dk_bidirectional_args* args) {
  dk::note(dk_bidirectional, args);
  return dk::result_of("dk_bidirectional", [args] { dk::run_bidirectional(*args); });
}
