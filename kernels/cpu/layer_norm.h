// LayerNorm: (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, in fp32.
#pragma once

#include <cmath>

#include "element.h"

namespace ts {

struct LayerNorm {
  const float* weight;
  const float* bias;
  float epsilon;
};

inline float mean(const float* x, int size) {
  Lanes sums = zero();
  for (int i = 0; i < size; i += 16) sums = sums + load_elements(x + i, size - i);
  return sum(sums) / float(size);
}

// mean((x - mean)^2)
inline float variance(const float* x, float mean, int size) {
  Lanes sums = zero();
  for (int i = 0; i < size; i += 16) {
    const int left = size - i;
    const Lanes off = load_elements(x + i, left) - broadcast(mean);
    const Lanes own = left < 16 ? select_below(left, off, zero()) : off;
    sums = fma(own, own, sums);
  }
  return sum(sums) / float(size);
}

// Calls store(i, norm(x)[i .. i + 16)) for each sixteen; those behind the last are 0.
template <typename Store>
void layer_norm(const float* x, const LayerNorm& norm, int size, Store&& store) {
  const float centre = mean(x, size);
  const Lanes scale = broadcast(1.0f / std::sqrt(variance(x, centre, size) + norm.epsilon));
  for (int i = 0; i < size; i += 16) {
    const int left = size - i;
    const Lanes off = (load_elements(x + i, left) - broadcast(centre)) * scale;
    store(i, fma(off, load_elements(norm.weight + i, left), load_elements(norm.bias + i, left)));
  }
}

inline void layer_norm_in_place(float* x, const LayerNorm& norm, int size) {
  layer_norm(x, norm, size, [&](int i, Lanes values) { store_elements(x + i, values, size - i); });
}

}  // namespace ts
