// Products of heads at a level. Weights are not packed, and have one of two layouts.
//
// Rows of inputs (inputs_first): a vector of outputs is the sum of rows times one input each, in
// the order of the inputs. Rows of outputs: an output is the sum of the lanes of one vector of
// products, in the order of the lanes. Neither depends on the number of tokens.
#include "head_linear.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr int kTokens = 4;   // tokens that are computed together
constexpr int kOutputs = 4;  // rows of outputs that are computed together
constexpr int kVectors = DK_LEVEL >= 2 ? 4 : 2;  // of outputs, for rows of inputs
constexpr int64_t kColumns = 64;
static_assert(kColumns % (kVectors * kWidth) == 0 && kColumns % kOutputs == 0);

int64_t padded(int64_t size) { return (size + kWidth - 1) / kWidth * kWidth; }

int64_t scratch_floats(const dk_head_linear_args& a) { return kTokens * padded(a.num_inputs); }

// Store the inputs of `count` tokens as floats, with zeros behind each.
void widen(const dk_head_linear_args& a, int64_t head, int64_t token, int64_t count, float* out) {
  for (int64_t t = 0; t < count; ++t) {
    const auto* const x = static_cast<const uint16_t*>(a.x) + (token + t) * a.x_stride +
                          head * a.x_head_stride;
    float* const row = out + t * padded(a.num_inputs);
    for (int64_t i = 0; i < a.num_inputs; i += kWidth) {
      store(row + i, load_bf16_n(x + i, a.num_inputs - i));
    }
  }
}

uint16_t* result(const dk_head_linear_args& a, int64_t head, int64_t token) {
  return static_cast<uint16_t*>(a.y) + token * a.y_stride + head * a.y_head_stride;
}

template <int kCount>
void add_rows(const dk_head_linear_args& a, int64_t head, int64_t first, int64_t token,
              const float* x) {
  const int64_t stride = padded(a.num_inputs);
  const auto* const weight =
      static_cast<const uint16_t*>(a.weight) + head * a.weight_head_stride;
  const int64_t end = first + kColumns < a.num_outputs ? first + kColumns : a.num_outputs;
  for (int64_t o = first; o < end; o += kVectors * kWidth) {
    VF sums[kCount][kVectors];
    DK_UNROLL for (int t = 0; t < kCount; ++t) {
      DK_UNROLL for (int j = 0; j < kVectors; ++j) sums[t][j] = zero();
    }
    for (int64_t i = 0; i < a.num_inputs; ++i) {
      const uint16_t* const row = weight + i * a.weight_stride + o;
      DK_UNROLL for (int j = 0; j < kVectors; ++j) {
        const int64_t left = end - o - j * kWidth;
        if (left <= 0) continue;
        const VF w = load_bf16_n(row + j * kWidth, left);
        DK_UNROLL for (int t = 0; t < kCount; ++t) {
          sums[t][j] = fma(set1(x[t * stride + i]), w, sums[t][j]);
        }
      }
    }
    DK_UNROLL for (int t = 0; t < kCount; ++t) {
      uint16_t* const y = result(a, head, token + t) + o;
      DK_UNROLL for (int j = 0; j < kVectors; ++j) {
        const int64_t left = end - o - j * kWidth;
        if (left > 0) store_bf16_n(y + j * kWidth, sums[t][j], left);
      }
    }
  }
}

template <int kCount>
void dot_rows(const dk_head_linear_args& a, int64_t head, int64_t first, int64_t token,
              const float* x) {
  const int64_t stride = padded(a.num_inputs);
  const auto* const weight =
      static_cast<const uint16_t*>(a.weight) + head * a.weight_head_stride;
  const int64_t end = first + kColumns < a.num_outputs ? first + kColumns : a.num_outputs;
  for (int64_t o = first; o < end; o += kOutputs) {
    const int64_t num_rows = end - o < kOutputs ? end - o : kOutputs;
    const uint16_t* rows[kOutputs];
    for (int64_t r = 0; r < kOutputs; ++r) {  // a missing row is computed as the last one
      rows[r] = weight + (o + (r < num_rows ? r : num_rows - 1)) * a.weight_stride;
    }
    VF sums[kCount][kOutputs];
    DK_UNROLL for (int t = 0; t < kCount; ++t) {
      DK_UNROLL for (int r = 0; r < kOutputs; ++r) sums[t][r] = zero();
    }
    for (int64_t i = 0; i < a.num_inputs; i += kWidth) {
      VF w[kOutputs];
      DK_UNROLL for (int r = 0; r < kOutputs; ++r) {
        w[r] = load_bf16_n(rows[r] + i, a.num_inputs - i);
      }
      DK_UNROLL for (int t = 0; t < kCount; ++t) {
        const VF v = load(x + t * stride + i);
        DK_UNROLL for (int r = 0; r < kOutputs; ++r) sums[t][r] = fma(v, w[r], sums[t][r]);
      }
    }
    for (int t = 0; t < kCount; ++t) {
      uint16_t* const y = result(a, head, token + t) + o;
      for (int64_t r = 0; r < num_rows; ++r) {
        float lanes[kWidth], sum = 0;
        store(lanes, sums[t][r]);
        for (int i = 0; i < kWidth; ++i) sum += lanes[i];
        y[r] = float_to_bf16(sum);
      }
    }
  }
}

template <int kCount>
void multiply_tokens(const dk_head_linear_args& a, int64_t head, int64_t first, int64_t token,
                     const float* x) {
  a.inputs_first ? add_rows<kCount>(a, head, first, token, x)
                 : dot_rows<kCount>(a, head, first, token, x);
}

void multiply(const dk_head_linear_args& a, int64_t head, int64_t first, float* scratch) {
  for (int64_t token = 0; token < a.num_tokens; token += kTokens) {
    const int64_t count = a.num_tokens - token < kTokens ? a.num_tokens - token : kTokens;
    widen(a, head, token, count, scratch);
    switch (count) {
      case 1: multiply_tokens<1>(a, head, first, token, scratch); break;
      case 2: multiply_tokens<2>(a, head, first, token, scratch); break;
      case 3: multiply_tokens<3>(a, head, first, token, scratch); break;
      default: multiply_tokens<kTokens>(a, head, first, token, scratch);
    }
  }
}

}  // namespace

const HeadLinearTable head_linear_table = {kColumns, scratch_floats, multiply};

}  // namespace dk::DK_LEVEL_NAMESPACE
