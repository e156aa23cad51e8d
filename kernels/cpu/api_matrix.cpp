#include <algorithm>
#include <memory>

#include "api_handles.h"
#include "gguf_blocks.h"
#include "operand.h"
#include "product.h"

namespace {

// The first row at or behind `row` that begins a panel: rows of one panel are one thread's.
int panel_start(const ts::Placement& placement, int row, int num_rows) {
  const auto panel = [&](int r) { return placement.destination(r) / ts::kPanelRows; };
  while (row > 0 && row < num_rows && panel(row) == panel(row - 1)) ++row;
  return row;
}

// Rows of activations, padded with zeros.
void set_rows(ts::Operand& operand, const float* x, int columns, int padded, ts::Span rows) {
  std::vector<float> row(padded);
  for (int r = rows.begin; r < rows.end; ++r) {
    std::copy_n(x + size_t(r) * columns, columns, row.data());
    operand.set_row(r, row.data());
  }
}

}  // namespace

ts_matrix* ts_matrix_new(int32_t columns) { return new ts_matrix{{0, ts::padded_columns(columns), {}, {}}, columns}; }

void ts_matrix_add_segment(ts_matrix* matrix, int32_t format, int32_t rows) {
  ts::add_segment(matrix->matrix, ts::Format(format), rows);
}

void ts_matrix_fill(ts_matrix* matrix, ts_pool* pool, int32_t source, const void* rows, int32_t num_rows, int32_t run,
                    int32_t stride, int32_t offset) {
  const ts::Placement placement = {run, stride, offset};
  const int members = pool->threads.size();
  pool->threads.run([&](int member) {
    const ts::Span even = ts::share(num_rows, member, members);
    const int begin = panel_start(placement, even.begin, num_rows), end = panel_start(placement, even.end, num_rows);
    ts::fill(matrix->matrix.segments.back(), matrix->columns, ts::Source(source), rows, begin, end, placement);
  });
}

void ts_matrix_fill_bias(ts_matrix* matrix, const float* values, int32_t num_rows, int32_t run, int32_t stride,
                         int32_t offset) {
  const ts::Placement placement = {run, stride, offset};
  ts::Matrix& m = matrix->matrix;
  m.bias.resize(size_t(m.panels()) * ts::kPanelRows);
  float* bias = m.bias.data() + m.segments.back().first_panel * ts::kPanelRows;
  for (int row = 0; row < num_rows; ++row) bias[placement.destination(row)] = values[row];
}

size_t ts_matrix_bytes(const ts_matrix* matrix) {
  size_t bytes = matrix->matrix.bias.size() * sizeof(float);
  for (const ts::Segment& segment : matrix->matrix.segments) bytes += segment.memory.size();
  return bytes;
}

void ts_matrix_unpack_row(const ts_matrix* matrix, int32_t row, float* out) {
  std::vector<float> padded(matrix->matrix.columns);
  ts::unpack_row(matrix->matrix, row, padded.data());
  std::copy_n(padded.data(), matrix->columns, out);
}

void ts_matrix_multiply(const ts_matrix* matrix, ts_pool* pool, const float* x, int32_t num_rows, float* out) {
  const ts::Matrix& m = matrix->matrix;
  const int members = pool->threads.size();
  ts::Operand operand;
  operand.reserve(m, num_rows);
  const auto store_outputs = [&](int row, int panel, ts::Lanes outputs) {
    float lanes[ts::kPanelRows];
    ts::store(lanes, outputs);
    const int first = panel * ts::kPanelRows;
    std::copy_n(lanes, std::min(ts::kPanelRows, m.rows - first), out + size_t(row) * m.rows + first);
  };
  pool->threads.run([&](int member) {
    set_rows(operand, x, matrix->columns, m.columns, ts::share(num_rows, member, members));
    pool->threads.barrier();
    ts::ProductScratch scratch;
    ts::multiply(m, operand, {0, num_rows}, ts::share(m.panels(), member, members), scratch, store_outputs);
  });
}

void ts_matrix_free(ts_matrix* matrix) { delete matrix; }

void ts_dequantize(int32_t source, const void* blocks, size_t count, float* out) {
  ts::dequantize(ts::Source(source), blocks, count, out);
}
