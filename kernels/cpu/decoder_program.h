// The decoder program for one type of the activations between products.
#pragma once

#include <algorithm>
#include <climits>

#include "activation.h"
#include "api_handles.h"
#include "decoder.h"
#include "element.h"
#include "highest_logits.h"
#include "norm.h"
#include "phase_times.h"
#include "product.h"
#include "rotary.h"
#include "split.h"

namespace ts {

// Rows of activations, [rows][stride], the stride's surplus zero.
template <typename Element>
struct ActivationRows {
  Memory memory;
  size_t stride = 0;

  void reserve(int rows, size_t new_stride) {
    stride = new_stride;
    memory.reserve(size_t(rows) * stride * sizeof(Element));
  }
  Element* row(int index) const { return memory.as<Element>() + size_t(index) * stride; }
};

// A thread's part in a run: its rows of the step, and what it needs for itself.
struct Turn {
  int member;
  Span rows;
};

// Element: float or bf16. The residual stream is fp32, in the caller's `hidden`.
//
// The phases of a layer, with a barrier behind each:
//
//   norm                      by rows       residual -> attention's input
//   qkv                       by outputs    -> queries, keys and values
//   head norms, rotary, store by rows       turned in place; keys and values into the cache
//   attention                 by cost       -> attended
//   output                    by outputs    added to the residual, or to be normed first
//   norm                      by rows       residual -> the MLP's input
//   gate_up, activation       by outputs    -> inner
//   down                      by outputs    added to the residual, or to be normed first
template <typename Element>
class DecoderProgram final : public Decoder {
 public:
  DecoderProgram(DecoderParts parts, ThreadPool& pool);

  KvShape cache_shape() const override { return cache_.shape; }
  void set_cache(uint8_t* pool) override { cache_.pool = pool; }
  void forward(const Step& step, int num_layers, bool final_norm, float* hidden) override;
  void logits(const float* hidden, const int32_t* rows, int num_rows, float* out,
              int32_t* highest_ids) override;
  void take_times(double* seconds) override { times_.take(seconds); }

 private:
  // The union of what the layers' products of one kind want of their operand.
  Matrix forms_of(const ts_matrix* ts_layer::*matrix) const;
  void prepare(const Step& step);
  void embed(const Turn& turn);
  void run_layer(const Turn& turn, int index);
  void norm_into(Operand& operand, const float* weight, const Turn& turn);
  void set_rows(Operand& operand, const ActivationRows<Element>& source, int count, const Turn& turn);
  void project_qkv(const ts_layer& layer, const Turn& turn);
  void turn_heads(const ts_layer& layer, int index, const Turn& turn);
  void attend(int index, const Turn& turn);
  void add_product(const ts_matrix* matrix, const Operand& operand, const float* post_norm, const Turn& turn);
  void add_normed(const float* post_norm, const Turn& turn);
  template <Activation activation>
  void gate_and_up(const ts_layer& layer, const Turn& turn);
  void finish(const Turn& turn);
  template <typename Epilogue>
  void product(const Matrix& matrix, const Operand& operand, int rows, int member, Epilogue&& epilogue);
  void meet(const Turn& turn, int kind);

  int query_size() const { return shape_.num_heads * shape_.head_dim; }
  int kv_size() const { return shape_.num_kv_heads * shape_.head_dim; }

  const ts_decoder_shape shape_;
  const DecoderParts parts_;
  ThreadPool& pool_;
  KvCache cache_;
  std::vector<AttentionLayer> attention_layers_;
  Attention<Element> attention_;
  RotaryTables rotary_;
  std::vector<int> rotary_of_layer_;
  const Matrix qkv_forms_, output_forms_, gate_up_forms_, down_forms_;

  // Of the step that runs.
  const Step* step_ = nullptr;
  float* residual_ = nullptr;  // [T][hidden_size]
  ActivationRows<Element> projected_, attended_, inner_;
  ActivationRows<float> added_;  // what a post-norm is to see
  Operand qkv_input_, output_input_, gate_up_input_, down_input_, head_input_;

  // By member.
  std::vector<ProductScratch> scratch_;
  std::vector<std::vector<float>> row_scratch_;  // one row of the widest activations
  std::vector<HighestLogits> highest_;
  PhaseTimes times_;
};

template <typename Element>
DecoderProgram<Element>::DecoderProgram(DecoderParts parts, ThreadPool& pool)
    : shape_(parts.shape),
      parts_(std::move(parts)),
      pool_(pool),
      cache_{{KvFormat(shape_.kv_format), shape_.num_kv_heads, shape_.head_dim, shape_.block_size,
              shape_.group_places},
             nullptr},
      attention_(cache_.shape, shape_.num_heads, pool.size()),
      qkv_forms_(forms_of(&ts_layer::qkv)),
      output_forms_(forms_of(&ts_layer::output)),
      gate_up_forms_(forms_of(&ts_layer::gate_up)),
      down_forms_(forms_of(&ts_layer::down)),
      scratch_(pool.size()),
      row_scratch_(pool.size()),
      highest_(pool.size()) {
  for (const ts_layer& layer : parts_.layers) {
    attention_layers_.push_back({layer.place, layer.group, layer.window, shape_.attention_scale});
    rotary_of_layer_.push_back(rotary_.add(layer.rotary_frequencies, shape_.head_dim / 2));
  }
  const int widest = padded_columns(std::max({shape_.hidden_size, shape_.intermediate_size, query_size()}));
  for (std::vector<float>& row : row_scratch_) row.assign(widest, 0.0f);
}

template <typename Element>
Matrix DecoderProgram<Element>::forms_of(const ts_matrix* ts_layer::*matrix) const {
  Matrix forms{0, 0, {}, {}};
  for (const ts_layer& layer : parts_.layers) {
    const Matrix& used = (layer.*matrix)->matrix;
    forms.columns = used.columns;
    for (const Segment& segment : used.segments) forms.segments.push_back({segment.format, 0, 0, Memory()});
  }
  return forms;
}

template <typename Element>
void DecoderProgram<Element>::prepare(const Step& step) {
  const int rows = step.num_tokens;
  projected_.reserve(rows, size_t(num_panels(query_size() + 2 * kv_size())) * kPanelRows);
  attended_.reserve(rows, padded_columns(query_size()));
  inner_.reserve(rows, padded_columns(shape_.intermediate_size));
  added_.reserve(rows, shape_.hidden_size);
  qkv_input_.reserve(qkv_forms_, rows);
  output_input_.reserve(output_forms_, rows);
  output_input_.borrow(attended_.row(0), attended_.stride);
  gate_up_input_.reserve(gate_up_forms_, rows);
  down_input_.reserve(down_forms_, rows);
  down_input_.borrow(inner_.row(0), inner_.stride);
  rotary_.cover(*std::max_element(step.positions, step.positions + rows));
  attention_.plan(step, attention_layers_.data(), int(attention_layers_.size()));
}

template <typename Element>
void DecoderProgram<Element>::forward(const Step& step, int num_layers, bool final_norm, float* hidden) {
  step_ = &step;
  residual_ = hidden;
  times_.begin();
  prepare(step);
  pool_.run([&](int member) {
    const Turn turn{member, share(step.num_tokens, member, pool_.size())};
    embed(turn);
    for (int index = 0; index < num_layers; ++index) run_layer(turn, index);
    if (final_norm) finish(turn);
  });
  times_.end(TS_TIME_NORM);
}

template <typename Element>
void DecoderProgram<Element>::embed(const Turn& turn) {
  for (int row = turn.rows.begin; row < turn.rows.end; ++row) {
    float* out = residual_ + size_t(row) * shape_.hidden_size;
    float* values = row_scratch_[turn.member].data();
    unpack_row(*parts_.embedding, step_->token_ids[row], values);
    scale_row(values, shape_.embedding_scale, shape_.hidden_size, out);
  }
}

template <typename Element>
void DecoderProgram<Element>::run_layer(const Turn& turn, int index) {
  const ts_layer& layer = parts_.layers[index];
  norm_into(qkv_input_, layer.attention_norm, turn);
  meet(turn, TS_TIME_NORM);
  project_qkv(layer, turn);
  meet(turn, TS_TIME_QKV);
  turn_heads(layer, index, turn);
  meet(turn, TS_TIME_ATTENTION);
  attend(index, turn);
  meet(turn, TS_TIME_ATTENTION);
  set_rows(output_input_, attended_, query_size(), turn);
  add_product(layer.output, output_input_, layer.attention_output_norm, turn);
  meet(turn, TS_TIME_OUTPUT);
  add_normed(layer.attention_output_norm, turn);
  norm_into(gate_up_input_, layer.mlp_norm, turn);
  meet(turn, TS_TIME_NORM);
  shape_.activation == TS_SILU ? gate_and_up<Activation::silu>(layer, turn)
                               : gate_and_up<Activation::gelu_tanh>(layer, turn);
  meet(turn, TS_TIME_GATE_UP);
  set_rows(down_input_, inner_, shape_.intermediate_size, turn);
  add_product(layer.down, down_input_, layer.mlp_output_norm, turn);
  meet(turn, TS_TIME_DOWN);
  add_normed(layer.mlp_output_norm, turn);
}

template <typename Element>
void DecoderProgram<Element>::norm_into(Operand& operand, const float* weight, const Turn& turn) {
  const int size = shape_.hidden_size;
  float* values = row_scratch_[turn.member].data();
  for (int row = turn.rows.begin; row < turn.rows.end; ++row) {
    rms_norm(residual_ + size_t(row) * size, weight, shape_.rms_norm_eps, size, values);
    operand.set_row(row, values, size);
  }
}

// Of activations that are not an operand as they lie there.
template <typename Element>
void DecoderProgram<Element>::set_rows(Operand& operand, const ActivationRows<Element>& source, int count,
                                       const Turn& turn) {
  if (!operand.needs_rows()) return;
  for (int row = turn.rows.begin; row < turn.rows.end; ++row) operand.set_row(row, source.row(row), count);
  meet(turn, TS_TIME_NORM);
}

template <typename Element>
void DecoderProgram<Element>::project_qkv(const ts_layer& layer, const Turn& turn) {
  product(layer.qkv->matrix, qkv_input_, step_->num_tokens, turn.member,
          [this](int row, int panel, Lanes outputs) {
            store_elements(projected_.row(row) + panel * kPanelRows, outputs);
          });
}

template <typename Element>
void DecoderProgram<Element>::turn_heads(const ts_layer& layer, int index, const Turn& turn) {
  const RotaryTable& table = rotary_[rotary_of_layer_[index]];
  const int dim = shape_.head_dim;
  for (int row = turn.rows.begin; row < turn.rows.end; ++row) {
    Element *queries = projected_.row(row), *keys = queries + query_size();
    if (layer.query_norm) rms_norm_heads(queries, shape_.num_heads, dim, layer.query_norm, shape_.rms_norm_eps);
    if (layer.key_norm) rms_norm_heads(keys, shape_.num_kv_heads, dim, layer.key_norm, shape_.rms_norm_eps);
    const int position = step_->positions[row];
    rotate_heads(queries, shape_.num_heads + shape_.num_kv_heads, dim, table.cosines(position),
                 table.sines(position));
  }
  const Element* keys = projected_.row(0) + query_size();
  attention_.store(cache_, attention_layers_[index], *step_, turn.rows, keys, keys + kv_size(),
                   projected_.stride);
}

template <typename Element>
void DecoderProgram<Element>::attend(int index, const Turn& turn) {
  attention_.attend(pool_, turn.member, cache_, attention_layers_[index], *step_, projected_.row(0),
                    projected_.stride, attended_.row(0), attended_.stride);
}

template <typename Element>
void DecoderProgram<Element>::add_product(const ts_matrix* matrix, const Operand& operand,
                                          const float* post_norm, const Turn& turn) {
  const int size = shape_.hidden_size;
  const auto add = [this, size](int row, int panel, Lanes outputs) {
    const int column = panel * kPanelRows, left = size - column;
    float* sum = residual_ + size_t(row) * size + column;
    store_elements(sum, load_elements(sum, left) + outputs, left);
  };
  const auto keep = [this, size](int row, int panel, Lanes outputs) {
    const int column = panel * kPanelRows;
    store_elements(added_.row(row) + column, outputs, size - column);
  };
  if (post_norm)
    product(matrix->matrix, operand, step_->num_tokens, turn.member, keep);
  else
    product(matrix->matrix, operand, step_->num_tokens, turn.member, add);
}

// Where there is a post-norm, add what it makes of the last product.
template <typename Element>
void DecoderProgram<Element>::add_normed(const float* post_norm, const Turn& turn) {
  if (!post_norm) return;
  const int size = shape_.hidden_size;
  for (int row = turn.rows.begin; row < turn.rows.end; ++row)
    add_rms_norm(residual_ + size_t(row) * size, added_.row(row), post_norm, shape_.rms_norm_eps, size);
}

template <typename Element>
template <Activation activation>
void DecoderProgram<Element>::gate_and_up(const ts_layer& layer, const Turn& turn) {
  product(layer.gate_up->matrix, gate_up_input_, step_->num_tokens, turn.member,
          [this](int row, int panel, auto... gate_up) -> void {
            store_gated<activation>(inner_.row(row) + panel * (kPanelRows / 2), gate_up...);
          });
}

template <typename Element>
void DecoderProgram<Element>::finish(const Turn& turn) {
  const int size = shape_.hidden_size;
  for (int row = turn.rows.begin; row < turn.rows.end; ++row) {
    float* x = residual_ + size_t(row) * size;
    rms_norm(x, parts_.final_norm, shape_.rms_norm_eps, size, x);
  }
}

template <typename Element>
void DecoderProgram<Element>::logits(const float* hidden, const int32_t* rows, int num_rows, float* out,
                                     int32_t* highest_ids) {
  const Matrix& head = *parts_.head;
  const int vocabulary = shape_.vocab_size;
  const float cap = shape_.logit_softcap;
  times_.begin();
  head_input_.reserve(head, num_rows);
  pool_.run([&](int member) {
    const Span own = share(num_rows, member, pool_.size());
    for (int row = own.begin; row < own.end; ++row)
      head_input_.set_row(row, hidden + size_t(rows[row]) * shape_.hidden_size, shape_.hidden_size);
    HighestLogits& highest = highest_[member];
    highest.begin(num_rows);
    pool_.barrier();
    product(head, head_input_, num_rows, member, [&](int row, int panel, Lanes logits) {
      const int id = panel * kPanelRows, left = vocabulary - id;
      if (cap > 0) logits = tanh(logits / broadcast(cap)) * broadcast(cap);
      if (out) store_elements(out + size_t(row) * vocabulary + id, logits, left);
      if (highest_ids) highest.see(row, id, logits, left);
    });
  });
  for (int row = 0; highest_ids && row < num_rows; ++row)
    highest_ids[row] = HighestLogits::merged(highest_, row);
  times_.end(TS_TIME_HEAD);
}

template <typename Element>
template <typename Epilogue>
void DecoderProgram<Element>::product(const Matrix& matrix, const Operand& operand, int rows, int member,
                                      Epilogue&& epilogue) {
  const Split own = split(rows, matrix.panels(), member, pool_.size());
  multiply(matrix, operand, own.rows, own.panels, scratch_[member], epilogue);
}

template <typename Element>
void DecoderProgram<Element>::meet(const Turn& turn, int kind) {
  pool_.barrier();
  if (turn.member == 0) times_.end(kind);
}

}  // namespace ts
