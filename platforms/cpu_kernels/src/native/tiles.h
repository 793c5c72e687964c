// Matrix tiles (AMX): eight registers of up to 16 rows of 64 bytes, and their products.
//
// A tile of sums [16 rows][16 columns] is number 0 to 3, of inputs 4 or 5, of weights 6 or 7. The
// intrinsics do not tell the compiler which memory a load reads: call publish() after writing it.
#pragma once
#include <immintrin.h>

#include "dispatch.h"

namespace dk::DK_LEVEL_NAMESPACE {

constexpr int64_t kTileRows = 16, kTileColumns = 16, kTileRowBytes = 64;
constexpr int64_t kTileBytes = kTileRows * kTileRowBytes;
constexpr int kSumTiles = 4, kNumTiles = 8;

// The operand of the instruction that configures tiles.
struct alignas(64) TileLayout {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles in this thread while the object exists. input_bytes: of a row of inputs, 4 in each row of
// weights.
class Tiles {
 public:
  Tiles(int64_t num_rows, int64_t input_bytes) {
    TileLayout layout{};
    layout.palette = 1;
    for (int i = 0; i < kNumTiles; ++i) {
      const bool is_input = i == 4 || i == 5, is_weight = i > 5;
      layout.row_bytes[i] = static_cast<uint16_t>(is_input ? input_bytes : kTileRowBytes);
      layout.rows[i] = static_cast<uint8_t>(is_weight ? input_bytes / 4 : num_rows);
    }
    publish();
    _tile_loadconfig(&layout);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  DK_INLINE static void publish() { asm volatile("" ::: "memory"); }
};

}  // namespace dk::DK_LEVEL_NAMESPACE
