// Scales and soft caps: random sizes, strides and skews in both types, compared with double.
#include <cmath>
#include <vector>

#include "cases.h"
#include "dovetail_ops.h"

namespace {

using cases::Buffer;
using cases::from_bf16;
using cases::Random;

// Some rows are long enough for several pieces of work.
template <class T>
void run_scale(Random& random, int64_t (*function)(const dk_scale_args*),
               double (*of)(double, double), double (*number)(T)) {
  const int64_t rows = random.between(1, 3), size = random.between(1, 70000);
  const int64_t stride = size + random.below(4);
  Buffer<T> x((rows - 1) * stride + size, random.below(8));
  cases::fill(x, random);
  const std::vector<T> before(x.data(), x.data() + x.size());
  const float factor = static_cast<float>(random.between(1, 40)) / 4;
  const dk_scale_args args{x.data(), rows, size, stride, sizeof(T) == sizeof(float), factor};
  function(&args);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = r * stride + i;
      const double want = of(number(before[at]), factor);
      const bool close = std::fabs(number(x[at]) - want) <= 0.006 * std::fmax(1, std::fabs(want));
      cases::check(close, "a scaled number is wrong");
    }
  }
}
void run_scales(Random& random, int64_t (*function)(const dk_scale_args*),
                double (*of)(double, double)) {
  if (random.coin()) {
    run_scale<float>(random, function, of, [](float x) { return static_cast<double>(x); });
  } else {
    run_scale<uint16_t>(random, function, of, [](uint16_t x) -> double { return from_bf16(x); });
  }
}

}  // namespace

DK_CASE(scale) {
  run_scales(random, dk_scale, [](double x, double factor) { return x * factor; });
}

DK_CASE(soft_cap) {
  run_scales(random, dk_soft_cap, [](double x, double cap) { return cap * std::tanh(x / cap); });
}
