// Activations in the forms that products take.
#pragma once

#include "lanes.h"
#include "matrix.h"
#include "memory.h"
#include "numbers.h"
#include "tier.h"

namespace ts {

// What the int8 product needs to know of 32 columns of a row: x = scale * q.
struct GroupScale {
  float scale;
  int32_t sum;  // of the group's q
};

// Of 16 rows, split: [columns / 32][2][16][32] of bf16, 32 columns of high parts, then of low ones.
constexpr int kSplitRows = 16;
constexpr int kSplitPart = kSplitRows * kColumnMultiple;

// Where a row's values are set, in each form that is wanted; null: not wanted.
struct RowOfLanes {
  float* f32;
  bf16* whole;
  bf16* split;

  // 16 values from column `column` on, a multiple of 16.
  void set(int column, Lanes values) const {
    if (split != nullptr) {
      bf16* high = split + size_t(column / kColumnMultiple) * 2 * kSplitPart + column % kColumnMultiple;
      store_bf16(high, values);
      store_bf16(high + kSplitPart, values - load_bf16(high));
    }
    if (f32 != nullptr) store(f32 + column, values);
    if (whole != nullptr) store_bf16(whole + column, values);
  }
};

// [rows, columns] activations of a step, in each form that a matrix's segments want. Columns are padded with
// zeros to a multiple of 32.
//
// int8: per row and group of 32 columns, scale = largest / 127 and q = round(x / scale): llama.cpp's Q8_0,
// with the scale in fp32. Scales per row are not enough: they cost a small model a fifth of its cosine.
// Scales are at least 1e-30 / 127; a group with an infinity or NaN has the scale NaN.
//
// split: the sum of two bf16 values, in the order in which tiles are loaded.
//
// Different rows may be set in different threads.
class Operand {
 public:
  // Make room. Rows that were set are lost, and what was borrowed is given back.
  void reserve(const Matrix& matrix, int rows);

  // From `count` values, at most as many as the matrix has columns; the others become zero.
  void set_row(int row, const float* values, int count);
  void set_row(int row, const bf16* values, int count);
  // From as many values as the matrix has columns, padding included.
  void set_row(int row, const float* values) { set_row(row, values, columns_); }

  // A row to be set sixteen by sixteen; not of int8. Columns of the padding that are never set are zero.
  RowOfLanes lanes_of(int row) const;

  // The form of this type is somebody else's memory, [rows][stride], padded with zeros: nothing to set in it.
  void borrow(const bf16* rows, size_t stride);
  void borrow(const float* rows, size_t stride);
  // Whether set_row has anything to do.
  bool needs_rows() const { return sets_f32_ || sets_bf16_ || has_int8_ || has_split_; }

  const float* f32_row(int row) const { return f32_ + row * f32_stride_; }
  const bf16* bf16_row(int row) const { return bf16_ + row * bf16_stride_; }
  const int8_t* int8_row(int row) const { return int8_memory_.as<int8_t>() + size_t(row) * columns_; }
  const GroupScale* scales_row(int row) const {
    return scales_memory_.as<GroupScale>() + size_t(row) * (columns_ / kColumnMultiple);
  }
  // Of 16 rows; row: a multiple of 16.
  const uint8_t* split_tile(int row) const { return split_memory_.bytes() + size_t(row) * columns_ * sizeof(float); }
  size_t f32_stride() const { return f32_stride_; }    // in values
  size_t bf16_stride() const { return bf16_stride_; }  // in values

 private:
  template <typename Element>
  void set_row_of(int row, const Element* values, int count);
  bf16* split_row(int row) const;

  int columns_ = 0;  // padded
  bool sets_f32_ = false, sets_bf16_ = false, has_int8_ = false, has_split_ = false;

  const float* f32_ = nullptr;  // [rows][f32_stride], own or borrowed; so is bf16_
  const bf16* bf16_ = nullptr;
  size_t f32_stride_ = 0, bf16_stride_ = 0;

  Memory f32_memory_, bf16_memory_;
  Memory int8_memory_;    // [rows][columns]
  Memory scales_memory_;  // [rows][columns / 32] of GroupScale
  Memory split_memory_;   // whole tiles of rows
};

}  // namespace ts
