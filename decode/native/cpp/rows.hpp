// What happens to one row between the products: norms, rotary embedding, activations, each fused with quantisation.
#pragma once

#include <cmath>

#include "linear.hpp"

namespace tf {

// 1 / root mean square of x[n]; n is a multiple of 16.
TF_INLINE float inverse_rms(const float* x, int n, float eps) {
  vf squares = vf{};
  for (int i = 0; i < n; i += 16) {
    vf v = load(x + i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / float(n) + eps);
}

// RMS norm of x[k] times weight, quantised to `out` (one row).
inline void norm_quantize(const float* x, const float* weight, float eps, const Rows& out) {
  float factor = inverse_rms(x, out.k, eps);
  for (int b = 0; b < out.k / kBlock; b++) {
    const float *xb = x + b * kBlock, *wb = weight + b * kBlock;
    quantize_block(load(xb) * factor * load(wb), load(xb + 16) * factor * load(wb + 16), out, b);
  }
}

// y += RMS norm of x times weight.
inline void norm_add(const float* x, const float* weight, float eps, int n, float* y) {
  float factor = inverse_rms(x, n, eps);
  for (int i = 0; i < n; i += 16) store(y + i, load(y + i) + load(x + i) * factor * load(weight + i));
}

// In place: optional RMS norm with `weight`, then the rotation of the halves by cos, sin [head_dim / 2].
// head_dim / 2 is a multiple of 16. Source: Su et al., "RoFormer", 2021, in the half-split arrangement.
inline void norm_rotate(float* x, int head_dim, const float* weight, float eps, const float* cos, const float* sin) {
  if (weight) {
    float factor = inverse_rms(x, head_dim, eps);
    for (int i = 0; i < head_dim; i += 16) store(x + i, load(x + i) * factor * load(weight + i));
  }
  const int half = head_dim / 2;
  for (int i = 0; i < half; i += 16) {
    vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, fma(a, c, -(b * s)));
    store(x + half + i, fma(b, c, a * s));
  }
}

enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// act(gate) * up. GELU's tanh form is gate * sigmoid(2 u), u = sqrt(2 / pi) (gate + 0.044715 gate^3).
TF_INLINE vf gated(vf gate, vf up, int activation) {
  vf u = gate;
  if (activation == kGeluTanh) u = fma(gate * gate * gate, splat(0.044715f), gate) * 1.5957691216057308f;
  vf sigmoid = 1.0f / (1.0f + exp2(u * -1.4426950408889634f));
  return gate * sigmoid * up;
}

}  // namespace tf
