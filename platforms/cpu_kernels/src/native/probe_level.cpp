// The limits of the machine at this level: memory bandwidth, and multiplication in registers.
#include "probe.h"
#include "simd.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

int64_t read_memory(const char* memory, int64_t num_bytes) {
  VI sums[4] = {zero_int(), zero_int(), zero_int(), zero_int()};
  constexpr int64_t kStep = 4 * kWidth * 4;
  for (const char *at = memory, *end = memory + num_bytes; at + kStep <= end; at += kStep) {
    DK_UNROLL for (int i = 0; i < 4; ++i) {
      sums[i] = add_int(sums[i], load_int(reinterpret_cast<const int32_t*>(at) + i * kWidth));
    }
  }
  int32_t values[kWidth];
  store_int(values, add_int(add_int(sums[0], sums[1]), add_int(sums[2], sums[3])));
  return values[0];
}

// 12 independent sums or more hide the latency of the instruction.
constexpr int kSums = DK_LEVEL >= 2 ? 16 : 12;

int64_t multiply_floats(int64_t iterations) {
  VF sums[kSums], a = set1(0.5f), b = set1(0.25f);
  DK_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = zero();
  DK_IN_REGISTER(a);
  DK_IN_REGISTER(b);
  for (int64_t n = 0; n < iterations; ++n) {
    DK_UNROLL for (int i = 0; i < kSums; ++i) {
#if DK_LEVEL >= 3
      sums[i] = _mm512_dpbf16_ps(sums[i], (__m512bh)a, (__m512bh)b);
#else
      sums[i] = fma(a, b, sums[i]);
#endif
    }
    DK_UNROLL for (int i = 0; i < kSums; ++i) DK_IN_REGISTER(sums[i]);
  }
  DK_UNROLL for (int i = 1; i < kSums; ++i) sums[0] = add(sums[0], sums[i]);
  float values[kWidth];
  store(values, sums[0]);
  constexpr int64_t kPairs = DK_LEVEL >= 3 ? 2 : 1;
  return iterations * kSums * kWidth * kPairs * 2 + (values[0] < 0);
}

int64_t multiply_bytes_alone(int64_t iterations) {
#if DK_LEVEL == 0
  return multiply_floats(iterations);
#else
  VI sums[kSums], a = set1_int(0x01010101), b = set1_int(0x02020202);
  DK_UNROLL for (int i = 0; i < kSums; ++i) sums[i] = zero_int();
  DK_IN_REGISTER(a);
  DK_IN_REGISTER(b);
  for (int64_t n = 0; n < iterations; ++n) {
    DK_UNROLL for (int i = 0; i < kSums; ++i) {
#if DK_LEVEL >= 3
      sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
#else
      sums[i] = add_int(sums[i], multiply_pairs(a, b));
#endif
    }
    DK_UNROLL for (int i = 0; i < kSums; ++i) DK_IN_REGISTER(sums[i]);
  }
  DK_UNROLL for (int i = 1; i < kSums; ++i) sums[0] = add_int(sums[0], sums[i]);
  int32_t values[kWidth];
  store_int(values, sums[0]);
  constexpr int64_t kProducts = DK_LEVEL >= 3 ? 4 : 2;
  return iterations * kSums * kWidth * kProducts * 2 + (values[0] == 1);
#endif
}

}  // namespace

const ProbeKernels probe = {read_memory, multiply_floats, multiply_bytes_alone};

}  // namespace dk::DK_LEVEL_NAMESPACE
