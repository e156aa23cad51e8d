#include "operand.h"

#include <algorithm>
#include <cmath>

#include "element.h"

namespace ts {

namespace {

bool has_segment(const Matrix& matrix, OperandKind kind) {
  for (const Segment& segment : matrix.segments)
    if (operand_kind(segment.format) == kind) return true;
  return false;
}

// Groups that are quantized together: as many as there are lanes for their scales.
constexpr int kGroups = 16;

// Two halves of a group, at most `count` values of it.
template <typename Element>
void load_group(const Element* values, int count, Lanes& first, Lanes& second) {
  first = load_elements(values, count);
  second = load_elements(values + 16, count - 16);
}

// Smaller than the scale of any activation that matters, and large enough to divide by.
constexpr float kSmallest = 1e-30f;

// Of up to 16 groups, [groups][32].
template <typename Element>
void quantize_groups(const Element* values, int count, int groups, int8_t* out, GroupScale* scales) {
  float largest[kGroups] = {}, inverses[kGroups], steps[kGroups];
  Lanes first, second;
  for (int group = 0; group < groups; ++group) {
    load_group(values + group * 32, count - group * 32, first, second);
    largest[group] = highest(max(abs(first), abs(second)));
  }
  const Lanes bounds = max(broadcast(kSmallest), load(largest));
  store(inverses, broadcast(127.0f) / bounds);
  store(steps, bounds / broadcast(127.0f));
  for (int group = 0; group < groups; ++group) {
    load_group(values + group * 32, count - group * 32, first, second);
    const Lanes inverse = broadcast(inverses[group]);
    first = round(first * inverse), second = round(second * inverse);
    store_i8(out + group * 32, first);
    store_i8(out + group * 32 + 16, second);
    const float total = sum(first + second);  // NaN if one of the values is NaN or infinite
    scales[group] = std::isnan(total) ? GroupScale{total, 0} : GroupScale{steps[group], int32_t(total)};
  }
}

template <typename Element>
void quantize_row(const Element* values, int count, int columns, int8_t* out, GroupScale* scales) {
  const int groups = columns / kColumnMultiple;
  for (int group = 0; group < groups; group += kGroups) {
    const int start = group * kColumnMultiple;
    const int together = std::min(groups - group, kGroups);
    quantize_groups(values + start, count - start, together, out + start, scales + group);
  }
}

template <typename From, typename To>
void pad_row(const From* values, int count, int columns, To* out) {
  for (int i = 0; i < columns; i += 16) store_elements(out + i, load_elements(values + i, count - i));
}

}  // namespace

void Operand::reserve(const Matrix& matrix, int rows) {
  columns_ = matrix.columns;
  const size_t values = size_t(rows) * columns_;
  sets_f32_ = has_segment(matrix, OperandKind::f32);
  sets_bf16_ = has_segment(matrix, OperandKind::bf16);
  has_int8_ = has_segment(matrix, OperandKind::int8);
  has_split_ = has_segment(matrix, OperandKind::split);
  if (sets_f32_) f32_memory_.reserve(values * sizeof(float));
  if (sets_bf16_) bf16_memory_.reserve(values * sizeof(bf16));
  if (has_int8_) {
    int8_memory_.reserve(values);
    scales_memory_.reserve(values / kColumnMultiple * sizeof(GroupScale));
  }
  if (has_split_) {
    const int tiles = (rows + kSplitRows - 1) / kSplitRows;
    split_memory_.reserve(size_t(tiles) * kSplitRows * columns_ * 2 * sizeof(bf16));
  }
  f32_ = f32_memory_.as<float>();
  bf16_ = bf16_memory_.as<bf16>();
  f32_stride_ = bf16_stride_ = columns_;
}

void Operand::borrow(const bf16* rows, size_t stride) {
  bf16_ = rows;
  bf16_stride_ = stride;
  sets_bf16_ = false;
}

void Operand::borrow(const float* rows, size_t stride) {
  f32_ = rows;
  f32_stride_ = stride;
  sets_f32_ = false;
}

template <typename Element>
void Operand::set_row_of(int row, const Element* values, int count) {
  const size_t start = size_t(row) * columns_;
  if (sets_f32_) pad_row(values, count, columns_, f32_memory_.as<float>() + start);
  if (sets_bf16_) pad_row(values, count, columns_, bf16_memory_.as<bf16>() + start);
  if (has_int8_)
    quantize_row(values, count, columns_, int8_memory_.as<int8_t>() + start,
                 scales_memory_.as<GroupScale>() + start / kColumnMultiple);
  if (has_split_) {
    const RowOfLanes split{nullptr, nullptr, split_row(row)};
    for (int i = 0; i < columns_; i += 16) split.set(i, load_elements(values + i, count - i));
  }
}

void Operand::set_row(int row, const float* values, int count) { set_row_of(row, values, count); }

void Operand::set_row(int row, const bf16* values, int count) { set_row_of(row, values, count); }

RowOfLanes Operand::lanes_of(int row) const {
  const size_t start = size_t(row) * columns_;
  return {sets_f32_ ? f32_memory_.as<float>() + start : nullptr,
          sets_bf16_ ? bf16_memory_.as<bf16>() + start : nullptr, has_split_ ? split_row(row) : nullptr};
}

bf16* Operand::split_row(int row) const {
  const size_t tile = size_t(row / kSplitRows) * kSplitRows * columns_ * 2;
  return split_memory_.as<bf16>() + tile + size_t(row % kSplitRows) * kColumnMultiple;
}

}  // namespace ts
