// A transformer's encoder: what all layers do with whole texts, phase by phase, in all threads together.
#pragma once

#include <vector>

#include "api_handles.h"
#include "encoder_attention.h"
#include "encoder_plan.h"
#include "layer_norm.h"
#include "phase_times.h"
#include "split.h"

namespace ts {

struct EncoderParts {
  ts_encoder_shape shape;
  std::vector<ts_encoder_layer> layers;
  const float* final_norm;  // null if there is none
  const float* final_norm_bias;
};

// Norms before each product and once at the end (Whisper), or behind each sum (BERT); activations between products
// are fp32, or rounded to bf16 by products of bf16 weights.
//
// The phases of a layer, of a block of rows at a time but for attention, which sees whole texts; with a
// barrier behind each:
//
//   norm, if before   by rows       residual -> the product's input
//   qkv               by outputs    -> queries, keys and values
//   attention         by cost       -> attended
//   output            by outputs    added to the residual
//   norm              by rows       residual -> the MLP's input (norms behind: and in its place)
//   up, activation    by outputs    -> inner
//   down              by outputs    added to the residual
//   norm, if behind   by rows       residual, in place
//
// Does not own what it refers to: the pool, the matrices and the vectors outlive it.
class Encoder {
 public:
  Encoder(EncoderParts parts, ThreadPool& pool);

  // hidden: [T][hidden_size], embeddings, then what comes out of the last layer (and norm). starts: [num_texts + 1],
  // the texts' first rows, and T.
  void forward(const int32_t* starts, int num_texts, float* hidden);

  void take_times(double* seconds) { times_.take(seconds); }

 private:
  // What a thread works on: rows of the step, which begin at row 0 of the operands.
  struct Turn {
    int member;
    Span block;
    int rows() const { return block.end - block.begin; }
  };

  Span own_rows(const Turn& turn) const;
  Split part_of(const Turn& turn, int panels) const;
  // A phase that makes a product's input of a row: function(operand's row, the row's residual).
  template <typename Function>
  void each_row(const Turn& turn, Function&& function);
  template <typename Function>
  void each_block(int member, Function&& function);
  template <typename Epilogue>
  void product(const ts_matrix* matrix, const Operand& operand, const Turn& turn, Epilogue&& epilogue);

  void prepare(int rows);
  void run_layer(const ts_encoder_layer& layer, int member);
  void project(const ts_encoder_layer& layer, const Turn& turn);
  void attend(int member);
  void finish_layer(const ts_encoder_layer& layer, const Turn& turn);
  void add_product(const ts_matrix* matrix, const Operand& operand, const Turn& turn);
  void up(const ts_encoder_layer& layer, const Turn& turn);
  template <typename Activate>
  void up_by(const ts_encoder_layer& layer, const Turn& turn, Activate&& activate);
  void norm_in_place(const LayerNorm& norm, const Turn& turn);
  void meet(const Turn& turn, int kind);

  LayerNorm attention_norm(const ts_encoder_layer& layer) const {
    return {layer.attention_norm, layer.attention_norm_bias, shape_.norm_eps};
  }
  LayerNorm mlp_norm(const ts_encoder_layer& layer) const {
    return {layer.mlp_norm, layer.mlp_norm_bias, shape_.norm_eps};
  }
  float* residual(int row) const { return residual_ + size_t(row) * shape_.hidden_size; }
  int head_dim() const { return shape_.hidden_size / shape_.num_heads; }

  const ts_encoder_shape shape_;
  const EncoderParts parts_;
  ThreadPool& pool_;
  const int block_rows_;

  // Of the step that runs.
  int rows_ = 0;
  float* residual_ = nullptr;     // [T][hidden_size]
  size_t projected_stride_ = 0;
  Memory projected_, attended_;   // [T][projected_stride_] of queries, keys, values; [T][hidden_size]
  Operand qkv_input_, output_input_, up_input_, down_input_;
  EncoderPlan plan_;

  // By member.
  std::vector<ProductScratch> scratch_;
  std::vector<EncoderAttention> attention_;
  PhaseTimes times_;
};

}  // namespace ts
