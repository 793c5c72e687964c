// Packed linears: passes over the rows, packing of activations, distribution of panels.
//
// Results do not depend on the batch: neither the split of rows into passes and tiles nor the
// thread of a panel changes the order of a sum (linear_level.cpp, linear_groups_level.cpp) or the
// quantization of a row (activations.h). So DK_BATCH_INVARIANT has no effect.
#include "linear.h"

#include <algorithm>
#include <atomic>

#include "failure.h"
#include "float_mode.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

constexpr int64_t kFewTiledRows = 128;    // up to so many, registers are as fast as matrix tiles
constexpr int64_t kSharedPacking = 8192;  // fewer activations are packed by the caller alone

int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// The tile height with the least work: padding counts as rows, and each tile has a fixed cost.
int64_t pick_tile_rows(const LinearKernels& kernels, int64_t num_rows) {
  const int64_t highest = kernels.max_tile_rows;
  if (num_rows <= kernels.few_rows) return num_rows;
  int64_t best = highest;
  double least = 1e30;
  for (int64_t rows = highest; rows >= kernels.min_tile_rows; --rows) {
    const double tiles = static_cast<double>((num_rows + rows - 1) / rows);
    const double work = tiles * (static_cast<double>(rows) + kernels.row_cost);
    if (work < least) {
      least = work;
      best = rows;
    }
  }
  return best;
}

// Run one pass. Scratch contains packed activations and four arrays of a number per group.
void run_pass(const LinearKernels& kernels, LinearJob& job, int64_t num_panels) {
  const int64_t num_tiles = job.num_tiles(), rows = num_tiles * job.tile_rows;
  const int64_t row_units = padded(job.num_units, kernels.unit_multiple);
  const int64_t packed_bytes = padded(rows * row_units * kernels.unit_bytes, 64);
  const int64_t array_bytes = padded(rows * job.num_groups * 4, 64);
  char* const memory = scratch(kOperationScratch, packed_bytes + 4 * array_bytes);
  job.activations = memory;
  job.scales = reinterpret_cast<float*>(memory + packed_bytes);
  job.starts = reinterpret_cast<int32_t*>(memory + packed_bytes + array_bytes);
  job.start_products = reinterpret_cast<float*>(memory + packed_bytes + 2 * array_bytes);
  job.sums = reinterpret_cast<float*>(memory + packed_bytes + 3 * array_bytes);
  if (job.num_rows * job.args->K < kSharedPacking) {
    kernels.pack_rows(job, 0, num_tiles);
  } else {
    const auto pack = [&](int64_t begin, int64_t end) { kernels.pack_rows(job, begin, end); };
    parallel_for(num_tiles, 1, pack);
  }
  const auto compute = [&](int64_t begin, int64_t end) { kernels.compute(job, begin, end); };
  parallel_for(num_panels, 1, compute);
}

// How rows are split into passes of whole tiles.
struct Cut {
  int64_t tile_rows, num_tiles, num_passes;
  Cut(const LinearKernels& kernels, int64_t num_rows, int64_t row_bytes) {
    const int64_t kept_rows = kKeptBytes / row_bytes;
    const int64_t most_rows = std::clamp(kept_rows, kernels.fewest_rows, kernels.most_rows);
    const int64_t most_tiles = most_rows / kernels.max_tile_rows;
    const bool one_pass = num_rows <= most_tiles * kernels.max_tile_rows;
    tile_rows = one_pass ? pick_tile_rows(kernels, num_rows) : kernels.max_tile_rows;
    num_tiles = (num_rows + tile_rows - 1) / tile_rows;
    num_passes = one_pass ? 1 : (num_tiles + most_tiles - 1) / most_tiles;
  }
  int64_t first_row(int64_t pass) const { return num_tiles * pass / num_passes * tile_rows; }
};

void run_linear(const LinearKernels& kernels, int64_t kind, const dk_linear_args& args) {
  if (args.M == 0) return;
  const DefaultFloatMode mode;  // the caller packs few rows itself
  const PackedShape shape = packed_shape(kind, args.N, args.K, args.group);
  const GroupFormat format = group_format(kind, args.group);
  const Cut cut(kernels, args.M, shape.num_units * kernels.unit_bytes);
  for (int64_t pass = 0; pass < cut.num_passes; ++pass) {
    const int64_t begin = cut.first_row(pass), end = std::min(cut.first_row(pass + 1), args.M);
    LinearJob job{};
    job.args = &args;
    job.x = static_cast<const uint16_t*>(args.x) + begin * args.ldx;
    job.first_row = begin;
    job.num_rows = end - begin;
    job.tile_rows = cut.tile_rows;
    job.num_units = shape.num_units;
    job.format = format;
    job.num_groups = kind == DK_BF16 ? 0 : shape.num_units * 4 / format.group;
    run_pass(kernels, job, shape.num_panels);
  }
}

void run_groups(int64_t kind, const dk_linear_args& args) {
  static const LinearKernels* const tiles[] = DK_ALL_TABLES(group_tiles);
  const LinearKernels* const own = tiles[current_level()];
  run_linear(own && args.M > kFewTiledRows ? *own : DK_PICK(linear_groups), kind, args);
}

void run_packing(const PackKernels& kernels, int64_t kind, const dk_pack_linear_args& args) {
  const PackedShape shape = packed_shape(kind, args.N, args.K, args.group);
  std::atomic<int64_t> num_nonfinite{0};
  parallel_for(shape.num_panels, 4, [&](int64_t begin, int64_t end) {
    num_nonfinite += kernels.pack(args, kind, begin, end);
  });
  *args.num_nonfinite = num_nonfinite;
}

}  // namespace
}  // namespace dk

int64_t dk_packed_bytes(int64_t kind, int64_t N, int64_t K, int64_t group, int64_t) {
  const dk::PackedShape shape = dk::packed_shape(kind, N, K, group);
  return shape.num_panels * shape.panel_bytes;
}

int64_t dk_pack_linear_bf16(const dk_pack_linear_args* args) {
  const auto pack = [args] { dk::run_packing(DK_PICK(pack_bf16), DK_BF16, *args); };
  return dk::result_of("dk_pack_linear_bf16", pack);
}
int64_t dk_pack_linear_int8(const dk_pack_linear_args* args) {
  const auto pack = [args] { dk::run_packing(DK_PICK(pack_groups), DK_INT8, *args); };
  return dk::result_of("dk_pack_linear_int8", pack);
}
int64_t dk_pack_linear_int4(const dk_pack_linear_args* args) {
  const auto pack = [args] { dk::run_packing(DK_PICK(pack_groups), DK_INT4, *args); };
  return dk::result_of("dk_pack_linear_int4", pack);
}
int64_t dk_pack_linear_blocks(const dk_pack_linear_args* args) {
  const auto pack = [args] { dk::run_packing(DK_PICK(pack_groups), args->kind, *args); };
  return dk::result_of("dk_pack_linear_blocks", pack);
}

int64_t dk_linear_bf16(const dk_linear_args* args) {
  dk::note(dk_linear_bf16, args);
  const auto run = [args] { dk::run_linear(DK_PICK(linear_bf16), DK_BF16, *args); };
  return dk::result_of("dk_linear_bf16", run);
}
int64_t dk_linear_int8(const dk_linear_args* args) {
  dk::note(dk_linear_int8, args);
  return dk::result_of("dk_linear_int8", [args] { dk::run_groups(DK_INT8, *args); });
}
int64_t dk_linear_int4(const dk_linear_args* args) {
  dk::note(dk_linear_int4, args);
  return dk::result_of("dk_linear_int4", [args] { dk::run_groups(DK_INT4, *args); });
}
int64_t dk_linear_blocks(const dk_linear_args* args) {
  dk::note(dk_linear_blocks, args);
  return dk::result_of("dk_linear_blocks", [args] { dk::run_groups(args->kind, *args); });
}
