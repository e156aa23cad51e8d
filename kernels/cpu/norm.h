// RMSNorm: x / sqrt(mean(x^2) + epsilon) * weight, in fp32. Weights are fp32, with the model's offset added.
#pragma once

#include <cmath>

#include "element.h"

namespace ts {

// 1 / sqrt(mean(x^2) + epsilon)
template <typename Element>
float inverse_rms(const Element* x, int size, float epsilon) {
  Lanes even = zero(), odd = zero();
  int i = 0;
  for (; i + 32 <= size; i += 32) {
    const Lanes a = load_elements(x + i), b = load_elements(x + i + 16);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < size; i += 16) {
    const Lanes a = load_elements(x + i, size - i);
    even = fma(a, a, even);
  }
  return 1.0f / std::sqrt(sum(even + odd) / float(size) + epsilon);
}

// out = norm(x); may be in place.
template <typename From, typename To>
void rms_norm(const From* x, const float* weight, float epsilon, int size, To* out) {
  const Lanes scale = broadcast(inverse_rms(x, size, epsilon));
  for (int i = 0; i < size; i += 16) {
    const int left = size - i;
    store_elements(out + i, load_elements(x + i, left) * scale * load_elements(weight + i, left), left);
  }
}

// sum += norm(x): a residual stream behind a product whose result is normed.
template <typename Element>
void add_rms_norm(float* sum, const Element* x, const float* weight, float epsilon, int size) {
  const Lanes scale = broadcast(inverse_rms(x, size, epsilon));
  for (int i = 0; i < size; i += 16) {
    const int left = size - i;
    const Lanes normed = load_elements(x + i, left) * scale * load_elements(weight + i, left);
    store_elements(sum + i, load_elements(sum + i, left) + normed, left);
  }
}

// Each of `num_heads` heads that lie behind one another, in place; weight: [head_dim].
template <typename Element>
void rms_norm_heads(Element* heads, int num_heads, int head_dim, const float* weight, float epsilon) {
  for (int head = 0; head < num_heads; ++head) {
    Element* x = heads + head * head_dim;
    rms_norm(x, weight, epsilon, head_dim, x);
  }
}

}  // namespace ts
