// Sampling at a level: one pass finds the block of the maximum, a second look the place in the
// block.
#include "attention_simd.h"
#include "sampling.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int64_t kBlock = 1024;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.402823466e38f;

Vec load_numbers(const float* p) { return load(p); }
Vec load_numbers(const uint16_t* p) { return load_bf16(p); }
float number(float x) { return x; }
float number(uint16_t x) { return float_of_bf16(x); }
bool is_nan(float x) { return x != x; }

// Up to 16 numbers, followed by -infinity.
template <class T>
Vec load_some(const T* p, int64_t n) {
  if (n >= kLanes) return load_numbers(p);
  float room[kLanes];
  for (int i = 0; i < kLanes; ++i) room[i] = i < n ? number(p[i]) : -kInfinity;
  return load(room);
}

struct Best {
  int64_t column;
  float value;
};

template <class T>
Best best_of_row(const T* row, int64_t size) {
  float top = -kInfinity;
  int64_t block = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = size - start < kBlock ? size : start + kBlock;
    Vec best = set(-kInfinity), doubt = zero();
    for (int64_t i = start; i < end; i += kLanes) {
      const Vec x = load_some(row + i, end - i);
      best = max(best, x);
      // This order preserves a NaN; infinities become finite, so that x - x is 0.
      const Vec bounded = max(set(-kLargest), min(set(kLargest), x));
      doubt = add(doubt, sub(bounded, bounded));
    }
    if (is_nan(reduce_add(doubt))) {
      while (!is_nan(number(row[start]))) ++start;
      return {start, number(row[start])};
    }
    const float most = reduce_max(best);
    if (most > top) {
      top = most;
      block = start;
    }
  }
  while (number(row[block]) != top) ++block;
  return {block, top};
}

template <class T>
float logsumexp_of_row(const T* row, int64_t size, float top) {
  if (is_nan(top) || top == kInfinity || top == -kInfinity) return top;
  Vec sum = zero();
  for (int64_t i = 0; i < size; i += kLanes) {
    sum = add(sum, exp2_of(mul(sub(load_some(row + i, size - i), set(top)), set(kLog2E))));
  }
  return top + __builtin_logf(reduce_add(sum));
}

template <class T>
void argmax_rows(const dk_argmax_args& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* const row = static_cast<const T*>(a.logits) + r * a.stride;
    const Best best = best_of_row(row, a.size);
    a.ids[r] = best.column;
    if (a.logsumexp) a.logsumexp[r] = logsumexp_of_row(row, a.size, best.value);
  }
}

void argmax(const dk_argmax_args& a, int64_t begin, int64_t end) {
  if (a.is_float32) {
    argmax_rows<float>(a, begin, end);
  } else {
    argmax_rows<uint16_t>(a, begin, end);
  }
}

// Most bytes allow all of their columns or none.
template <class T>
void mask_row(T* row, const uint8_t* bits, int64_t size, T forbidden) {
  for (int64_t start = 0; start < size; start += 8) {
    const unsigned allowed = bits[start / 8];
    if (allowed == 0xFF) continue;
    const int64_t count = size - start < 8 ? size - start : 8;
    for (int64_t i = 0; i < count; ++i) {
      row[start + i] = allowed >> i & 1 ? row[start + i] : forbidden;
    }
  }
}

template <class T>
void mask_rows(const dk_mask_args& a, int64_t begin, int64_t end, T forbidden) {
  T* const logits = static_cast<T*>(a.logits);
  for (int64_t r = begin; r < end; ++r) {
    mask_row(logits + a.rows[r] * a.stride, a.bits + r * a.row_bytes, a.size, forbidden);
  }
}

void mask(const dk_mask_args& a, int64_t begin, int64_t end) {
  constexpr uint16_t kBf16NegativeInfinity = 0xFF80;
  if (a.is_float32) {
    mask_rows<float>(a, begin, end, -kInfinity);
  } else {
    mask_rows<uint16_t>(a, begin, end, kBf16NegativeInfinity);
  }
}

}  // namespace

const SamplingTable sampling_table = {argmax, mask};

}  // namespace dk::DK_LEVEL_NAMESPACE
