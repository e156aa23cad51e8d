#include "encoder_pack.h"

#include <algorithm>

#include "element.h"
#include "intrinsics.h"
#include "tier.h"

namespace ts {

namespace {

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

// 16 values from `column` on, zeros behind the last.
Lanes load_part(const float* row, int column, int size) {
  return column < size ? load_elements(row + column, size - column) : zero();
}

void write_keys_f32(float* panel, HeadRows keys, int count, int head_dim, int columns) {
  for (int key = 0; key < kPanelRows; ++key) {
    for (int column = 0; column < columns; ++column)
      panel[column * kPanelRows + key] = key < count && column < head_dim ? keys.row(key)[column] : 0.0f;
  }
}

void write_values_f32(float* panel, int key, Lanes even, Lanes odd) {
  store(panel + size_t(key) * kPanelRows, even);
  store(panel + size_t(key + 1) * kPanelRows, odd);
}

#if defined(__AVX512BF16__)

constexpr int kPart = kColumnMultiple * kPanelRows;  // of a panel: 32 columns, or their high or low parts

__m512i both_rounded(Lanes first, Lanes second) { return (__m512i)_mm512_cvtne2ps_pbh(second.values, first.values); }

Lanes widen_half(__m512i values, int half) {
  return widen_bf16(half == 0 ? _mm512_castsi512_si256(values) : _mm512_extracti64x4_epi64(values, 1));
}

// Row i, number j goes to row j, number i; 32 bits each.
void transpose(__m512i (&rows)[16]) {
  __m512i a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  }
  // rows[4 g + c]: in each quarter q number 4 q + c of rows 4 g to 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    const __m512i low_even = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(rows[c], rows[4 + c], 0xdd);
    const __m512i high_even = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0x88);
    const __m512i high_odd = _mm512_shuffle_i32x4(rows[8 + c], rows[12 + c], 0xdd);
    a[c] = _mm512_shuffle_i32x4(low_even, high_even, 0x88);
    a[8 + c] = _mm512_shuffle_i32x4(low_even, high_even, 0xdd);
    a[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
    a[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
  std::copy_n(a, 16, rows);
}

void write_transposed(__m512i (&rows)[16], bf16* out) {
  transpose(rows);
  for (int pair = 0; pair < 16; ++pair) _mm512_storeu_si512(out + pair * 2 * kPanelRows, rows[pair]);
}

// 32 columns of up to 16 keys.
void write_keys_bf16(bf16* out, HeadRows keys, int count, int column, int head_dim, bool split) {
  __m512i high[16] = {}, low[16] = {};
  for (int key = 0; key < count; ++key) {
    const Lanes first = load_part(keys.row(key), column, head_dim);
    const Lanes second = load_part(keys.row(key), column + 16, head_dim);
    high[key] = both_rounded(first, second);
    low[key] = both_rounded(first - widen_half(high[key], 0), second - widen_half(high[key], 1));
  }
  write_transposed(high, out);
  if (split) write_transposed(low, out + kPart);
}

// Two neighbouring columns side by side: each number's even one in the low half.
__m512i interleaved(Lanes even, Lanes odd) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, both_rounded(even, odd));
}

void write_values_bf16(bf16* panel, int key, Lanes even, Lanes odd, bool split) {
  const int part = split ? key / kColumnMultiple : 0;  // low parts before it
  bf16* out = panel + size_t(part) * kPart + size_t(key) * kPanelRows;
  const __m512i pairs = interleaved(even, odd);
  _mm512_storeu_si512(out, pairs);
  if (!split) return;
  Lanes high_even, high_odd;
  load_bf16_pairs(out, high_even, high_odd);
  _mm512_storeu_si512(out + kPart, interleaved(even - high_even, odd - high_odd));
}

#endif

}  // namespace

Matrix empty_matrix(Format format) {
  Matrix matrix{0, 0, {}, {}};
  matrix.segments.push_back({format, 0, 0, Memory()});
  return matrix;
}

void pack_keys(Matrix& matrix, HeadRows keys, int count, int head_dim) {
  resize(matrix, count, head_dim);
  [[maybe_unused]] const Format format = matrix.segments[0].format;
  for (int first = 0; first < count; first += kPanelRows) {
    const HeadRows own = {keys.row(first), keys.stride};
    const int rows = std::min(kPanelRows, count - first);
    uint8_t* panel = panel_of(matrix, first / kPanelRows);
#if defined(__AVX512BF16__)
    if (format != Format::f32) {
      const bool split = format == Format::split;
      for (int column = 0; column < matrix.columns; column += kColumnMultiple)
        write_keys_bf16(reinterpret_cast<bf16*>(panel) + size_t(column) * kPanelRows * (split ? 2 : 1), own, rows, column,
                        head_dim, split);
      continue;
    }
#endif
    write_keys_f32(reinterpret_cast<float*>(panel), own, rows, head_dim, matrix.columns);
  }
}

void pack_values(Matrix& matrix, HeadRows values, int count, int head_dim) {
  resize(matrix, head_dim, count);
  [[maybe_unused]] const Format format = matrix.segments[0].format;
  for (int index = 0; index < matrix.panels(); ++index) {
    uint8_t* panel = panel_of(matrix, index);
    const auto lanes = [&](int key) {
      return key < count ? load_part(values.row(key), index * kPanelRows, head_dim) : zero();
    };
    for (int key = 0; key < matrix.columns; key += 2) {
#if defined(__AVX512BF16__)
      if (format != Format::f32) {
        write_values_bf16(reinterpret_cast<bf16*>(panel), key, lanes(key), lanes(key + 1), format == Format::split);
        continue;
      }
#endif
      write_values_f32(reinterpret_cast<float*>(panel), key, lanes(key), lanes(key + 1));
    }
  }
}

}  // namespace ts
