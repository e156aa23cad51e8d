// Attention within whole texts: every query sees every key of its text.
#pragma once

#include <vector>

#include "operand.h"
#include "product_scratch.h"
#include "thread_pool.h"

namespace ts {

// Heads that lie behind one another in rows [.][stride].
struct HeadRows {
  const float* first;
  size_t stride;

  const float* row(int index) const { return first + size_t(index) * stride; }
};

// A thread's: the keys and values of one head of one text, packed as products take them, and what queries need.
//
// A tile of queries is multiplied by all keys, and the probabilities by all values: each sum goes over the text's
// tokens in order, so that a text's results depend on nothing but the text.
class EncoderAttention {
 public:
  // format: f32, bf16 or split; of keys, values, queries and probabilities in products.
  EncoderAttention(Format format, int head_dim, float scale);

  // Have these keys and values, of `count` tokens.
  void take(HeadRows keys, HeadRows values, int count);

  // out [count][stride] = softmax(scale q K^T) V for `count` queries.
  void attend(HeadRows queries, int count, float* out, size_t stride);

 private:
  static constexpr int kQueries = 32;

  void pack_keys(HeadRows keys, int count);
  void pack_values(HeadRows values, int count);
  void score(HeadRows queries, int count);
  void compute_probabilities(int row);
  void weigh(int count, float* out, size_t stride);

  const int head_dim_;
  const float scale_;  // to powers of two
  Matrix keys_, values_;
  Operand queries_, probabilities_;
  size_t scores_stride_ = 0;
  Memory scores_;           // [kQueries][scores_stride_]
  float sums_[kQueries];    // of probabilities
  std::vector<float> row_;  // [head_dim], padded
  ProductScratch scratch_;
};

}  // namespace ts
