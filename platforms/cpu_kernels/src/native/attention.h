// The interface from the planner of attention (attention.cpp) to the kernels of a level
// (attention_level.cpp).
//
// The context is split at multiples of kChunk positions. Each chunk gives every query row a
// maximum, a sum and a weighted sum of values; chunks are combined in order, always by the same
// formula. So the bits do not depend on the split: for one token or a prompt, on one thread or
// many. Masked positions have weight 0 and change nothing.
#pragma once
#include <cstdint>

#include "dispatch.h"
#include "dovetail_attention.h"

namespace dk {

constexpr int kChunk = 256;  // positions; multiple of 32
constexpr int kPanel = 16;   // tokens of a panel of keys
constexpr int kMaxHeadSize = 640;

// Sizes that follow from the arguments. Bytes of a block: keys, values, then scales.
struct AttentionShape {
  int64_t group;            // query heads of a key-value head
  int64_t element_bytes;    // of the cache
  bool latent;              // values are the first features of keys
  int64_t value_size;       // features of a value
  int64_t width;            // the same, rounded up to 16: those that are computed
  int64_t head_bytes;       // keys (or values) of one head in a block
  int64_t values_offset;    // 0 without separate values
  int64_t key_scales_offset, value_scales_offset;
  int64_t block_bytes;      // of the used part of a block

  DK_INLINE explicit AttentionShape(const dk_attention_args& a)
      : group(a.num_heads / a.num_kv_heads),
        element_bytes(a.cache_kind == DK_CACHE_INT8 ? 1 : 2),
        latent(a.value_size > 0),
        value_size(latent ? a.value_size : a.head_size),
        width((value_size + 15) / 16 * 16) {
    head_bytes = a.block_size * a.head_size * element_bytes;
    values_offset = latent ? 0 : a.num_kv_heads * head_bytes;
    key_scales_offset = a.num_kv_heads * head_bytes + values_offset;
    const int64_t scales = a.cache_kind == DK_CACHE_INT8 ? a.num_kv_heads * a.block_size * 4 : 0;
    value_scales_offset = key_scales_offset + (latent ? 0 : scales);
    block_bytes = value_scales_offset + scales;
  }
};

// A piece of attention: tokens of one run, some key-value heads, some chunks of the context.
struct AttentionItem {
  int32_t run;
  int32_t first_token, num_tokens;  // of the run's tokens in this step
  int32_t first_head, num_heads;    // key-value heads
  int32_t first_chunk, end_chunk;
  bool streams;  // few rows: process the blocks once for all heads, in memory order
  bool writes;   // the run has one token, and this item has its chunk: write it to the cache first
  float* partial;        // results of its first head's rows in its first chunk; NULL: combined here
  int32_t partial_rows;  // rows of all heads that are split alike: from a chunk to the next
  int64_t cost;
};

// Results of consecutive chunks of the same rows, before they are combined: for a chunk and a row
// (head, token, query head of the group): maximum, sum and `width` weighted values.
struct AttentionSplit {
  int32_t run;
  int32_t first_token, num_tokens;
  int32_t first_head, num_heads;
  int32_t num_slots;  // chunks, and the combined results of earlier ones
  bool continues;     // slot 0 has the combined results of earlier chunks
  bool ends;          // nothing follows: write the output; otherwise write slot 0
  float* partial;
  DK_INLINE int64_t rows(const AttentionShape& shape) const {
    return shape.group * num_tokens * num_heads;
  }
};
DK_INLINE int64_t partial_row_floats(const AttentionShape& shape) { return shape.width + 2; }

struct AttentionTable {
  int64_t (*scratch_bytes)(const dk_attention_args& a, const AttentionItem& item);
  void (*write)(const dk_attention_args& a, int64_t first_token, int64_t end_token,
                int64_t first_head, int64_t end_head);
  void (*attend)(const dk_attention_args& a, const AttentionItem& item, char* scratch);
  void (*combine)(const dk_attention_args& a, const AttentionSplit& split, int64_t first_row,
                  int64_t end_row);
};

}  // namespace dk

DK_DECLARE_TABLES(dk::AttentionTable, attention_table)
