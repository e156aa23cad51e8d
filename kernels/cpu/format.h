// How a matrix product's weights are stored.
//
// W is [rows, columns] in a checkpoint (rows: outputs, columns: inputs, y = x W^T). It is cut into panels of
// 16 rows; a panel holds all columns of its rows, so that 16 outputs are computed from one stretch of memory:
//
//   f32     [columns][16]
//   bf16    [columns / 2][16][2]             two neighbouring columns side by side
//   split   [columns / 32][2][16][16][2]     w = high + low, both bf16: 32 columns of high as in bf16, then low
//   q8      [groups][8][16][4] uint8, then scales fp16 [groups][16]
//                                            w = scale (q - 128); groups of 32 columns
//   q8_16   [groups][4][16][4] uint8, then scales fp32 [groups][16]
//                                            the same with groups of 16 columns
//   q4      [groups][4][16][4] bytes, then scales fp16 [groups][16], then minima fp16 [groups][16]
//                                            w = scale q + minimum, q in 0..15; groups of 32 columns. The low
//                                            nibble of byte [j][r][c] is column 4 j + c, the high 16 + 4 j + c
//   q4_wide the same with scales and minima in fp32
//
// Columns are padded with zero weights to a multiple of 32, rows to one of 16. Panels begin at addresses that
// are multiples of 64.
//
// split is for tiles (product_split.h), within 4e-6 of an fp32 weight (relative); elsewhere f32 is faster.
//
// q8 holds GGUF's Q8_0 and our own int8, q8_16 Q6_K, q4 Q4_1, Q4_0 (minimum -8 scale) and our own int4,
// q4_wide Q4_K: each without loss.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

enum class Format : int32_t { f32 = 0, bf16 = 1, q8 = 2, q8_16 = 3, q4 = 4, q4_wide = 5, split = 6 };

constexpr int kPanelRows = 16;
constexpr int kColumnMultiple = 32;

constexpr bool is_quantized(Format format) { return format >= Format::q8 && format != Format::split; }
constexpr int group_columns(Format format) { return format == Format::q8_16 ? 16 : 32; }
constexpr bool has_minima(Format format) { return format == Format::q4 || format == Format::q4_wide; }

inline int padded_columns(int columns) {
  return (columns + kColumnMultiple - 1) / kColumnMultiple * kColumnMultiple;
}
inline int num_panels(int rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Of one panel, a multiple of 64. columns: padded.
inline size_t panel_bytes(Format format, int columns) {
  const size_t values = size_t(columns) * kPanelRows;
  const size_t per_group = size_t(columns / group_columns(format)) * kPanelRows;
  switch (format) {
    case Format::f32:
    case Format::split: return values * 4;
    case Format::bf16: return values * 2;
    case Format::q8: return (values + per_group * 2 + 63) / 64 * 64;
    case Format::q8_16: return values + per_group * 4;
    case Format::q4: return (values / 2 + per_group * 4 + 63) / 64 * 64;
    case Format::q4_wide: return values / 2 + per_group * 8;
  }
  return 0;
}

// Where things begin within a panel of quants, in bytes: those of 32 columns, scales and minima of all
// columns.
constexpr size_t quants_bytes(Format format) {
  return size_t(kColumnMultiple * kPanelRows) >> has_minima(format);
}
constexpr bool has_wide_scales(Format format) {
  return format == Format::q8_16 || format == Format::q4_wide;
}
constexpr size_t scale_bytes(Format format) { return has_wide_scales(format) ? 4 : 2; }
inline size_t scales_offset(Format format, int columns) {
  return size_t(columns / kColumnMultiple) * quants_bytes(format);
}
inline size_t minima_offset(Format format, int columns) {
  const size_t scales = size_t(columns / group_columns(format)) * kPanelRows;
  return scales_offset(format, columns) + scales * scale_bytes(format);
}

}  // namespace ts
