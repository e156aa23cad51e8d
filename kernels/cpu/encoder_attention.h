// Attention within whole texts: every query sees every key of its text.
#pragma once

#include "encoder_pack.h"
#include "operand.h"
#include "product_scratch.h"
#include "thread_pool.h"

namespace ts {

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

  // out [rows][stride] = x W^T; may write up to kQueries rows.
  void product(const Matrix& matrix, const Operand& operand, int rows, float* out, size_t stride);
  void score(HeadRows queries, int count);
  void compute_probabilities(int row);
  float highest_score(const float* scores, int whole, Lanes rest) const;
  void weigh(int count, float* out, size_t stride);
  size_t weighed_stride() const { return size_t(num_panels(head_dim_)) * kPanelRows; }

  const int head_dim_;
  const float scale_;  // to powers of two
  Matrix keys_, values_;
  Operand queries_, probabilities_;
  size_t scores_stride_ = 0;
  Memory scores_;         // [kQueries][scores_stride_]
  Memory weighed_;        // [kQueries][weighed_stride()]
  float sums_[kQueries];  // of probabilities
  ProductScratch scratch_;
};

}  // namespace ts
