// Packing: source rows into panels.
//
// A panel's rows are packed together, 32 columns of each in turn, so that the part of the panel that is
// written stays in the first-level cache.
#include <algorithm>

#include "gguf_blocks.h"
#include "matrix.h"
#include "panel_rows.h"
#include "quantize.h"

namespace ts {

namespace {

// Source rows that go to one panel, and their numbers there.
struct PanelRows {
  int panel;
  int count = 0;
  const uint8_t* rows[kPanelRows];
  int lanes[kPanelRows];
};

// The panel of source row `row`, and all of [row, end) that go there. Destinations grow with source rows.
PanelRows take_panel(const uint8_t* rows, size_t stride, int row, int end, Placement placement) {
  PanelRows out;
  out.panel = placement.destination(row) / kPanelRows;
  for (; row < end && placement.destination(row) / kPanelRows == out.panel; ++row) {
    out.rows[out.count] = rows + size_t(row) * stride;
    out.lanes[out.count++] = placement.destination(row) % kPanelRows;
  }
  return out;
}

inline Lanes load_source(const float* values) { return load(values); }
inline Lanes load_source(const bf16* values) { return load_bf16(values); }
inline Lanes load_source(const fp16* values) { return load_fp16(values); }

// Columns [32 block, 32 block + 32) of a row; zeros behind the last.
template <typename Element>
inline void read_block(const uint8_t* row, int columns, int block, Element* out) {
  const int first = block * kColumnMultiple, count = std::min(columns - first, kColumnMultiple);
  if (count < kColumnMultiple) std::memset(out, 0, kColumnMultiple * sizeof(Element));
  std::memcpy(out, row + size_t(first) * sizeof(Element), size_t(count) * sizeof(Element));
}

template <typename Element>
inline void read_floats(const uint8_t* row, int columns, int block, float* out) {
  Element values[kColumnMultiple];
  read_block(row, columns, block, values);
  store(out, load_source(values));
  store(out + 16, load_source(values + 16));
}

template <Source source>
inline void read_floats(const uint8_t* row, int columns, int block, float* out) {
  if constexpr (source == Source::f32) {
    read_block(row, columns, block, out);
  } else if constexpr (source == Source::bf16) {
    read_floats<bf16>(row, columns, block, out);
  } else if constexpr (source == Source::fp16) {
    read_floats<fp16>(row, columns, block, out);
  } else {
    QuantizedGroup group;
    parse_group<source>(row, block, group);
    weights_of(group, has_minima(source), out);
  }
}

template <Source source, Format format>
inline void pack_plain(const uint8_t* row, int columns, int block, int lane, uint8_t* panel) {
  if constexpr (format == Format::f32) {
    float values[kColumnMultiple];
    read_floats<source>(row, columns, block, values);
    write_values(reinterpret_cast<float*>(panel), block, lane, values);
  } else if constexpr (format == Format::split) {
    float values[kColumnMultiple];
    read_floats<source>(row, columns, block, values);
    write_split_values(reinterpret_cast<bf16*>(panel), block, lane, values);
  } else {
    bf16 values[kColumnMultiple];
    if constexpr (source == Source::bf16) {
      read_block(row, columns, block, values);
    } else {
      float wide[kColumnMultiple];
      read_floats<source>(row, columns, block, wide);
      for (int i = 0; i < kColumnMultiple; ++i) values[i] = to_bf16(wide[i]);
    }
    write_values(reinterpret_cast<bf16*>(panel), block, lane, values);
  }
}

template <Source source, Format format>
inline void pack_quants(const uint8_t* row, int columns, int block, int lane, uint8_t* panel) {
  QuantizedGroup group;
  if constexpr (is_blocks(source)) {
    parse_group<source>(row, block, group);
  } else {
    float values[kColumnMultiple];
    read_floats<source>(row, columns, block, values);
    quantize<format>(values, group);
  }
  write_group<format>(panel, padded_columns(columns), block, lane, group);
}

template <Source source, Format format>
void fill_panel(const PanelRows& from, int columns, uint8_t* panel) {
  for (int block = 0; block < padded_columns(columns) / kColumnMultiple; ++block) {
    for (int i = 0; i < from.count; ++i) {
      if constexpr (is_quantized(format)) {
        pack_quants<source, format>(from.rows[i], columns, block, from.lanes[i], panel);
      } else {
        pack_plain<source, format>(from.rows[i], columns, block, from.lanes[i], panel);
      }
    }
  }
}

using FillPanel = void (*)(const PanelRows& from, int columns, uint8_t* panel);

template <Source source>
FillPanel packer(Format format) {
  if (format == Format::f32) return fill_panel<source, Format::f32>;
  if (format == Format::bf16) return fill_panel<source, Format::bf16>;
  if (format == Format::split) return fill_panel<source, Format::split>;
  if constexpr (is_blocks(source)) {
    return fill_panel<source, lossless_format(source)>;
  } else {
    return format == Format::q8 ? fill_panel<source, Format::q8> : fill_panel<source, Format::q4>;
  }
}

FillPanel packer(Source source, Format format) {
  switch (source) {
    case Source::f32: return packer<Source::f32>(format);
    case Source::bf16: return packer<Source::bf16>(format);
    case Source::fp16: return packer<Source::fp16>(format);
    case Source::q8_0: return packer<Source::q8_0>(format);
    case Source::q4_0: return packer<Source::q4_0>(format);
    case Source::q4_1: return packer<Source::q4_1>(format);
    case Source::q4_k: return packer<Source::q4_k>(format);
    case Source::q6_k: return packer<Source::q6_k>(format);
  }
  return nullptr;
}

}  // namespace

void fill(Segment& segment, int columns, Source source, const void* rows, int begin, int end,
          Placement placement) {
  const FillPanel pack = packer(source, segment.format);
  const size_t stride = row_bytes(source, size_t(columns));
  const size_t bytes = panel_bytes(segment.format, padded_columns(columns));
  for (int row = begin; row < end;) {
    const PanelRows from = take_panel(static_cast<const uint8_t*>(rows), stride, row, end, placement);
    pack(from, columns, segment.memory.bytes() + size_t(from.panel) * bytes);
    row += from.count;
  }
}

}  // namespace ts
