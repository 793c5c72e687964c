// The small operations: rows are distributed over the team if there are enough of them.
#include "ops.h"

#include <cstring>

#include "record.h"
#include "team.h"

namespace {

// Numbers per piece of work: some microseconds, so that few rows run on one thread.
constexpr int64_t kNumbersPerPiece = 32 << 10;

int64_t rows_per_piece(int64_t row_numbers) {
  const int64_t rows = kNumbersPerPiece / (row_numbers > 0 ? row_numbers : 1);
  return rows > 1 ? rows : 1;
}

// Long rows, such as logits, are divided, too.
template <class F>
void each_piece_of_rows(const dk_scale_args& a, F body) {
  const int64_t pieces = (a.size + kNumbersPerPiece - 1) / kNumbersPerPiece;
  dk::parallel_for(a.num_rows * pieces, rows_per_piece(a.size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % pieces * kNumbersPerPiece, left = a.size - first;
      body(dk::Span{first, first + (left < kNumbersPerPiece ? left : kNumbersPerPiece)},
           i / pieces);
    }
  });
}

}  // namespace

int64_t dk_rms_norm(const dk_rms_norm_args* args) {
  dk::note(dk_rms_norm, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_outer * args->num_inner, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.rms_norm(*args, begin, end); });
  return DK_OK;
}

int64_t dk_add_rms_norm(const dk_add_rms_norm_args* args) {
  dk::note(dk_add_rms_norm, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_rows, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.add_rms_norm(*args, begin, end); });
  return DK_OK;
}

int64_t dk_layer_norm(const dk_layer_norm_args* args) {
  dk::note(dk_layer_norm, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_rows, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.layer_norm(*args, begin, end); });
  return DK_OK;
}

int64_t dk_rotary(const dk_rotary_args* args) {
  dk::note(dk_rotary, args);
  const auto& table = DK_PICK(ops_table);
  const int64_t token_numbers = (args->num_heads + args->num_kv_heads) * args->head_size;
  dk::parallel_for(args->num_tokens, rows_per_piece(token_numbers),
                   [&](int64_t begin, int64_t end) { table.rotary(*args, begin, end); });
  return DK_OK;
}

int64_t dk_silu_mul(const dk_silu_mul_args* args) {
  dk::note(dk_silu_mul, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_rows, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.silu_mul(*args, begin, end); });
  return DK_OK;
}

int64_t dk_gelu_tanh_mul(const dk_gate_mul_args* args) {
  dk::note(dk_gelu_tanh_mul, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_rows, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.gelu_tanh_mul(*args, begin, end); });
  return DK_OK;
}

int64_t dk_gated_norm(const dk_gated_norm_args* args) {
  dk::note(dk_gated_norm, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_tokens * args->num_groups, rows_per_piece(2 * args->size),
                   [&](int64_t begin, int64_t end) { table.gated_norm(*args, begin, end); });
  return DK_OK;
}

int64_t dk_sigmoid_mul(const dk_gate_mul_args* args) {
  dk::note(dk_sigmoid_mul, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_rows, rows_per_piece(args->size),
                   [&](int64_t begin, int64_t end) { table.sigmoid_mul(*args, begin, end); });
  return DK_OK;
}

int64_t dk_scale(const dk_scale_args* args) {
  dk::note(dk_scale, args);
  const auto& table = DK_PICK(ops_table);
  each_piece_of_rows(*args,
                     [&](dk::Span columns, int64_t row) { table.scale(*args, columns, row); });
  return DK_OK;
}

int64_t dk_soft_cap(const dk_scale_args* args) {
  dk::note(dk_soft_cap, args);
  const auto& table = DK_PICK(ops_table);
  each_piece_of_rows(*args,
                     [&](dk::Span columns, int64_t row) { table.soft_cap(*args, columns, row); });
  return DK_OK;
}

int64_t dk_add_shared(const dk_add_shared_args* args) {
  dk::note(dk_add_shared, args);
  const auto& table = DK_PICK(ops_table);
  dk::parallel_for(args->num_tokens, rows_per_piece(2 * args->size),
                   [&](int64_t begin, int64_t end) { table.add_shared(*args, begin, end); });
  return DK_OK;
}

int64_t dk_embedding(const dk_embedding_args* args) {
  dk::note(dk_embedding, args);
  const auto* const rows = static_cast<const uint16_t*>(args->table);
  auto* const out = static_cast<uint16_t*>(args->y);
  dk::parallel_for(args->num_tokens, rows_per_piece(args->size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      memcpy(out + t * args->y_stride, rows + args->ids[t] * args->table_stride, args->size * 2);
    }
  });
  return DK_OK;
}
