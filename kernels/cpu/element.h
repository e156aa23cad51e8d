// Rows of activations: floats, or bf16 values that are computed with as floats. Any size, any alignment.
#pragma once

#include "lanes.h"

namespace ts {

inline Lanes load_elements(const float* values) { return load(values); }
inline Lanes load_elements(const bf16* values) { return load_bf16(values); }
inline void store_elements(float* out, Lanes a) { store(out, a); }
inline void store_elements(bf16* out, Lanes a) { store_bf16(out, a); }

// Of `count` elements only, at most 16; zeros for the others.
inline Lanes load_elements(const float* values, int count) {
  return count >= 16 ? load(values) : load_first(values, count);
}
inline Lanes load_elements(const bf16* values, int count) {
  return count >= 16 ? load_bf16(values) : load_first_bf16(values, count);
}
inline void store_elements(float* out, Lanes a, int count) {
  count >= 16 ? store(out, a) : store_first(out, a, count);
}
inline void store_elements(bf16* out, Lanes a, int count) {
  count >= 16 ? store_bf16(out, a) : store_first_bf16(out, a, count);
}

// out = x, converted.
template <typename From, typename To>
void convert_row(const From* x, int size, To* out) {
  for (int i = 0; i < size; i += 16) store_elements(out + i, load_elements(x + i, size - i), size - i);
}

// out = factor x; may be in place.
template <typename Element>
void scale_row(const float* x, float factor, int size, Element* out) {
  for (int i = 0; i < size; i += 16)
    store_elements(out + i, load_elements(x + i, size - i) * broadcast(factor), size - i);
}

// sum += x
template <typename Element>
void add_row(float* sum, const Element* x, int size) {
  for (int i = 0; i < size; i += 16)
    store_elements(sum + i, load_elements(sum + i, size - i) + load_elements(x + i, size - i), size - i);
}

}  // namespace ts
