// Routers and sums of experts at a level. The order of additions does not depend on the batch.
#include "experts.h"
#include "simd.h"
#include "team.h"

namespace dk::DK_LEVEL_NAMESPACE {
namespace {

constexpr float kInfinity = __builtin_inff();

float sum_of(VF v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Logits of kTokens tokens for up to kRouterExperts experts.
template <int kTokens>
void block_of_logits(const dk_select_experts_args& a, int64_t token, int64_t expert, float* logits,
                     int64_t stride) {
  constexpr int kExperts = kRouterExperts;
  const int64_t left = a.num_experts - expert, experts = left < kExperts ? left : kExperts;
  const uint16_t *x[kTokens], *w[kExperts];
  for (int t = 0; t < kTokens; ++t) {
    x[t] = static_cast<const uint16_t*>(a.x) + (token + t) * a.x_stride;
  }
  for (int e = 0; e < kExperts; ++e) {
    const int64_t row = expert + (e < experts ? e : 0);
    w[e] = static_cast<const uint16_t*>(a.weight) + row * a.weight_stride;
  }
  VF sums[kTokens][kExperts];
  for (auto& row : sums) {
    for (VF& sum : row) sum = zero();
  }
  const auto add_products = [&](auto load_at) {
    VF values[kTokens];
    DK_UNROLL for (int t = 0; t < kTokens; ++t) values[t] = load_at(x[t]);
    DK_UNROLL for (int e = 0; e < kExperts; ++e) {
      const VF weights = load_at(w[e]);
      DK_UNROLL for (int t = 0; t < kTokens; ++t) sums[t][e] = fma(values[t], weights, sums[t][e]);
    }
  };
  int64_t k = 0;
  for (; k + kWidth <= a.size; k += kWidth) {
    add_products([k](const uint16_t* row) { return load_bf16(row + k); });
  }
  if (k < a.size) {
    add_products([k, &a](const uint16_t* row) { return load_bf16_n(row + k, a.size - k); });
  }
  const auto* const bias = static_cast<const uint16_t*>(a.bias);
  for (int t = 0; t < kTokens; ++t) {
    for (int e = 0; e < experts; ++e) {
      const float added = bias ? bf16_to_float(bias[expert + e]) : 0.0f;
      logits[(token + t) * stride + expert + e] = sum_of(sums[t][e]) + added;
    }
  }
}

void compute_logits(const dk_select_experts_args& a, float* logits, int64_t stride, int64_t begin,
                    int64_t end) {
  const int64_t per_token = (a.num_experts + kRouterExperts - 1) / kRouterExperts;
  for (int64_t block = begin; block < end; ++block) {
    const int64_t token = block / per_token * kRouterTokens;
    const int64_t expert = block % per_token * kRouterExperts;
    switch (a.num_tokens - token) {
      case 1: block_of_logits<1>(a, token, expert, logits, stride); break;
      case 2: block_of_logits<2>(a, token, expert, logits, stride); break;
      case 3: block_of_logits<3>(a, token, expert, logits, stride); break;
      default: block_of_logits<kRouterTokens>(a, token, expert, logits, stride); break;
    }
  }
}

bool is_nan(float x) { return x != x; }

// Whether a rank is better. NaN is the best, as in torch.
bool is_better(float a, float b) { return a > b || (is_nan(a) && !is_nan(b)); }

// Replace the logits of a token by scores. The row is padded to vectors.
void score(const dk_select_experts_args& a, float* row) {
  const int64_t n = a.num_experts;
  float most = -kInfinity, doubt = 0.0f;
  for (int64_t e = 0; e < n; ++e) {
    if (is_nan(row[e])) doubt = row[e];
    if (row[e] > most) most = row[e];
  }
  for (int64_t e = n; e % kWidth; ++e) row[e] = -kInfinity;
  if (a.sigmoid) {
    for (int64_t e = 0; e < n; e += kWidth) {
      const VF one = set1(1.0f);
      store(row + e, div(one, add(one, exp(sub(zero(), load(row + e))))));
    }
  } else {
    for (int64_t e = 0; e < n; e += kWidth) store(row + e, exp(sub(load(row + e), set1(most))));
    float sum = 0.0f;
    for (int64_t e = 0; e < n; ++e) sum += row[e];
    for (int64_t e = 0; e < n; ++e) row[e] /= sum;
  }
  for (int64_t e = 0; e < n; ++e) row[e] += doubt;
}

// Mark the experts outside of the best groups as taken. worth: [num_groups], overwritten.
void keep_groups(const dk_select_experts_args& a, const float* ranks, float* worth,
                 uint8_t* taken) {
  const int64_t size = a.num_experts / a.num_groups;
  for (int64_t g = 0; g < a.num_groups; ++g) {
    float best = -kInfinity, second = -kInfinity;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (is_better(ranks[e], best)) {
        second = best;
        best = ranks[e];
      } else if (is_better(ranks[e], second)) {
        second = ranks[e];
      }
    }
    worth[g] = a.correction && size > 1 ? best + second : best;
  }
  for (int64_t g = 0; g < a.num_groups; ++g) {
    int64_t better = 0;
    for (int64_t other = 0; other < a.num_groups; ++other) {
      const bool equal = !is_better(worth[other], worth[g]) && !is_better(worth[g], worth[other]);
      better += is_better(worth[other], worth[g]) || (equal && other < g);
    }
    if (better >= a.top_groups) memset(taken + g * size, 1, size);
  }
}

void select(const dk_select_experts_args& a, float* logits, int64_t stride, int64_t begin,
            int64_t end) {
  const int64_t n = a.num_experts;
  char* const memory = scratch(kRegionScratch, 2 * n * sizeof(float) + n);
  auto* const ranks = reinterpret_cast<float*>(memory);
  float* const worth = ranks + n;
  auto* const taken = reinterpret_cast<uint8_t*>(worth + n);
  for (int64_t t = begin; t < end; ++t) {
    float* const scores = logits + t * stride;
    score(a, scores);
    for (int64_t e = 0; e < n; ++e) ranks[e] = scores[e] + (a.correction ? a.correction[e] : 0.0f);
    memset(taken, 0, n);
    if (a.num_groups > 1) keep_groups(a, ranks, worth, taken);
    int64_t* const experts = a.experts + t * a.top_k;
    float* const weights = a.weights + t * a.top_k;
    float sum = 0.0f;
    for (int64_t k = 0; k < a.top_k; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < n; ++e) {
        if (!taken[e] && (best < 0 || is_better(ranks[e], ranks[best]))) best = e;
      }
      taken[best] = 1;
      experts[k] = best;
      weights[k] = scores[best];
      sum += scores[best];
    }
    for (int64_t k = 0; k < a.top_k; ++k) {
      weights[k] = (a.renormalize ? weights[k] / sum : weights[k]) * a.scale;
    }
  }
}

void add_outputs(const ExpertOutputs& rows, int64_t begin, int64_t end) {
  const dk_experts_args& a = *rows.args;
  const int64_t width = end - begin;
  if (rows.begins) {
    for (int64_t t = 0; t < a.num_tokens; ++t) {
      memset(rows.sums + t * a.size + begin, 0, width * sizeof(float));
    }
  }
  for (int64_t r = 0; r < rows.num_rows; ++r) {
    const int64_t slot = rows.slots[r];
    const float* const from = rows.outputs + r * a.size + begin;
    float* const to = rows.sums + slot / a.top_k * a.size + begin;
    const VF weight = set1(a.weights[slot]);
    int64_t c = 0;
    for (; c + kWidth <= width; c += kWidth) {
      store(to + c, add(load(to + c), mul(weight, load(from + c))));
    }
    for (; c < width; ++c) to[c] += a.weights[slot] * from[c];
  }
  if (!rows.ends) return;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    const float* const from = rows.sums + t * a.size + begin;
    uint16_t* const to = static_cast<uint16_t*>(a.y) + t * a.y_stride + begin;
    int64_t c = 0;
    for (; c + kWidth <= width; c += kWidth) store_bf16(to + c, load(from + c));
    for (; c < width; ++c) to[c] = float_to_bf16(from[c]);
  }
}

}  // namespace

const ExpertTables expert_tables = {compute_logits, select, add_outputs};

}  // namespace dk::DK_LEVEL_NAMESPACE
