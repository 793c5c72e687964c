// Packed linears: passes over the rows, packing of activations, distribution of panels.
//
// Results do not depend on the batch: neither the split of rows into passes and tiles nor the
// thread of a panel changes the order of a sum (linear_level.cpp, linear_groups_level.cpp) or the
// quantization of a row (activations.h). So DK_BATCH_INVARIANT has no effect.
#include "linear_passes.h"

#include <algorithm>
#include <atomic>

#include "failure.h"
#include "float_mode.h"
#include "record.h"
#include "team.h"

namespace dk {
namespace {

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

constexpr int64_t kFewTiledRows = 128;    // up to so many, registers are as fast as matrix tiles
constexpr int64_t kFewestWideRows = 3;    // from so many on, codes are widened if that is faster
constexpr int64_t kSharedPacking = 8192;  // fewer activations are packed by the caller alone
constexpr int64_t kPassesPerThread = 2;   // from so many on, threads have passes of their own
constexpr int64_t kPanelsPerPiece = 8;

// Groups of activations above this share of the mean scale have low parts, or 0.
float refined_from(int64_t flags) {
  return flags & DK_REFINE_MOST ? 0.7f : flags & DK_REFINE ? 2.0f : 0.0f;
}

// Sizes of a job's memory.
struct Room {
  int64_t packed_bytes, array_bytes, low_bytes, flags_bytes;
  Room(const LinearKernels& kernels, const LinearJob& job) {
    const int64_t rows = job.num_tiles() * job.tile_rows;
    const int64_t row_units = padded(job.num_units, kernels.unit_multiple);
    packed_bytes = padded(rows * row_units * kernels.unit_bytes, 64);
    array_bytes = padded(rows * job.num_groups * 4, 64);
    low_bytes = job.refined_from ? packed_bytes + array_bytes : 0;
    flags_bytes = job.refined_from ? padded(job.num_tiles() * job.num_groups, 64) : 0;
  }
};

// Many passes: each thread packs and computes passes of its own, without waiting for the others.
// Pieces of a pass are panels; a thread that takes a piece of another's pass packs it again.
void run_passes(const LinearKernels& kernels, const Passes& passes, const dk_linear_args& args,
                int64_t num_panels) {
  const int64_t pieces = (num_panels + kPanelsPerPiece - 1) / kPanelsPerPiece;
  parallel_ranges(passes.count() * pieces, 1, [&](auto&& next) {
    LinearJob job{};
    int64_t begin, end, packed = -1;
    while (next(begin, end)) {
      const int64_t pass = begin / pieces, piece = begin % pieces;
      if (pass != packed) {
        job = passes.job(args, pass);
        use_memory(kernels, job, scratch(kOtherScratch, memory_of(kernels, job)));
        kernels.pack_rows(job, 0, job.num_tiles());
        packed = pass;
      }
      kernels.compute(job, num_panels * piece / pieces, num_panels * (piece + 1) / pieces);
    }
  });
}

void run_linear(int64_t kind, const dk_linear_args& args) {
  if (args.M == 0) return;
  const DefaultFloatMode mode;  // the caller packs few rows itself
  const LinearKernels& kernels = kernels_for(kind, args.M);
  const int64_t num_panels = packed_shape(kind, args.N, args.K, args.group).num_panels;
  const Passes passes(kernels, kind, args);
  if (passes.count() >= kPassesPerThread * num_threads()) {
    return run_passes(kernels, passes, args, num_panels);
  }
  for (int64_t pass = 0; pass < passes.count(); ++pass) {
    LinearJob job = passes.job(args, pass);
    use_memory(kernels, job, scratch(kOperationScratch, memory_of(kernels, job)));
    const auto pack = [&](int64_t begin, int64_t end) { kernels.pack_rows(job, begin, end); };
    const bool is_small = job.num_rows * args.K < kSharedPacking;
    parallel_for(job.num_tiles(), is_small ? job.num_tiles() : 1, pack);
    const auto compute = [&](int64_t begin, int64_t end) { kernels.compute(job, begin, end); };
    parallel_for(num_panels, 1, compute);
  }
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

const LinearKernels& kernels_for(int64_t kind, int64_t num_rows) {
  if (kind == DK_BF16) return DK_PICK(linear_bf16);
  static const LinearKernels* const tiles[] = DK_ALL_TABLES(group_tiles);
  static const LinearKernels* const wide[] = DK_ALL_TABLES(wide_groups);
  const int level = current_level();
  if (tiles[level] && num_rows > kFewTiledRows) return *tiles[level];
  const bool is_wide = group_format(kind, 0).bits > 4;
  if (wide[level] && is_wide && num_rows >= kFewestWideRows) return *wide[level];
  return DK_PICK(linear_groups);
}

Passes::Passes(const LinearKernels& kernels, int64_t kind, const dk_linear_args& args)
    : kind_(kind), num_units_(packed_shape(kind, args.N, args.K, args.group).num_units) {
  const int64_t kept_rows = kKeptBytes / (num_units_ * kernels.unit_bytes);
  const int64_t most_rows = std::clamp(kept_rows, kernels.fewest_rows, kernels.most_rows);
  const int64_t most_tiles = most_rows / kernels.max_tile_rows;
  const bool one_pass = args.M <= most_tiles * kernels.max_tile_rows;
  tile_rows_ = one_pass ? pick_tile_rows(kernels, args.M) : kernels.max_tile_rows;
  num_tiles_ = (args.M + tile_rows_ - 1) / tile_rows_;
  count_ = one_pass ? 1 : (num_tiles_ + most_tiles - 1) / most_tiles;
}

LinearJob Passes::job(const dk_linear_args& args, int64_t pass) const {
  const auto first_row = [&](int64_t i) { return num_tiles_ * i / count_ * tile_rows_; };
  LinearJob job{};
  job.args = &args;
  job.first_row = first_row(pass);
  job.num_rows = std::min(first_row(pass + 1), args.M) - job.first_row;
  job.tile_rows = tile_rows_;
  job.num_units = num_units_;
  job.format = group_format(kind_, args.group);
  if (kind_ != DK_BF16) {
    job.num_groups = num_units_ * 4 / job.format.group;
    job.refined_from = refined_from(args.flags);
  }
  return job;
}

int64_t memory_of(const LinearKernels& kernels, const LinearJob& job) {
  const Room room(kernels, job);
  return room.packed_bytes + 4 * room.array_bytes + room.low_bytes + room.flags_bytes;
}

void use_memory(const LinearKernels& kernels, LinearJob& job, char* memory) {
  const Room room(kernels, job);
  const auto array = [&](int i) { return memory + room.packed_bytes + i * room.array_bytes; };
  job.x = static_cast<const uint16_t*>(job.args->x) + job.first_row * job.args->ldx;
  job.activations = memory;
  job.scales = reinterpret_cast<float*>(array(0));
  job.starts = reinterpret_cast<int32_t*>(array(1));
  job.start_products = reinterpret_cast<float*>(array(2));
  job.sums = reinterpret_cast<float*>(array(3));
  if (job.refined_from == 0.0f) return;
  job.low_starts = reinterpret_cast<int32_t*>(array(4));
  job.low = array(5);
  job.has_low = reinterpret_cast<uint8_t*>(job.low + room.packed_bytes);
}

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
  return dk::result_of("dk_linear_bf16", [args] { dk::run_linear(DK_BF16, *args); });
}
int64_t dk_linear_int8(const dk_linear_args* args) {
  dk::note(dk_linear_int8, args);
  return dk::result_of("dk_linear_int8", [args] { dk::run_linear(DK_INT8, *args); });
}
int64_t dk_linear_int4(const dk_linear_args* args) {
  dk::note(dk_linear_int4, args);
  return dk::result_of("dk_linear_int4", [args] { dk::run_linear(DK_INT4, *args); });
}
int64_t dk_linear_blocks(const dk_linear_args* args) {
  dk::note(dk_linear_blocks, args);
  return dk::result_of("dk_linear_blocks", [args] { dk::run_linear(args->kind, *args); });
}
