#include "encoder_attention.h"

#include <algorithm>

#include "element.h"
#include "panel_rows.h"
#include "product.h"

namespace ts {

namespace {

constexpr float kLog2E = 1.442695041f;
constexpr float kLowest = -3.0e38f;

// A matrix of one segment whose memory grows as needed.
Matrix empty_matrix(Format format) {
  Matrix matrix{0, 0, {}, {}};
  matrix.segments.push_back({format, 0, 0, Memory()});
  return matrix;
}

void resize(Matrix& matrix, int rows, int columns) {
  Segment& segment = matrix.segments[0];
  matrix.rows = rows;
  matrix.columns = padded_columns(columns);
  segment.panels = num_panels(rows);
  segment.memory.reserve(size_t(segment.panels) * panel_bytes(segment.format, matrix.columns));
}

uint8_t* panel_of(Matrix& matrix, int index) {
  const Segment& segment = matrix.segments[0];
  return segment.memory.bytes() + size_t(index) * panel_bytes(segment.format, matrix.columns);
}

// 32 columns of a panel's row.
void write_block(Format format, uint8_t* panel, int block, int lane, const float* values) {
  if (format == Format::f32) return write_values(reinterpret_cast<float*>(panel), block, lane, values);
  if (format == Format::split) return write_split_values(reinterpret_cast<bf16*>(panel), block, lane, values);
  bf16 rounded[kColumnMultiple];
  for (int i = 0; i < kColumnMultiple; i += 16) store_bf16(rounded + i, load(values + i));
  write_values(reinterpret_cast<bf16*>(panel), block, lane, rounded);
}

// Two columns of a panel, side by side.
void write_pair(bf16* out, const bf16* even, const bf16* odd) {
  for (int lane = 0; lane < kPanelRows; ++lane) {
    out[2 * lane] = even[lane];
    out[2 * lane + 1] = odd[lane];
  }
}

// Columns `column` and `column` + 1 of all 16 rows of a panel.
void write_columns(Format format, uint8_t* panel, int column, Lanes even, Lanes odd) {
  if (format == Format::f32) {
    float* out = reinterpret_cast<float*>(panel) + size_t(column) * kPanelRows;
    store(out, even);
    store(out + kPanelRows, odd);
    return;
  }
  bf16 parts[2][kPanelRows];
  store_bf16(parts[0], even);
  store_bf16(parts[1], odd);
  bf16* out = reinterpret_cast<bf16*>(panel) + size_t(column) * kPanelRows;
  if (format == Format::bf16) return write_pair(out, parts[0], parts[1]);
  out += size_t(column / kColumnMultiple) * kColumnMultiple * kPanelRows;
  write_pair(out, parts[0], parts[1]);
  store_bf16(parts[0], even - load_bf16(parts[0]));
  store_bf16(parts[1], odd - load_bf16(parts[1]));
  write_pair(out + kColumnMultiple * kPanelRows, parts[0], parts[1]);
}

}  // namespace

EncoderAttention::EncoderAttention(Format format, int head_dim, float scale)
    : head_dim_(head_dim),
      scale_(scale * kLog2E),
      keys_(empty_matrix(format)),
      values_(empty_matrix(format)),
      row_(padded_columns(head_dim)) {}

void EncoderAttention::take(HeadRows keys, HeadRows values, int count) {
  pack_keys(keys, count);
  pack_values(values, count);
  queries_.reserve(keys_, kQueries);
  probabilities_.reserve(values_, kQueries);
  scores_stride_ = size_t(num_panels(count)) * kPanelRows;
  scores_.reserve(kQueries * scores_stride_ * sizeof(float));
}

void EncoderAttention::pack_keys(HeadRows keys, int count) {
  resize(keys_, count, head_dim_);
  for (int key = 0; key < count; ++key) {
    std::copy_n(keys.row(key), head_dim_, row_.data());
    for (int block = 0; block < keys_.columns / kColumnMultiple; ++block)
      write_block(keys_.segments[0].format, panel_of(keys_, key / kPanelRows), block, key % kPanelRows,
                  row_.data() + block * kColumnMultiple);
  }
}

// Columns behind the last are zero: there probabilities are zero, and what was there before could be no number.
void EncoderAttention::pack_values(HeadRows values, int count) {
  resize(values_, head_dim_, count);
  for (int panel = 0; panel < values_.panels(); ++panel) {
    const int first = panel * kPanelRows;
    const auto lanes = [&](int key) {
      return key < count ? load_elements(values.row(key) + first, head_dim_ - first) : zero();
    };
    for (int key = 0; key < values_.columns; key += 2)
      write_columns(values_.segments[0].format, panel_of(values_, panel), key, lanes(key), lanes(key + 1));
  }
}

void EncoderAttention::attend(HeadRows queries, int count, float* out, size_t stride) {
  for (int first = 0; first < count; first += kQueries) {
    const int rows = std::min(kQueries, count - first);
    score({queries.row(first), queries.stride}, rows);
    for (int row = 0; row < rows; ++row) compute_probabilities(row);
    weigh(rows, out + size_t(first) * stride, stride);
  }
}

void EncoderAttention::score(HeadRows queries, int count) {
  for (int row = 0; row < count; ++row) queries_.set_row(row, queries.row(row), head_dim_);
  float* scores = scores_.as<float>();
  multiply(keys_, queries_, {0, count}, {0, keys_.panels()}, scratch_, [&](int row, int panel, Lanes outputs) {
    store(scores + size_t(row) * scores_stride_ + panel * kPanelRows, outputs);
  });
}

// 2^(score - highest), 0 in the padding; their sum lane by lane in the order of the keys.
void EncoderAttention::compute_probabilities(int row) {
  const float* scores = scores_.as<float>() + size_t(row) * scores_stride_;
  const int count = keys_.rows, whole = count / 16 * 16;
  Lanes highest_lanes = broadcast(kLowest);
  for (int i = 0; i < whole; i += 16) highest_lanes = max(highest_lanes, load(scores + i));
  if (whole < count)
    highest_lanes = max(highest_lanes, select_below(count - whole, load(scores + whole), broadcast(kLowest)));
  const Lanes scale = broadcast(scale_), offset = broadcast(-highest(highest_lanes) * scale_);
  Lanes sums = zero();
  for (int i = 0; i < whole; i += 16) {
    const Lanes power = exp2(fma(load(scores + i), scale, offset));
    sums = sums + power;
    probabilities_.set_lanes(row, i, power);
  }
  if (whole < count) {
    const Lanes power = exp2(fma(load(scores + whole), scale, offset));
    const Lanes own = select_below(count - whole, power, zero());
    sums = sums + own;
    probabilities_.set_lanes(row, whole, own);
  }
  for (int i = int(scores_stride_); i < values_.columns; i += 16) probabilities_.set_lanes(row, i, zero());
  sums_[row] = sum(sums);
}

void EncoderAttention::weigh(int count, float* out, size_t stride) {
  multiply(values_, probabilities_, {0, count}, {0, values_.panels()}, scratch_,
           [&](int row, int panel, Lanes outputs) {
             const int first = panel * kPanelRows;
             const Lanes factor = broadcast(1.0f / sums_[row]);
             store_elements(out + size_t(row) * stride + first, outputs * factor, head_dim_ - first);
           });
}

}  // namespace ts
