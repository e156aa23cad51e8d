#include "encoder.h"

#include <algorithm>
#include <cmath>

#include "encoder_activation.h"
#include "product.h"

namespace ts {

namespace {

// A thread's rows of a block: as many as its caches hold the activations of, and enough to read weights for.
constexpr int kRowsPerThread = 128;
// From so many on each thread has rows of its own.
constexpr int kOwnRows = 64;
constexpr int kRowTile = 32;

// What attention's products take: the weights' own format, if this tier has a product for it.
Format attention_format(const Matrix& weights) {
  const Format format = weights.segments[0].format;
  return operand_kind(format) == OperandKind::f32 ? Format::f32 : format;
}

}  // namespace

Encoder::Encoder(EncoderParts parts, ThreadPool& pool)
    : shape_(parts.shape),
      parts_(std::move(parts)),
      pool_(pool),
      block_rows_(kRowsPerThread * pool.size()),
      scratch_(pool.size()) {
  const Format format = attention_format(parts_.layers[0].qkv->matrix);
  const float scale = 1.0f / std::sqrt(float(head_dim()));
  for (int member = 0; member < pool.size(); ++member) attention_.emplace_back(format, head_dim(), scale);
}

void Encoder::prepare(int rows) {
  rows_ = rows;
  const int block = std::min(rows, block_rows_);
  const ts_encoder_layer& layer = parts_.layers[0];
  projected_stride_ = size_t(num_panels(3 * shape_.hidden_size)) * kPanelRows;
  projected_.reserve(rows * projected_stride_ * sizeof(float));
  attended_.reserve(size_t(rows) * shape_.hidden_size * sizeof(float));
  qkv_input_.reserve(layer.qkv->matrix, block);
  output_input_.reserve(layer.output->matrix, block);
  up_input_.reserve(layer.up->matrix, block);
  down_input_.reserve(layer.down->matrix, block);
}

void Encoder::forward(const int32_t* starts, int num_texts, float* hidden) {
  times_.begin();
  prepare(starts[num_texts]);
  plan_.make(starts, num_texts, shape_.num_heads);
  residual_ = hidden;
  pool_.run([&](int member) {
    for (const ts_encoder_layer& layer : parts_.layers) run_layer(layer, member);
    if (parts_.final_norm != nullptr)
      norm_in_place({parts_.final_norm, parts_.final_norm_bias, shape_.norm_eps}, {member, {0, rows_}});
  });
  times_.end(TS_TIME_NORM);
}

void Encoder::run_layer(const ts_encoder_layer& layer, int member) {
  each_block(member, [&](const Turn& turn) { project(layer, turn); });
  attend(member);
  each_block(member, [&](const Turn& turn) { finish_layer(layer, turn); });
}

template <typename Function>
void Encoder::each_block(int member, Function&& function) {
  for (int row = 0; row < rows_; row += block_rows_)
    function(Turn{member, {row, std::min(row + block_rows_, rows_)}});
}

// In whole tiles.
Span Encoder::own_rows(const Turn& turn) const {
  const Span tiles = share((turn.rows() + kRowTile - 1) / kRowTile, turn.member, pool_.size());
  return {std::min(tiles.begin * kRowTile, turn.rows()), std::min(tiles.end * kRowTile, turn.rows())};
}

// Rows of their own spare the threads each other's activations, which would come from the other's cache.
Split Encoder::part_of(const Turn& turn, int panels) const {
  if (turn.rows() < kOwnRows * pool_.size()) return split(turn.rows(), panels, turn.member, pool_.size());
  return {own_rows(turn), {0, panels}};
}

template <typename Function>
void Encoder::each_row(const Turn& turn, Function&& function) {
  const Span own = own_rows(turn);
  for (int row = own.begin; row < own.end; ++row) function(row, residual(turn.block.begin + row));
}

template <typename Epilogue>
void Encoder::product(const ts_matrix* matrix, const Operand& operand, const Turn& turn, Epilogue&& epilogue) {
  const Matrix& m = matrix->matrix;
  const Split part = part_of(turn, m.panels());
  multiply(m, operand, part.rows, part.panels, scratch_[turn.member], std::forward<Epilogue>(epilogue));
}

void Encoder::project(const ts_encoder_layer& layer, const Turn& turn) {
  each_row(turn, [&](int row, const float* x) {
    if (!shape_.pre_norm) return qkv_input_.set_row(row, x, shape_.hidden_size);
    const RowOfLanes input = qkv_input_.lanes_of(row);
    layer_norm(x, attention_norm(layer), shape_.hidden_size,
               [&](int column, Lanes values) { input.set(column, values); });
  });
  meet(turn, TS_TIME_NORM);
  float* projected = projected_.as<float>() + size_t(turn.block.begin) * projected_stride_;
  product(layer.qkv, qkv_input_, turn, [&](int row, int panel, Lanes outputs) {
    store(projected + size_t(row) * projected_stride_ + panel * kPanelRows, outputs);
  });
  meet(turn, TS_TIME_QKV);
}

void Encoder::attend(int member) {
  EncoderAttention& attention = attention_[member];
  const float* projected = projected_.as<float>();
  const Span tasks = plan_.share(member, pool_.size());
  for (int index = tasks.begin; index < tasks.end; ++index) {
    const EncoderTask& task = plan_[index];
    const auto heads = [&](int part, int row) {
      return HeadRows{projected + size_t(row) * projected_stride_ + part * shape_.hidden_size + task.head * head_dim(),
                      projected_stride_};
    };
    const bool begins = task.queries.begin == task.text.begin || index == tasks.begin;
    if (begins) attention.take(heads(1, task.text.begin), heads(2, task.text.begin), task.text.end - task.text.begin);
    float* out = attended_.as<float>() + size_t(task.queries.begin) * shape_.hidden_size + task.head * head_dim();
    attention.attend(heads(0, task.queries.begin), task.queries.end - task.queries.begin, out, shape_.hidden_size);
  }
  meet({member, {0, rows_}}, TS_TIME_ATTENTION);
}

void Encoder::finish_layer(const ts_encoder_layer& layer, const Turn& turn) {
  const int size = shape_.hidden_size;
  const float* attended = attended_.as<float>() + size_t(turn.block.begin) * size;
  each_row(turn, [&](int row, float*) { output_input_.set_row(row, attended + size_t(row) * size, size); });
  meet(turn, TS_TIME_NORM);
  add_product(layer.output, output_input_, turn);
  meet(turn, TS_TIME_OUTPUT);
  const LayerNorm norm = shape_.pre_norm ? mlp_norm(layer) : attention_norm(layer);
  each_row(turn, [&](int row, float* x) {
    const RowOfLanes input = up_input_.lanes_of(row);
    layer_norm(x, norm, size, [&](int column, Lanes values) {
      if (!shape_.pre_norm) store_elements(x + column, values, size - column);
      input.set(column, values);
    });
  });
  meet(turn, TS_TIME_NORM);
  up(layer, turn);
  meet(turn, TS_TIME_GATE_UP);
  add_product(layer.down, down_input_, turn);
  meet(turn, TS_TIME_DOWN);
  if (!shape_.pre_norm) norm_in_place(mlp_norm(layer), turn);
}

void Encoder::add_product(const ts_matrix* matrix, const Operand& operand, const Turn& turn) {
  product(matrix, operand, turn, [&](int row, int panel, Lanes outputs) {
    const int column = panel * kPanelRows, left = shape_.hidden_size - column;
    float* sum = residual(turn.block.begin + row) + column;
    store_elements(sum, load_elements(sum, left) + outputs, left);
  });
}

void Encoder::up(const ts_encoder_layer& layer, const Turn& turn) {
  switch (shape_.activation) {
    case TS_GELU: return up_by(layer, turn, [](Lanes x) { return gelu(x); });
    case TS_RELU: return up_by(layer, turn, [](Lanes x) { return relu(x); });
    default: return up_by(layer, turn, [](Lanes x) { return gelu_tanh(x); });
  }
}

template <typename Activate>
void Encoder::up_by(const ts_encoder_layer& layer, const Turn& turn, Activate&& activate) {
  product(layer.up, up_input_, turn, [&](int row, int panel, Lanes outputs) {
    down_input_.lanes_of(row).set(panel * kPanelRows, activate(outputs));
  });
}

// The same thread has the same rows of a block when the next layer begins: no barrier.
void Encoder::norm_in_place(const LayerNorm& norm, const Turn& turn) {
  each_row(turn, [&](int, float* x) { layer_norm_in_place(x, norm, shape_.hidden_size); });
}

void Encoder::meet(const Turn& turn, int kind) {
  pool_.barrier();
  if (turn.member == 0) times_.end(kind);
}

}  // namespace ts
