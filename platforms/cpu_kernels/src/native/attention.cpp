// Attention of a step: the team processes the waves of its plan (attention_plan.cpp).
#include "attention.h"

#include "attention_plan.h"
#include "failure.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

thread_local AttentionPlan thread_plan;

void run_wave(const dk_attention_args& a, const AttentionPlan& plan, const AttentionWave& from,
              const AttentionWave& to) {
  const AttentionTable& table = DK_PICK(attention_table);
  parallel_ranges(to.end_item - from.end_item, 1, [&](auto&& next) {
    char* const memory = scratch(kRegionScratch, plan.scratch_bytes);
    int64_t begin, end;
    while (next(begin, end)) {
      for (int64_t i = begin; i < end; ++i) {
        table.attend(a, plan.items[from.end_item + i], memory);
      }
    }
  });
  parallel_for(to.end_piece - from.end_piece, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const CombinePiece& piece = plan.pieces[from.end_piece + i];
      table.combine(a, plan.splits[piece.split], piece.first_row, piece.end_row);
    }
  });
}

void run_attention(const dk_attention_args& a) {
  const AttentionTable& table = DK_PICK(attention_table);
  AttentionPlan& plan = thread_plan;
  make_plan(a, plan);
  const int64_t num_writes = static_cast<int64_t>(plan.writes.size()) / 2;
  parallel_for(num_writes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      table.write(a, plan.writes[2 * i], plan.writes[2 * i + 1], 0, a.num_kv_heads);
    }
  });
  AttentionWave done{};
  for (const AttentionWave& wave : plan.waves) {
    run_wave(a, plan, done, wave);
    done = wave;
  }
}

}  // namespace
}  // namespace dk

int64_t dk_attention(const dk_attention_args* args) {
  dk::note(dk_attention, args);
  return dk::result_of("dk_attention", [args] { dk::run_attention(*args); });
}

int64_t dk_attention_block_bytes(int64_t num_kv_heads, int64_t head_size, int64_t block_size,
                                 int64_t cache_kind, int64_t value_size) {
  dk_attention_args a{};
  a.num_heads = a.num_kv_heads = num_kv_heads;
  a.head_size = head_size;
  a.block_size = block_size;
  a.cache_kind = cache_kind;
  a.value_size = value_size;
  return dk::AttentionShape(a).block_bytes;
}
