// One row of a panel: 32 columns of it at a time (a block), written and read.
//
// lane: the row's number within the panel. columns: padded.
#pragma once

#include <cmath>

#include "quantized_group.h"

namespace ts {

inline void write_values(float* panel, int block, int lane, const float* values) {
  float* out = panel + size_t(block) * kColumnMultiple * kPanelRows + lane;
  for (int column = 0; column < kColumnMultiple; ++column) out[column * kPanelRows] = values[column];
}

inline void read_values(const float* panel, int block, int lane, float* values) {
  const float* from = panel + size_t(block) * kColumnMultiple * kPanelRows + lane;
  for (int column = 0; column < kColumnMultiple; ++column) values[column] = from[column * kPanelRows];
}

inline void write_values(bf16* panel, int block, int lane, const bf16* values) {
  bf16* out = panel + size_t(block) * kColumnMultiple * kPanelRows + 2 * lane;
  for (int column = 0; column < kColumnMultiple; column += 2) {
    std::memcpy(out + column * kPanelRows, values + column, 2 * sizeof(bf16));
  }
}

inline void read_values(const bf16* panel, int block, int lane, float* values) {
  const bf16* from = panel + size_t(block) * kColumnMultiple * kPanelRows + 2 * lane;
  for (int column = 0; column < kColumnMultiple; column += 2) {
    values[column] = to_float(from[column * kPanelRows]);
    values[column + 1] = to_float(from[column * kPanelRows + 1]);
  }
}

// The same of split: a block's high parts, then the low ones. An infinity has no low part.
inline void write_split_values(bf16* panel, int block, int lane, const float* values) {
  bf16 high[kColumnMultiple], low[kColumnMultiple];
  for (int column = 0; column < kColumnMultiple; ++column) {
    high[column] = to_bf16(values[column]);
    const float whole = to_float(high[column]);
    low[column] = to_bf16(std::isinf(whole) ? 0.0f : values[column] - whole);
  }
  write_values(panel, 2 * block, lane, high);
  write_values(panel, 2 * block + 1, lane, low);
}

inline void read_split_values(const bf16* panel, int block, int lane, float* values) {
  float low[kColumnMultiple];
  read_values(panel, 2 * block, lane, values);
  read_values(panel, 2 * block + 1, lane, low);
  for (int column = 0; column < kColumnMultiple; ++column) values[column] += low[column];
}

// Scales or minima of a panel, [groups][16].
template <Format format>
inline void write_scale(uint8_t* scales, int group, int lane, float value) {
  uint8_t* out = scales + size_t(group * kPanelRows + lane) * scale_bytes(format);
  if constexpr (has_wide_scales(format)) {
    std::memcpy(out, &value, sizeof value);
  } else {
    const fp16 rounded = to_fp16(value);
    std::memcpy(out, &rounded, sizeof rounded);
  }
}

template <Format format>
inline float read_scale(const uint8_t* scales, int group, int lane) {
  const uint8_t* from = scales + size_t(group * kPanelRows + lane) * scale_bytes(format);
  if constexpr (has_wide_scales(format)) {
    return *reinterpret_cast<const float*>(from);
  } else {
    return to_float(*reinterpret_cast<const fp16*>(from));
  }
}

// Between quants side by side, and every 64 bytes four of them.
template <Format format>
inline void write_quants(uint8_t* out, const uint8_t* quants) {
  for (size_t byte = 0; byte < quants_bytes(format) / kPanelRows; byte += 4) {
    uint32_t four, high;
    std::memcpy(&four, quants + byte, 4);
    if constexpr (has_minima(format)) {
      std::memcpy(&high, quants + byte + 16, 4);
      four |= high << 4;
    }
    std::memcpy(out + byte * kPanelRows, &four, 4);
  }
}

template <Format format>
inline void read_quants(const uint8_t* from, uint8_t* quants) {
  for (size_t byte = 0; byte < quants_bytes(format) / kPanelRows; byte += 4) {
    uint32_t four;
    std::memcpy(&four, from + byte * kPanelRows, 4);
    if constexpr (has_minima(format)) {
      const uint32_t high = (four >> 4) & 0x0f0f0f0f;
      four &= 0x0f0f0f0f;
      std::memcpy(quants + byte + 16, &high, 4);
    }
    std::memcpy(quants + byte, &four, 4);
  }
}

template <Format format>
inline void write_group(uint8_t* panel, int columns, int block, int lane, const QuantizedGroup& group) {
  constexpr int parts = kColumnMultiple / group_columns(format);
  write_quants<format>(panel + size_t(block) * quants_bytes(format) + 4 * lane, group.quants);
  uint8_t* scales = panel + scales_offset(format, columns);
  for (int part = 0; part < parts; ++part) {
    write_scale<format>(scales, block * parts + part, lane, group.scales[part]);
  }
  if constexpr (has_minima(format)) {
    write_scale<format>(panel + minima_offset(format, columns), block, lane, group.minimum);
  }
}

template <Format format>
inline void read_group(const uint8_t* panel, int columns, int block, int lane, QuantizedGroup& group) {
  constexpr int parts = kColumnMultiple / group_columns(format);
  read_quants<format>(panel + size_t(block) * quants_bytes(format) + 4 * lane, group.quants);
  const uint8_t* scales = panel + scales_offset(format, columns);
  for (int part = 0; part < 2; ++part) {
    group.scales[part] = read_scale<format>(scales, block * parts + part % parts, lane);
  }
  if constexpr (has_minima(format)) {
    group.minimum = read_scale<format>(panel + minima_offset(format, columns), block, lane);
  }
}

}  // namespace ts
