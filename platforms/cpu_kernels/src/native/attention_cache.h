// The cache of attention: write a step's keys and values, and locate those of a chunk.
//
// The block layout is in dovetail_attention.h. int8 is widened to bf16 before it is multiplied: an
// int8 is exactly a bf16, so only the scales remain to be applied. Independent of queries.
#pragma once
#include "attention.h"
#include "attention_simd.h"

namespace dk::DK_LEVEL_NAMESPACE {

// Consecutive tokens of a chunk in one block, from first_token (of the chunk, a multiple of 16).
struct Segment {
  int first_token, num_tokens;
  int64_t offset;  // of the first token in the block
  const char* block;
};
constexpr int kMaxSegments = kChunk / kPanel + 1;

// Split positions first .. end of a chunk into segments, `first` being a multiple of 16; return
// their number.
static DK_INLINE int cut_segments(const dk_attention_args& a, int64_t run, int64_t chunk_start,
                                  int first, int end, Segment* segments) {
  const int32_t* const table = a.block_table + run * a.block_table_stride;
  int n = 0;
  for (int t = first; t < end;) {
    const int64_t position = chunk_start + t, offset = position % a.block_size;
    const int64_t left = a.block_size - offset;
    const int num_tokens = left < end - t ? static_cast<int>(left) : end - t;
    const char* const base = static_cast<const char*>(a.cache);
    const int64_t block = table[position / a.block_size];
    segments[n++] = {t, num_tokens, offset, base + block * a.block_stride};
    t += num_tokens;
  }
  return n;
}

// The scales of a head's keys or values by position of the chunk; 0 for positions without a token.
static DK_INLINE void gather_scales(const Segment* segments, int n, int64_t scales_offset,
                                    float* scales) {
  for (int i = 0; i < kChunk; ++i) scales[i] = 0.f;
  for (int s = 0; s < n; ++s) {
    const char* const first = segments[s].block + scales_offset + segments[s].offset * 4;
    memcpy(scales + segments[s].first_token, first, segments[s].num_tokens * sizeof(float));
  }
}

// Convert n (a multiple of 32) int8 to bf16; prefetches as much memory at `ahead`.
static DK_INLINE void widen(const int8_t* from, uint16_t* to, int64_t n, const char* ahead) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    if (i % 64 == 0) prefetch(ahead + i);
    store_bf16_pair(to + i, load_int8(from + i), load_int8(from + i + kLanes));
  }
}

// 16 features of 16 tokens: from 8 rows of keys (pairs of features; a word per token) to 8 rows of
// values (pairs of tokens; a word per feature). In a word pair the middle halves change places.
static DK_INLINE void swap_pairs(const uint32_t* keys, uint32_t* values) {
#if DK_LEVEL >= 2
  __m512i row[8], half[8], quarter[8];
  const __m512i middle = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
  DK_UNROLL for (int j = 0; j < 8; ++j) {
    row[j] = _mm512_shuffle_epi8(_mm512_loadu_si512(keys + j * kLanes), middle);
  }
  DK_UNROLL for (int j = 0; j < 8; j += 2) {
    half[j] = _mm512_unpacklo_epi64(row[j], row[j + 1]);      // pairs 0, 2, 4 and 6 of tokens
    half[j + 1] = _mm512_unpackhi_epi64(row[j], row[j + 1]);  // pairs 1, 3, 5 and 7
  }
  DK_UNROLL for (int j = 0; j < 2; ++j) {
    DK_UNROLL for (int k = 0; k < 2; ++k) {
      quarter[4 * j + k] = _mm512_shuffle_i64x2(half[4 * k + j], half[4 * k + 2 + j], 0x88);
      quarter[4 * j + 2 + k] = _mm512_shuffle_i64x2(half[4 * k + j], half[4 * k + 2 + j], 0xdd);
    }
    const __m512i *const even = quarter + 4 * j, *const odd = even + 2;
    _mm512_storeu_si512(values + j * kLanes, _mm512_shuffle_i64x2(even[0], even[1], 0x88));
    _mm512_storeu_si512(values + (j + 4) * kLanes, _mm512_shuffle_i64x2(even[0], even[1], 0xdd));
    _mm512_storeu_si512(values + (j + 2) * kLanes, _mm512_shuffle_i64x2(odd[0], odd[1], 0x88));
    _mm512_storeu_si512(values + (j + 6) * kLanes, _mm512_shuffle_i64x2(odd[0], odd[1], 0xdd));
  }
#else
  for (int p = 0; p < kPanel / 2; ++p) {
    for (int j = 0; j < kLanes / 2; ++j) {
      const uint32_t first = keys[j * kLanes + 2 * p], second = keys[j * kLanes + 2 * p + 1];
      values[p * kLanes + 2 * j] = (first & 0xffffu) | second << 16;
      values[p * kLanes + 2 * j + 1] = first >> 16 | (second & 0xffff0000u);
    }
  }
#endif
}

// Rearrange the first features of some panels of keys, in bf16: [D / 2][16 tokens][2] each, as
// values; return the stride of 16 features in words.
static DK_INLINE int64_t values_of_keys(const dk_attention_args& a, const AttentionShape& shape,
                                        const uint32_t* keys, int num_tokens, uint32_t* values) {
  const int num_panels = (num_tokens + kPanel - 1) / kPanel;
  const int64_t block = kPanel / 2 * kLanes, stride = num_panels * block;
  for (int p = 0; p < num_panels; ++p, keys += a.head_size / 2 * kPanel, values += block) {
    for (int64_t i = 0; i < shape.width / kLanes; ++i) {
      swap_pairs(keys + i * block, values + i * stride);
    }
  }
  return stride;
}

// One token's features: quantized, and the scale that restores them. If a feature is not finite,
// neither are the scale and the result.
static DK_INLINE float quantize(const uint16_t* from, int64_t n, int8_t* to) {
  Vec greatest = zero(), doubt = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = load_bf16(from + i);
    greatest = max(max(greatest, x), sub(zero(), x));
    doubt = add(doubt, sub(x, x));  // NaN if x is not finite
  }
  const float most = reduce_max(greatest), unsure = reduce_add(doubt);
  if (!(unsure == 0.f)) {
    memset(to, 0, n);
    return unsure;
  }
  const Vec inverse = set(most > 0.f ? 127.f / most : 0.f), limit = set(127.f);
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec y = round_even(mul(load_bf16(from + i), inverse));
    store_int8(to + i, max(min(y, limit), sub(zero(), limit)));
  }
  return most / 127.f;
}

// The destination of a token: a block, at `offset`.
struct Slot {
  char* block;
  int64_t offset;
};
static DK_INLINE Slot slot_of(const dk_attention_args& a, int64_t token) {
  const int64_t slot = a.slot_mapping[token];
  return {static_cast<char*>(a.cache) + slot / a.block_size * a.block_stride, slot % a.block_size};
}

// Write a pair of features of keys, or one feature of values, of one token.
template <class Element>
static DK_INLINE void scatter_key(const Element* from, int64_t size, char* head, int64_t offset) {
  Element* to = reinterpret_cast<Element*>(head);
  to += offset / kPanel * kPanel * size + offset % kPanel * 2;
  for (int64_t d = 0; d < size; d += 2, to += 2 * kPanel) memcpy(to, from + d, 2 * sizeof(Element));
}
template <class Element>
static DK_INLINE void scatter_value(const Element* from, int64_t size, char* head,
                                    int64_t block_size, int64_t offset) {
  Element* to = reinterpret_cast<Element*>(head) + offset / 2 * 2 * kLanes + offset % 2;
  for (int64_t d = 0; d < size; d += kLanes, to += block_size * kLanes) {
    for (int i = 0; i < kLanes; ++i) to[2 * i] = from[d + i];
  }
}

static DK_INLINE const uint16_t* row_of(const void* x, int64_t token, int64_t token_stride,
                                        int64_t head, int64_t head_stride) {
  return static_cast<const uint16_t*>(x) + token * token_stride + head * head_stride;
}

static void write_key(const dk_attention_args& a, const AttentionShape& shape, int64_t token,
                      int64_t head) {
  const Slot slot = slot_of(a, token);
  const uint16_t* const k = row_of(a.k, token, a.k_token_stride, head, a.k_head_stride);
  char* const keys = slot.block + head * shape.head_bytes;
  if (shape.element_bytes == 2) return scatter_key(k, a.head_size, keys, slot.offset);
  int8_t rounded[kMaxHeadSize];
  const float scale = quantize(k, a.head_size, rounded);
  scatter_key(rounded, a.head_size, keys, slot.offset);
  const int64_t place = (head * a.block_size + slot.offset) * 4;
  memcpy(slot.block + shape.key_scales_offset + place, &scale, 4);
}

static void write_value(const dk_attention_args& a, const AttentionShape& shape, int64_t token,
                        int64_t head) {
  if (shape.latent) return;
  const Slot slot = slot_of(a, token);
  const uint16_t* const v = row_of(a.v, token, a.v_token_stride, head, a.v_head_stride);
  char* const values = slot.block + shape.values_offset + head * shape.head_bytes;
  if (shape.element_bytes == 2) {
    return scatter_value(v, a.head_size, values, a.block_size, slot.offset);
  }
  int8_t rounded[kMaxHeadSize];
  const float scale = quantize(v, a.head_size, rounded);
  scatter_value(rounded, a.head_size, values, a.block_size, slot.offset);
  const int64_t place = (head * a.block_size + slot.offset) * 4;
  memcpy(slot.block + shape.value_scales_offset + place, &scale, 4);
}

// 16 consecutive tokens that fill a panel, in bf16: whole cache lines instead of single words.
static void write_panel(const dk_attention_args& a, const AttentionShape& shape, int64_t token,
                        int64_t head) {
  const int64_t size = a.head_size;
  const Slot slot = slot_of(a, token);
  // Rows of a fused projection are a power of two apart, all in one set of the L1 cache: read
  // each of them once, completely.
  uint16_t k[kPanel][kMaxHeadSize], v[kPanel][kMaxHeadSize];
  const uint16_t* from_k = row_of(a.k, token, a.k_token_stride, head, a.k_head_stride);
  const uint16_t* from_v = row_of(a.v, token, a.v_token_stride, head, a.v_head_stride);
  for (int t = 0; t < kPanel; ++t, from_k += a.k_token_stride, from_v += a.v_token_stride) {
    memcpy(k[t], from_k, size * 2);
    if (!shape.latent) memcpy(v[t], from_v, size * 2);
  }
  char* key = slot.block + head * shape.head_bytes + slot.offset * size * 2;
  for (int64_t d = 0; d < size; d += 2, key += kPanel * 4) {
    for (int t = 0; t < kPanel; ++t) memcpy(key + t * 4, k[t] + d, 4);
  }
  if (shape.latent) return;
  char* values = slot.block + shape.values_offset + head * shape.head_bytes;
  values += slot.offset * kLanes * 2;
  for (int64_t d = 0; d < size; d += kLanes, values += a.block_size * kLanes * 2) {
    for (int t = 0; t < kPanel; t += 2) {
      uint32_t words[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        words[i] = v[t][d + i] | static_cast<uint32_t>(v[t + 1][d + i]) << 16;
      }
      memcpy(values + t / 2 * sizeof words, words, sizeof words);
    }
  }
}

static DK_INLINE bool fills_panel(const dk_attention_args& a, int64_t token, int64_t end) {
  if (token + kPanel > end || a.slot_mapping[token] % kPanel) return false;
  for (int t = 1; t < kPanel; ++t) {
    if (a.slot_mapping[token + t] != a.slot_mapping[token] + t) return false;
  }
  return true;
}

// Write tokens first .. end of the step, of some key-value heads.
static void write_tokens(const dk_attention_args& a, int64_t first, int64_t end, int64_t first_head,
                         int64_t end_head) {
  const AttentionShape shape(a);
  for (int64_t t = first; t < end;) {
    const bool panel = shape.element_bytes == 2 && fills_panel(a, t, end);
    for (int64_t h = first_head; h < end_head; ++h) {
      if (panel) {
        write_panel(a, shape, t, h);
      } else {
        write_key(a, shape, t, h);
        write_value(a, shape, t, h);
      }
    }
    t += panel ? kPanel : 1;
  }
}

}  // namespace dk::DK_LEVEL_NAMESPACE
