// Unpacking in Lanes: 32 columns of any format, a column at a time.
#pragma once

#include "format.h"
#include "quads.h"

namespace ts {

template <bool wide>
inline Lanes load_scales(const uint8_t* scales) {
  if constexpr (wide) {
    return load(reinterpret_cast<const float*>(scales));
  } else {
    return load_fp16(reinterpret_cast<const fp16*>(scales));
  }
}

// What turns quants of one group into weights.
struct GroupLanes {
  Lanes scale, minimum;
};

// Group `group` of a panel of quants.
template <Format format>
inline GroupLanes load_group(const uint8_t* panel, int columns, int group) {
  constexpr bool wide = has_wide_scales(format);
  const size_t at = size_t(group) * kPanelRows * scale_bytes(format);
  const Lanes scale = load_scales<wide>(panel + scales_offset(format, columns) + at);
  if constexpr (!has_minima(format)) return {scale, zero()};
  return {scale, load_scales<wide>(panel + minima_offset(format, columns) + at)};
}

// Columns [4 j, 4 j + 4) of a group of q8 or q8_16.
template <typename Sink>
inline void unpack_bytes(Quad quad, Lanes scale, Sink&& sink) {
  const Lanes middle = broadcast(128.0f);
  sink(0, scale * (bits_of_quad<0, 8>(quad) - middle));
  sink(1, scale * (bits_of_quad<8, 8>(quad) - middle));
  sink(2, scale * (bits_of_quad<16, 8>(quad) - middle));
  sink(3, scale * (bits_of_quad<24, 8>(quad) - middle));
}

// Columns [4 j, 4 j + 4) and 16 more of a group of q4 or q4_wide.
template <typename Sink>
inline void unpack_nibbles(Quad quad, const GroupLanes& group, Sink&& sink) {
  sink(0, fma(bits_of_quad<0, 4>(quad), group.scale, group.minimum));
  sink(1, fma(bits_of_quad<8, 4>(quad), group.scale, group.minimum));
  sink(2, fma(bits_of_quad<16, 4>(quad), group.scale, group.minimum));
  sink(3, fma(bits_of_quad<24, 4>(quad), group.scale, group.minimum));
  sink(16, fma(bits_of_quad<4, 4>(quad), group.scale, group.minimum));
  sink(17, fma(bits_of_quad<12, 4>(quad), group.scale, group.minimum));
  sink(18, fma(bits_of_quad<20, 4>(quad), group.scale, group.minimum));
  sink(19, fma(bits_of_quad<28, 4>(quad), group.scale, group.minimum));
}

// Calls sink(column, weights of 16 rows) for each column of [0, 32), counted from 32 * block.
template <Format format, typename Sink>
inline void unpack_columns(const uint8_t* panel, int columns, int block, Sink&& sink) {
  const uint8_t* quants = panel + size_t(block) * quants_bytes(format);
  constexpr int groups = kColumnMultiple / group_columns(format);
  for (int part = 0; part < groups; ++part) {
    const GroupLanes group = load_group<format>(panel, columns, block * groups + part);
    constexpr int quads = int(quants_bytes(format) / kQuadBytes) / groups;
    for (int j = 0; j < quads; ++j, quants += kQuadBytes) {
      const auto shifted = [&](int column, Lanes weights) {
        sink(part * group_columns(format) + 4 * j + column, weights);
      };
      if constexpr (has_minima(format)) {
        unpack_nibbles(load_quad(quants), group, shifted);
      } else {
        unpack_bytes(load_quad(quants), group.scale, shifted);
      }
    }
  }
}

}  // namespace ts
