#include "encoder_attention.h"

#include <algorithm>

#include "element.h"
#include "product.h"

namespace ts {

namespace {

constexpr float kLog2E = 1.442695041f;
constexpr float kLowest = -3.0e38f;

}  // namespace

EncoderAttention::EncoderAttention(Format format, int head_dim, float scale)
    : head_dim_(head_dim),
      scale_(scale * kLog2E),
      keys_(empty_matrix(format)),
      values_(empty_matrix(format)) {}

void EncoderAttention::take(HeadRows keys, HeadRows values, int count) {
  pack_keys(keys_, keys, count, head_dim_);
  pack_values(values_, values, count, head_dim_);
  queries_.reserve(keys_, kQueries);
  probabilities_.reserve(values_, kQueries);
  scores_stride_ = size_t(num_panels(count)) * kPanelRows;
  scores_.reserve(kQueries * scores_stride_ * sizeof(float));
  weighed_.reserve(kQueries * weighed_stride() * sizeof(float));
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
  product(keys_, queries_, count, scores_.as<float>(), scores_stride_);
}

void EncoderAttention::product(const Matrix& matrix, const Operand& operand, int rows, float* out, size_t stride) {
#if defined(__AMX_BF16__)
  if (matrix.segments[0].format == Format::split) return multiply_split(matrix, operand, rows, out, stride);
#endif
  multiply(matrix, operand, {0, rows}, {0, matrix.panels()}, scratch_, [=](int row, int panel, Lanes outputs) {
    store(out + size_t(row) * stride + size_t(panel) * kPanelRows, outputs);
  });
}

// 2^(score - highest), 0 in the padding; their sum lane by lane in the order of the keys.
void EncoderAttention::compute_probabilities(int row) {
  const float* scores = scores_.as<float>() + size_t(row) * scores_stride_;
  const int count = keys_.rows, whole = count / 16 * 16;
  const Lanes rest = whole < count ? select_below(count - whole, load(scores + whole), broadcast(kLowest)) : zero();
  const Lanes offset = broadcast(-highest_score(scores, whole, rest) * scale_), scale = broadcast(scale_);
  const RowOfLanes out = probabilities_.lanes_of(row);
  Lanes sums = zero();
  const auto put = [&](int key, Lanes power) {
    sums = sums + power;
    out.set(key, power);
  };
  for (int i = 0; i < whole; i += 16) put(i, exp2_upto_0(fma(load(scores + i), scale, offset)));
  if (whole < count) put(whole, select_below(count - whole, exp2_upto_0(fma(rest, scale, offset)), zero()));
  for (int i = int(scores_stride_); i < values_.columns; i += 16) out.set(i, zero());
  sums_[row] = sum(sums);
}

// Of the scores of `whole` keys, and of the rest if there is one.
float EncoderAttention::highest_score(const float* scores, int whole, Lanes rest) const {
  Lanes even = whole < keys_.rows ? rest : broadcast(kLowest), odd = broadcast(kLowest);
  int i = 0;
  for (; i + 32 <= whole; i += 32) {
    even = max(even, load(scores + i));
    odd = max(odd, load(scores + i + 16));
  }
  if (i < whole) even = max(even, load(scores + i));
  return highest(max(even, odd));
}

void EncoderAttention::weigh(int count, float* out, size_t stride) {
  product(values_, probabilities_, count, weighed_.as<float>(), weighed_stride());
  for (int row = 0; row < count; ++row)
    scale_row(weighed_.as<float>() + size_t(row) * weighed_stride(), 1.0f / sums_[row], head_dim_,
              out + size_t(row) * stride);
}

}  // namespace ts
