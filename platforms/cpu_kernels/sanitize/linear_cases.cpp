// Packed linears: random shapes, strides and skews, every flag, compared with sums in double
// precision.
#include <cmath>
#include <vector>

#include "cases.h"

namespace {

using cases::Buffer;
using cases::Random;

struct Shape {
  int64_t kind, M, N, K, group, flags, outputs, ldw, ldx, ldy;
};

constexpr int64_t kRefinements[] = {0, DK_REFINE, DK_REFINE_MOST};

Shape random_shape(Random& random, int64_t kind) {
  static const int64_t groups[] = {32, 64, 128};
  Shape s{};
  s.kind = kind;
  s.M = random.coin() ? random.between(1, 14) : random.between(1, 300);
  s.N = random.between(1, 150);
  s.K = random.between(1, s.M > 50 ? 200 : 700);
  s.group = kind == DK_INT4 ? groups[random.below(3)] : 0;
  if (random.coin()) s.flags |= DK_GATE_UP;
  if (random.coin()) s.flags |= DK_OUT_F32;
  if (s.flags & DK_GATE_UP) s.N += s.N % 2;
  static const int64_t activations[] = {0, 0, DK_GELU, DK_GELU_TANH, DK_RELU, DK_SILU};
  if (!(s.flags & DK_GATE_UP)) s.flags |= activations[random.below(6)];
  if (kind != DK_BF16) s.flags |= kRefinements[random.below(3)];
  s.outputs = s.flags & DK_GATE_UP ? s.N / 2 : s.N;
  s.ldw = s.K + random.below(3);
  s.ldx = s.K + random.below(5);
  s.ldy = s.outputs + random.below(4);
  return s;
}

double weight_error(int64_t kind) {
  // The scale of int8 is rounded up to bf16: at most 1/128 larger.
  return kind == DK_BF16 ? 0.0 : kind == DK_INT8 ? 0.51 / 127 : 0.5 / 6.9;
}
double activated(double x, int64_t flags) {
  if (flags & DK_GELU) return x / 2 * std::erfc(-x * M_SQRT1_2);
  if (flags & DK_GELU_TANH) {
    return x / 2 * (1 + std::tanh(std::sqrt(M_2_PI) * (x + 0.044715 * x * x * x)));
  }
  if (flags & DK_RELU) return std::fmax(0.0, x);
  return flags & DK_SILU ? x / (1 + std::exp(-x)) : x;
}
double input_error(int64_t kind) { return kind == DK_BF16 ? 0.0 : 0.5 / 127; }

// One sum in double, and the maximum quantization error (x and w are bounded by 1).
double exact_sum(Buffer<uint16_t>& x, Buffer<uint16_t>& w, const Shape& s, int64_t m, int64_t n) {
  double sum = 0;
  for (int64_t k = 0; k < s.K; ++k) {
    const double input = cases::from_bf16(x[m * s.ldx + k]);
    sum += input * cases::from_bf16(w[n * s.ldw + k]);
  }
  return sum;
}

void run_kind(Random& random, int64_t kind) {
  const Shape s = random_shape(random, kind);
  Buffer<uint16_t> w(s.N * s.ldw, random.below(8)), x((s.M - 1) * s.ldx + s.K, random.below(8));
  const int64_t size = (s.M - 1) * s.ldy + s.outputs;
  Buffer<uint16_t> bias(s.N, random.below(8)), residual(size, random.below(8));
  Buffer<char> packed(dk_packed_bytes(kind, s.N, s.K, s.group, s.flags));
  const bool wide = s.flags & DK_OUT_F32, with_bias = random.coin(), with_residual = random.coin();
  Buffer<uint16_t> narrow_y(wide ? 0 : size, random.below(8));
  Buffer<float> wide_y(wide ? size : 0, random.below(8));
  for (auto* buffer : {&w, &x, &bias, &residual}) fill(*buffer, random);

  int64_t nonfinite = -1;
  const dk_pack_linear_args pack{w.data(), packed.data(), &nonfinite, s.N,
                                 s.K,      s.ldw,         s.group,    s.flags & DK_GATE_UP};
  const dk_linear_args args{x.data(),
                            packed.data(),
                            with_bias ? bias.data() : nullptr,
                            with_residual ? residual.data() : nullptr,
                            wide ? static_cast<void*>(wide_y.data()) : narrow_y.data(),
                            s.M,
                            s.N,
                            s.K,
                            s.ldx,
                            s.ldy,
                            s.ldy,
                            s.group,
                            s.flags};
  if (kind == DK_BF16) {
    dk_pack_linear_bf16(&pack);
    dk_linear_bf16(&args);
  } else if (kind == DK_INT8) {
    dk_pack_linear_int8(&pack);
    dk_linear_int8(&args);
  } else {
    dk_pack_linear_int4(&pack);
    dk_linear_int4(&args);
  }
  cases::check(nonfinite == 0, "finite weights were counted as not finite");

  const double moved = s.K * (weight_error(kind) + input_error(kind)) + 0.01;
  for (int64_t turn = 0; turn < 50; ++turn) {
    const int64_t m = random.below(s.M), n = random.below(s.outputs);
    double value = exact_sum(x, w, s, m, n) + (with_bias ? cases::from_bf16(bias[n]) : 0.0);
    double allowed = moved;
    if (s.flags & DK_GATE_UP) {
      const int64_t u = s.outputs + n;
      const double up = exact_sum(x, w, s, m, u) + (with_bias ? cases::from_bf16(bias[u]) : 0.0);
      allowed = moved * (1.1 * fabs(up) + fabs(value) + moved);
      value = value / (1 + exp(-value)) * up;
    } else {
      value = activated(value, s.flags);
      allowed *= 1.2;  // the steepest slope is 1.13
    }
    if (with_residual) value += cases::from_bf16(residual[m * s.ldy + n]);
    const double got = wide ? wide_y[m * s.ldy + n] : cases::from_bf16(narrow_y[m * s.ldy + n]);
    cases::check(fabs(got - value) <= allowed + fabs(value) / 128, "an output of a packed linear");
  }
}

}  // namespace

DK_CASE(linear_bf16) { run_kind(random, DK_BF16); }
DK_CASE(linear_int8) { run_kind(random, DK_INT8); }
DK_CASE(linear_int4) { run_kind(random, DK_INT4); }

DK_CASE(nonfinite_weights) {
  const int64_t N = random.between(1, 70), K = random.between(1, 300);
  Buffer<uint16_t> w(N * K);
  fill(w, random);
  int64_t planted = 0;
  for (int64_t i = 0; i < w.size(); ++i) {
    if (random.below(50)) continue;
    w[i] = random.coin() ? 0x7fc0 : 0xff80;
    ++planted;
  }
  for (int64_t kind = DK_BF16; kind <= DK_INT4; ++kind) {
    Buffer<char> packed(dk_packed_bytes(kind, N, K, 32, 0));
    int64_t found = -1;
    const dk_pack_linear_args args{w.data(), packed.data(), &found, N, K, K, 32, 0};
    (kind == DK_BF16 ? dk_pack_linear_bf16 : kind == DK_INT8 ? dk_pack_linear_int8
                                                             : dk_pack_linear_int4)(&args);
    cases::check(found == planted, "the number of weights that are not finite");
  }
}

// Weights that are rounded to blocks; their values are tested in Python.
DK_CASE(rounded_blocks) {
  static const int64_t kinds[] = {DK_Q4_1, DK_Q4_K, DK_Q6_K};
  const int64_t N = random.between(1, 70), K = 256 * random.between(1, 3), ld = K + random.below(5);
  Buffer<uint16_t> w((N - 1) * ld + K, random.below(8));
  fill(w, random);
  for (const int64_t kind : kinds) {
    Buffer<char> packed(dk_packed_bytes(kind, N, K, 0, 0));
    int64_t found = -1;
    const dk_pack_linear_args args{w.data(), packed.data(), &found, N, K, ld, 0, DK_ROUND, kind};
    dk_pack_linear_blocks(&args);
    cases::check(found == 0, "finite weights were counted as not finite");
  }
}

// Blocks of random bytes, then of zeros; their values are tested in Python.
DK_CASE(linear_blocks) {
  struct Type {
    int64_t kind, values, bytes;
  };
  static const Type types[] = {{DK_Q4_0, 32, 18},   {DK_Q4_1, 32, 20},   {DK_Q5_0, 32, 22},
                               {DK_Q5_1, 32, 24},   {DK_Q8_0, 32, 34},   {DK_Q4_K, 256, 144},
                               {DK_Q5_K, 256, 176}, {DK_Q6_K, 256, 210}};
  const Type type = types[random.below(8)];
  const int64_t M = random.coin() ? random.between(1, 14) : random.between(1, 260);
  const int64_t N = random.between(1, 100), num_blocks = random.between(1, 1792 / type.values);
  const int64_t K = num_blocks * type.values, row = num_blocks * type.bytes;
  const int64_t ld = row + random.below(5);
  Buffer<uint8_t> blocks((N - 1) * ld + row, random.below(8));
  for (int64_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(random.bits());
  Buffer<uint16_t> x(M * K, random.below(8));
  fill(x, random);
  Buffer<float> y(M * N, random.below(8));
  Buffer<char> packed(dk_packed_bytes(type.kind, N, K, 0, 0));
  int64_t nonfinite = -1;
  const dk_pack_linear_args pack{blocks.data(), packed.data(), &nonfinite, N, K,
                                 ld,            0,             0,          type.kind};
  dk_pack_linear_blocks(&pack);
  cases::check(nonfinite >= 0 && nonfinite <= 2 * N * num_blocks, "the number of bad scales");
  const int64_t flags = DK_OUT_F32 | kRefinements[random.below(3)];
  const dk_linear_args args{x.data(), packed.data(), nullptr, nullptr, y.data(), M, N, K, K, N, 0,
                            0,        flags,         type.kind};
  dk_linear_blocks(&args);
  // Nothing of the first blocks may be left in the packed memory.
  memset(blocks.data(), 0, blocks.size());
  dk_pack_linear_blocks(&pack);
  dk_linear_blocks(&args);
  cases::check(nonfinite == 0, "zeros were counted as not finite");
  for (int64_t i = 0; i < y.size(); ++i) cases::check(y[i] == 0.0f, "a product with zeros");
}

DK_CASE_ONCE(memory) {
  const int64_t size = random.between(1, 5 << 20);
  auto* const memory = static_cast<char*>(dk_alloc(size));
  cases::check(memory && reinterpret_cast<uintptr_t>(memory) % (2 << 20) == 0, "alignment");
  memory[0] = memory[size - 1] = 1;
  dk_free(memory, size);
}

DK_CASE(replay) {
  Buffer<char> memory(256 << 10);
  int64_t results[3] = {-1, -1, -1};
  std::vector<dk_probe_read_args> args;
  for (int64_t& result : results) args.push_back({memory.data(), &result, memory.size()});
  std::vector<dk_call> calls;
  for (auto& one : args) {
    calls.push_back({reinterpret_cast<int64_t (*)(const void*)>(dk_probe_read), &one});
  }
  dk_replay(calls.data(), 3);
  for (const int64_t result : results) cases::check(result == 0, "a replayed probe");
}
