// The next token from one row of logits: temperature, top-k, top-p, min-p, and one uniform draw.
//
// The rules of decode/sampler.py: weights are exp(logit / temperature). Each filter gives a least weight, and every
// token that reaches it stays: top_k the k-th largest, top_p the last of the heaviest that hold that share of what top_k
// left, min_p a share of the largest. The draw goes through the kept tokens in the order of their ids.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "model.hpp"

namespace tf {

// weights[16] = exp2((logit - top) * scale), those below `least` zero; returns their sum.
TF_INLINE float weigh16(const float* logits, float top, float scale, float least, float* weights) {
  vf delta = (load(logits) - top) * scale;
  vf weight = select(delta > splat(-126.0f), exp2(delta), vf{});
  weight = select(weight >= splat(least), weight, vf{});
  store(weights, weight);
  return sum_lanes(weight);
}

// Inverse cumulative distribution: the first token at which the running sum exceeds uniform * total.
inline int32_t draw(const float* logits, int vocab, float top, float scale, float least, double uniform) {
  float weights[16];
  double total = 0, passed = 0;
  for (int i = 0; i < vocab; i += 16) total += double(weigh16(logits + i, top, scale, least, weights));
  const double target = uniform * total;
  int32_t last = 0;
  for (int i = 0; i < vocab; i += 16) {
    const double group = double(weigh16(logits + i, top, scale, least, weights));
    if (group == 0) continue;
    const bool here = passed + group > target;
    double inside = passed;
    for (int lane = 0; lane < 16; lane++) {
      if (weights[lane] == 0.0f) continue;
      last = i + lane;
      inside += double(weights[lane]);
      if (here && inside > target) return last;
    }
    if (here) return last;  // rounding: the lanes one by one add up to a little less than their tree sum
    passed += group;
  }
  return last;
}

// The least weight that passes all filters; 0 when nothing filters. `weights` of all tokens, the largest being 1.
inline float least_kept(std::vector<float> weights, const Sampling& s) {
  float least = s.min_p;
  const bool limits_count = s.top_k > 0 && size_t(s.top_k) < weights.size();
  if (!limits_count && s.top_p >= 1.0f) return least;
  double total = 0;
  if (!limits_count)
    for (float w : weights) total += double(w);
  std::vector<float> heaviest;
  std::make_heap(weights.begin(), weights.end());
  auto pop = [&] {
    std::pop_heap(weights.begin(), weights.end());
    heaviest.push_back(weights.back());
    weights.pop_back();
  };
  if (limits_count) {
    while (heaviest.size() < size_t(s.top_k)) pop();
    while (!weights.empty() && weights.front() == heaviest.back()) pop();
    for (float w : heaviest) total += double(w);
    least = std::max(least, heaviest.back());
  }
  if (s.top_p < 1.0f) {
    double held = 0;
    size_t n = 0;
    do {
      if (n == heaviest.size()) pop();
      held += double(heaviest[n++]);
    } while (held < double(s.top_p) * total && (n < heaviest.size() || !weights.empty()));
    least = std::max(least, heaviest[n - 1]);
  }
  return least;
}

// -1 when no logit is finite or one is not a number. `logits` [vocab rounded up to 16] is changed: banned tokens and
// the padding become -inf.
inline int32_t sample(float* logits, int vocab, const Sampling& s, const int32_t* banned) {
  for (int i = vocab; i % kPanel; i++) logits[i] = -INFINITY;
  for (int i = 0; i < s.num_banned; i++) logits[banned[i]] = -INFINITY;
  const float* best = std::max_element(logits, logits + vocab);
  const float top = *best;
  if (!std::isfinite(top)) return -1;
  if (s.temperature <= 0.0f) return int32_t(best - logits);
  const float scale = 1.4426950408889634f / s.temperature;
  float least = 0.0f;
  if (s.top_k > 0 || s.top_p < 1.0f || s.min_p > 0.0f) {
    std::vector<float> weights((vocab + 15) / 16 * 16);
    for (int i = 0; i < vocab; i += 16) weigh16(logits + i, top, scale, 0.0f, weights.data() + i);
    weights.resize(vocab);
    least = least_kept(std::move(weights), s);
  }
  return draw(logits, vocab, top, scale, least, s.uniform);
}

}  // namespace tf
