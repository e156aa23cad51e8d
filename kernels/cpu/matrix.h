// A packed matrix: one or several stretches of panels, each in a format of its own.
#pragma once

#include <vector>

#include "format.h"
#include "memory.h"
#include "source.h"

namespace ts {

// Panels [first_panel, first_panel + panels) of a matrix.
struct Segment {
  Format format;
  int first_panel;
  int panels;
  Memory memory;

  const uint8_t* panel(int index, int columns) const {
    return memory.bytes() + size_t(index - first_panel) * panel_bytes(format, columns);
  }
};

// y = x W^T + b. Invariants: the segments' panels follow each other without gaps; bias is empty, or has an
// entry for each row of every panel.
struct Matrix {
  int rows;     // outputs; a multiple of 16 only in all segments but the last
  int columns;  // inputs, padded
  std::vector<Segment> segments;
  std::vector<float> bias;

  int panels() const { return num_panels(rows); }
};

// Where source row r goes: row (r / run) * stride + offset + r % run of the segment. {INT_MAX, 0, 0}: where
// it is. Gate and up rows interleave by eights: {8, 16, 0} and {8, 16, 8}.
struct Placement {
  int run, stride, offset;
  int destination(int row) const { return row / run * stride + offset + row % run; }
};

// Add an empty segment (zero weights) of `rows` rows after those that are there.
void add_segment(Matrix& matrix, Format format, int rows);

// Fill rows [begin, end) of a source, whose row 0 is at `rows`, into a segment; `columns`: not padded, the
// source's. Source rows lie side by side. Destinations count from the segment's first row. Different threads
// may fill the same segment as long as no two of them touch the same panel.
//
// f32, bf16 and fp16 sources are rounded to f32, bf16 or split or quantized to q8 or q4 (quantize.h); a last group
// that is not full is filled up with zeros. Blocks of GGUF go only into the format that holds them without
// loss (lossless_format), or into f32, bf16 and split.
void fill(Segment& segment, int columns, Source source, const void* rows, int begin, int end,
          Placement placement);

// One row of the matrix as floats: [columns], the padding's zeros (nearly so, if quantized) included.
void unpack_row(const Matrix& matrix, int row, float* out);

}  // namespace ts
