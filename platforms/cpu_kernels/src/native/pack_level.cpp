// Packing of weights into the panels of linear.h: row-major bf16 [N, K] with quantization, also to
// the grids of blocks (block_rounding.h), or rows of GGUF's blocks with their own values
// (gguf_blocks.h).
//
// Rounds to nearest even. int8: symmetric, scale = max |w| / 127 per column and group, rounded up
// to bf16. int4: a bf16 scale of either sign per column and group, by least squares. Levels give
// the same bytes: every step is a single rounded operation. Plain loops that compilers vectorize,
// because packing happens once.
#include "activations.h"
#include "block_rounding.h"
#include "gguf_blocks.h"
#include "linear.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

// The row of weights or blocks in column n of a panel, or null for padding. row_bytes: from one to
// the next.
DK_INLINE const char* column_row(const dk_pack_linear_args& args, int64_t row_bytes, int64_t panel,
                                 int64_t n) {
  const auto* const weight = static_cast<const char*>(args.weight);
  if (!(args.flags & DK_GATE_UP)) {
    const int64_t row = panel * kColumns + n;
    return row < args.N ? weight + row * row_bytes : nullptr;
  }
  const int64_t half = args.N / 2, row = panel * 16 + (n & 15);
  if (row >= half) return nullptr;
  return weight + (n < 16 ? row : half + row) * row_bytes;
}

DK_INLINE int64_t count_nonfinite(const uint16_t* row, int64_t K) {
  int32_t found = 0;
  for (int64_t k = 0; k < K; ++k) found += (row[k] & 0x7f80) == 0x7f80;
  return found;
}

// Transpose 32 rows of num_words words each into out[word][32].
void transpose_panel(const uint32_t* const* rows, int64_t num_words, uint32_t* out) {
  constexpr int64_t kBlock = 16;
  for (int64_t w = 0; w < num_words; w += kBlock) {
    const int64_t n = num_words - w < kBlock ? num_words - w : kBlock;
#if DK_LEVEL >= 2
    const __mmask16 kept = first(n);
    for (int64_t half = 0; half < 2; ++half) {
      __m512i r[16];
      DK_UNROLL for (int i = 0; i < 16; ++i) {
        r[i] = _mm512_maskz_loadu_epi32(kept, rows[half * 16 + i] + w);
      }
      transpose_16(r);
      DK_UNROLL for (int i = 0; i < 16; ++i) {
        if (i < n) _mm512_storeu_si512(out + (w + i) * kColumns + half * 16, r[i]);
      }
    }
#else
    for (int64_t column = 0; column < kColumns; ++column) {
      for (int64_t i = 0; i < n; ++i) out[(w + i) * kColumns + column] = rows[column][w + i];
    }
#endif
  }
}

// Rows of a panel as words, copied and padded with zeros into scratch of `row_bytes` a column.
struct PanelRows {
  char* bytes;
  int64_t row_bytes;
  const uint32_t* words[kColumns];

  explicit PanelRows(int64_t row_bytes_) : row_bytes(row_bytes_) {
    bytes = scratch(kRegionScratch, row_bytes * kColumns);
    for (int64_t n = 0; n < kColumns; ++n) {
      words[n] = reinterpret_cast<const uint32_t*>(bytes + n * row_bytes);
    }
  }
  char* row(int64_t n) { return bytes + n * row_bytes; }
};

int64_t pack_bf16_panels(const dk_pack_linear_args& args, int64_t, int64_t first_panel,
                         int64_t end_panel) {
  const PackedShape shape = packed_shape(DK_BF16, args.N, args.K, 0);
  PanelRows rows(shape.num_units * 4);
  int64_t nonfinite = 0;
  for (int64_t p = first_panel; p < end_panel; ++p) {
    for (int64_t n = 0; n < kColumns; ++n) {
      const char* const row = column_row(args, args.ld * 2, p, n);
      const int64_t filled = row ? args.K * 2 : 0;
      if (row) memcpy(rows.row(n), row, filled);
      memset(rows.row(n) + filled, 0, rows.row_bytes - filled);
      if (row) nonfinite += count_nonfinite(reinterpret_cast<const uint16_t*>(row), args.K);
    }
    char* const out = static_cast<char*>(args.packed) + p * shape.panel_bytes;
    transpose_panel(rows.words, shape.num_units, reinterpret_cast<uint32_t*>(out));
  }
  return nonfinite;
}

// Quantize a group of n weights to q + 128; returns the bits of its bf16 scale, which is rounded up
// so that no q is beyond 127.
uint16_t quantize_int8(const uint16_t* w, int64_t n, uint8_t* q) {
  const uint32_t largest = largest_of(w, n);
  const float scale = bf16_to_float(static_cast<uint16_t>(largest)) / 127.0f;
  uint32_t bits;
  memcpy(&bits, &scale, 4);
  const uint16_t rounded = static_cast<uint16_t>((bits + 0xffff) >> 16);
  if (largest >= 0x7f80 || bf16_to_float(static_cast<uint16_t>(largest)) < 1e-30f) {
    memset(q, 128, n);
    return 0;
  }
  round_group(w, n, 1.0f / bf16_to_float(rounded), reinterpret_cast<int8_t*>(q));
  for (int64_t k = 0; k < n; ++k) q[k] ^= 128;
  return rounded;
}

constexpr float kSteps = 2048.0f;

// Quantize a group of n weights to q + 8 in 0..15; returns the bits of its bf16 scale.
//
// The greatest magnitude becomes -8: its sign is the scale's, so that all of -8..7 is used. Then
// the scale is the best one for these q: sum(w q) / sum(q q). Candidates that clip the greatest
// weights have a smaller squared error, but a larger divergence of a model's outputs. The weights
// are whole 2,048ths of the greatest one, so that sums are exact in any order.
uint16_t quantize_int4(const uint16_t* w, int64_t n, uint8_t* q) {
  const uint32_t largest = largest_of(w, n);
  int64_t place = 0;
  while (place < n - 1 && (w[place] & 0x7fffu) != largest) ++place;
  const float greatest = bf16_to_float(w[place]);
  if (largest >= 0x7f80 || bf16_to_float(static_cast<uint16_t>(largest)) < 1e-29f) {
    memset(q, 8, n);
    return largest >= 0x7f80 ? static_cast<uint16_t>(largest) : 0;
  }
  const float inverse = kSteps / greatest;
  int32_t sum_wq = 0, sum_qq = 0;
  for (int64_t k = 0; k < n; ++k) {
    const int32_t step = nearest(bf16_to_float(w[k]) * inverse);
    int32_t value = nearest(static_cast<float>(step) * (-8.0f / kSteps));
    value = value > 7 ? 7 : value;
    sum_wq += step * value;
    sum_qq += value * value;
    q[k] = static_cast<uint8_t>(value + 8);
  }
  const double scale = static_cast<double>(sum_wq) / sum_qq;
  return float_to_bf16(static_cast<float>(scale * (static_cast<double>(greatest) / kSteps)));
}

// --- panels of groups ---------------------------------------------------------------------------

// Quantize group number `index` of a row; returns the number of weights that are not finite.
int64_t read_weights(const dk_pack_linear_args& args, const GroupFormat& format, const char* row,
                     int64_t index, Piece& piece) {
  const int64_t begin = index * format.group, left = args.K - begin;
  const int64_t n = left < format.group ? left : format.group;
  const auto* const w = reinterpret_cast<const uint16_t*>(row) + begin;
  piece.scale = format.bits == 8 ? quantize_int8(w, n, piece.codes)
                                 : quantize_int4(w, n, piece.codes);
  memset(piece.codes + n, static_cast<int>(format.offset()), format.group - n);
  return count_nonfinite(w, n);
}

// Read piece number `index` of a row; returns how many numbers are not finite: weights, or scales
// and minima.
int64_t read_piece(const dk_pack_linear_args& args, int64_t kind, const GroupFormat& format,
                   const char* row, int64_t index, Piece& piece) {
  if (kind < DK_Q4_0) return read_weights(args, format, row, index, piece);
  if (!(args.flags & DK_ROUND)) return read_block(kind, row, index, piece);
  const int64_t n = format.two_levels() ? kSuperK : format.group;
  const int64_t nonfinite = count_nonfinite(reinterpret_cast<const uint16_t*>(row) + index * n, n);
  return nonfinite ? nonfinite : round_block(kind, row, index, piece);
}

// The codes of a piece, in the order of a column (linear.h).
void write_codes(const GroupFormat& format, const Piece& piece, int64_t piece_k, char* out) {
  if (format.bits == 8) {
    memcpy(out, piece.codes, piece_k);
    return;
  }
  const uint8_t *q = piece.codes, *const end = q + piece_k;
  if (format.bits == 4) {
    for (; q < end; q += 8, out += 4) {
      for (int64_t b = 0; b < 4; ++b) out[b] = static_cast<char>(q[b] | q[4 + b] << 4);
    }
    return;
  }
  for (; q < end; q += 16, out += 12) {
    for (int64_t i = 0; i < 12; ++i) {
      out[i] = static_cast<char>(q[i] | (q[12 + i % 4] >> i / 4 * 2 & 3) << 6);
    }
  }
}

// The scales of piece number `index` of column n in a panel.
void write_scales(const GroupFormat& format, const Piece& piece, int64_t index, int64_t n,
                  char* panel) {
  const bool minima = format.has_minima;
  char* const upper = panel + (format.two_levels()
                                   ? index * format.super_bytes()
                                   : index * format.group_stride() + format.code_bytes());
  auto* const scales = reinterpret_cast<uint16_t*>(upper);
  scales[n] = piece.scale;
  if (minima) scales[kColumns + n] = piece.minimum;
  if (!format.two_levels()) return;
  for (int64_t g = 0; g < kSuperK / format.group; ++g) {
    char* const lower = upper + format.upper_bytes() + g * format.scale_bytes();
    lower[n] = piece.scales[g];
    if (minima) lower[kColumns + n] = piece.minima[g];
  }
}

int64_t pack_group_panels(const dk_pack_linear_args& args, int64_t kind, int64_t first_panel,
                          int64_t end_panel) {
  const GroupFormat format = group_format(kind, args.group);
  const PackedShape shape = packed_shape(kind, args.N, args.K, args.group);
  const bool is_blocks = kind >= DK_Q4_0 && !(args.flags & DK_ROUND);
  const int64_t num_groups = shape.num_units * 4 / format.group;
  const int64_t piece_k = format.two_levels() ? kSuperK : format.group;
  const int64_t num_pieces = shape.num_units * 4 / piece_k, piece_bytes = piece_k * format.bits / 8;
  const int64_t group_words = format.group * format.bits / 32;
  const int64_t stride = is_blocks ? args.ld : args.ld * 2;
  PanelRows rows(num_pieces * piece_bytes);
  Piece piece{};
  int64_t nonfinite = 0;
  for (int64_t p = first_panel; p < end_panel; ++p) {
    char* const panel = static_cast<char*>(args.packed) + p * shape.panel_bytes;
    for (int64_t n = 0; n < kColumns; ++n) {
      const char* const row = column_row(args, stride, p, n);
      if (!row) {
        piece = Piece{};
        memset(piece.codes, static_cast<int>(format.offset()), sizeof piece.codes);
      }
      for (int64_t i = 0; i < num_pieces; ++i) {
        if (row) nonfinite += read_piece(args, kind, format, row, i, piece);
        write_codes(format, piece, piece_k, rows.row(n) + i * piece_bytes);
        write_scales(format, piece, i, n, panel);
      }
    }
    for (int64_t g = 0; g < num_groups; ++g) {
      const uint32_t* words[kColumns];
      for (int64_t n = 0; n < kColumns; ++n) words[n] = rows.words[n] + g * group_words;
      transpose_panel(words, group_words,
                      reinterpret_cast<uint32_t*>(panel + format.codes_at(g)));
    }
  }
  return nonfinite;
}

}  // namespace

const PackKernels pack_bf16 = {pack_bf16_panels};
const PackKernels pack_groups = {pack_group_panels};

}  // namespace dk::DK_LEVEL_NAMESPACE
