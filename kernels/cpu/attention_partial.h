// Results of attention over some of the keys, and how two of them become one.
#pragma once

#include "lanes.h"

namespace ts {

// Below every score: where no key is seen.
constexpr float kLowest = -1e30f;

// Rows of the softmax over some keys, not yet divided by its sum: with m the highest score (in powers of
// two), sum = sum of 2^(score - m), values = sum of 2^(score - m) value.
//
// A row that sees none of the keys has {kLowest, 0, zeros}: to merge it changes nothing.
struct Partial {
  float* highest;  // [rows]
  float* sums;     // [rows]
  float* values;   // [rows][dim]
  int dim;         // a multiple of 16

  static size_t row_floats(int dim) { return size_t(dim) + 2; }
  static Partial at(float* memory, int rows, int dim) {
    return {memory, memory + rows, memory + 2 * rows, dim};
  }

  Partial from_row(int row) const { return {highest + row, sums + row, values + size_t(row) * dim, dim}; }
};

inline void clear(const Partial& partial, int rows) {
  for (int row = 0; row < rows; ++row) {
    partial.highest[row] = kLowest;
    partial.sums[row] = 0;
    for (int d = 0; d < partial.dim; d += 16) store(partial.values + size_t(row) * partial.dim + d, zero());
  }
}

// Up to 16 rows of `other` into those of `partial`: both brought to the higher of the two highest scores, and
// added.
inline void merge_sixteen(const Partial& partial, const Partial& other, int rows) {
  const Lanes own_highest = load_first(partial.highest, rows), its_highest = load_first(other.highest, rows);
  const Lanes highest = max(own_highest, its_highest);
  const Lanes own_factors = exp2(own_highest - highest), its_factors = exp2(its_highest - highest);
  store_first(partial.highest, highest, rows);
  const Lanes its_sums = load_first(other.sums, rows) * its_factors;
  store_first(partial.sums, fma(load_first(partial.sums, rows), own_factors, its_sums), rows);
  float own[16], its[16];
  store(own, own_factors);
  store(its, its_factors);
  for (int row = 0; row < rows; ++row) {
    float* values = partial.values + size_t(row) * partial.dim;
    const float* its_values = other.values + size_t(row) * partial.dim;
    for (int d = 0; d < partial.dim; d += 16) {
      store(values + d,
            fma(load(values + d), broadcast(own[row]), load(its_values + d) * broadcast(its[row])));
    }
  }
}

inline void merge(const Partial& partial, const Partial& other, int rows) {
  for (int row = 0; row < rows; row += 16) {
    merge_sixteen(partial.from_row(row), other.from_row(row), rows - row < 16 ? rows - row : 16);
  }
}

}  // namespace ts
