// The next token from one row of logits: adjustments, bans, a mask, temperature, top-k, top-p, min-p, one uniform draw.
//
// Log probabilities are those of the logits as they came. Everything that changes logits does so before temperature.
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

inline float largest(const float* logits, int vocab) {
  vf best = splat(-INFINITY);
  for (int i = 0; i < vocab; i += 16) best = max(best, load(logits + i));
  return max_lanes(best);
}

inline int32_t first_equal(const float* logits, int vocab, float value) {
  for (int i = 0; i < vocab; i++)
    if (logits[i] == value) return i;
  return 0;
}

// By temperature, filters and draw; -1 when no logit is finite.
inline int32_t choose_token(const float* logits, int vocab, const Sampling& s) {
  const float top = largest(logits, vocab);
  if (!std::isfinite(top)) return -1;
  if (s.temperature <= 0.0f) return first_equal(logits, vocab, top);
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

// The k tokens with the largest logits into `tokens`, the largest first, equals by id.
inline void likeliest(const float* logits, int vocab, int k, int32_t* tokens) {
  float values[kMaxLogprobs];
  int held = 0;
  for (int i = 0; i < vocab; i += 16) {
    if (held == k && !(max_lanes(load(logits + i)) > values[k - 1])) continue;
    for (int token = i; token < std::min(i + 16, vocab); token++) {
      if (held == k && !(logits[token] > values[k - 1])) continue;
      int at = held < k ? held++ : k - 1;
      for (; at > 0 && logits[token] > values[at - 1]; at--) values[at] = values[at - 1], tokens[at] = tokens[at - 1];
      values[at] = logits[token], tokens[at] = token;
    }
  }
}

// The logarithm of the sum of exp(logit), where `top` is the largest.
inline double log_sum_exp(const float* logits, int vocab, float top) {
  float weights[16];
  double total = 0;
  for (int i = 0; i < vocab; i += 16) total += double(weigh16(logits + i, top, 1.4426950408889634f, 0.0f, weights));
  return double(top) + std::log(total);
}

// Logits of tokens whose bit is not set become -inf.
inline void apply_mask(float* logits, int vocab, const uint32_t* mask) {
  alignas(64) static constexpr int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi lane = load_i(numbers);
  const vf never = splat(-INFINITY);
  for (int i = 0; i < vocab; i += 16) {
    const int32_t bits = int32_t(mask[i / 32] >> (i % 32) & 0xffff);
    store(logits + i, bits ? select(((splat_i(bits) >> lane) & 1) != 0, load(logits + i), never) : never);
  }
}

// -1 when no logit is finite or one is not a number. `logits` [vocab rounded up to 16] is changed. `out` is filled
// where the row asks for log probabilities.
inline int32_t sample(float* logits, int vocab, const Sampling& s, const Step& step, Logprobs* out) {
  for (int i = vocab; i % kPanel; i++) logits[i] = -INFINITY;
  double total = 0;
  if (s.num_logprobs >= 0) {
    total = log_sum_exp(logits, vocab, largest(logits, vocab));
    const int k = std::min({s.num_logprobs, kMaxLogprobs, vocab});
    if (k > 0) likeliest(logits, vocab, k, out->top_tokens);
    for (int i = 0; i < k; i++) out->top[i] = float(double(logits[out->top_tokens[i]]) - total);
  }
  const int32_t* adjusted = step.adjusted + s.first_adjusted;
  std::vector<float> unchanged(s.num_logprobs >= 0 ? s.num_adjusted : 0);
  for (int i = 0; i < s.num_adjusted; i++) {
    if (adjusted[i] < 0 || adjusted[i] >= vocab) continue;
    if (s.num_logprobs >= 0) unchanged[i] = logits[adjusted[i]];
    logits[adjusted[i]] += step.adjustments[s.first_adjusted + i];
  }
  for (int i = 0; i < s.num_banned; i++) logits[step.banned[s.first_banned + i]] = -INFINITY;
  if (s.mask >= 0) apply_mask(logits, vocab, step.masks + size_t(s.mask) * ((vocab + 31) / 32));
  const int32_t token = choose_token(logits, vocab, s);
  if (s.num_logprobs >= 0 && token >= 0) {
    float logit = logits[token];
    for (int i = 0; i < s.num_adjusted; i++)
      if (adjusted[i] == token) logit = unchanged[i];
    out->chosen = float(double(logit) - total);
  }
  return token;
}

}  // namespace tf
