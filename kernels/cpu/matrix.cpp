#include "matrix.h"

#include <algorithm>

#include "panel_rows.h"

namespace ts {

namespace {

const Segment& segment_of(const Matrix& matrix, int panel) {
  const auto holds = [=](const Segment& segment) { return panel < segment.first_panel + segment.panels; };
  return *std::find_if(matrix.segments.begin(), matrix.segments.end() - 1, holds);
}

// What zero weights look like where the scale is 0: the quant that stands for 0.
void clear_last_panel(Segment& segment, int columns) {
  if (!is_quantized(segment.format) || has_minima(segment.format)) return;
  const size_t bytes = panel_bytes(segment.format, columns);
  uint8_t* quants = segment.memory.bytes() + size_t(segment.panels - 1) * bytes;
  std::fill_n(quants, scales_offset(segment.format, columns), uint8_t(128));
}

template <Format format>
void unpack_lane(const uint8_t* panel, int columns, int lane, float* out) {
  for (int block = 0; block < columns / kColumnMultiple; ++block, out += kColumnMultiple) {
    if constexpr (is_quantized(format)) {
      QuantizedGroup group;
      read_group<format>(panel, columns, block, lane, group);
      weights_of(group, has_minima(format), out);
    } else if constexpr (format == Format::split) {
      read_split_values(reinterpret_cast<const bf16*>(panel), block, lane, out);
    } else if constexpr (format == Format::bf16) {
      read_values(reinterpret_cast<const bf16*>(panel), block, lane, out);
    } else {
      read_values(reinterpret_cast<const float*>(panel), block, lane, out);
    }
  }
}

}  // namespace

void add_segment(Matrix& matrix, Format format, int rows) {
  const int first = matrix.panels(), panels = num_panels(rows);
  Memory memory(size_t(panels) * panel_bytes(format, matrix.columns));
  matrix.segments.push_back({format, first, panels, std::move(memory)});
  matrix.rows += rows;
  if (rows % kPanelRows != 0) clear_last_panel(matrix.segments.back(), matrix.columns);
}

void unpack_row(const Matrix& matrix, int row, float* out) {
  const int index = row / kPanelRows, lane = row % kPanelRows;
  const Segment& segment = segment_of(matrix, index);
  const uint8_t* panel = segment.panel(index, matrix.columns);
  switch (segment.format) {
    case Format::f32: return unpack_lane<Format::f32>(panel, matrix.columns, lane, out);
    case Format::bf16: return unpack_lane<Format::bf16>(panel, matrix.columns, lane, out);
    case Format::q8: return unpack_lane<Format::q8>(panel, matrix.columns, lane, out);
    case Format::q8_16: return unpack_lane<Format::q8_16>(panel, matrix.columns, lane, out);
    case Format::q4: return unpack_lane<Format::q4>(panel, matrix.columns, lane, out);
    case Format::q4_wide: return unpack_lane<Format::q4_wide>(panel, matrix.columns, lane, out);
    case Format::split: return unpack_lane<Format::split>(panel, matrix.columns, lane, out);
  }
}

}  // namespace ts
