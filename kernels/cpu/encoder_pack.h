// A head's keys and values, packed as the matrices that queries and probabilities are multiplied by.
#pragma once

#include "matrix.h"

namespace ts {

// Heads that lie behind one another in rows [.][stride].
struct HeadRows {
  const float* first;
  size_t stride;

  const float* row(int index) const { return first + size_t(index) * stride; }
};

// One segment of f32, or bf16 or split where the tier has products of them, whose memory grows as needed.
Matrix empty_matrix(Format format);

// [count][head_dim]; rows of the last panel behind the last key are zero.
void pack_keys(Matrix& matrix, HeadRows keys, int count, int head_dim);

// [head_dim][count]; columns behind the last value are zero.
void pack_values(Matrix& matrix, HeadRows values, int count, int head_dim);

}  // namespace ts
