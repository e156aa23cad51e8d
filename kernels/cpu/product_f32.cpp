#include "product_f32.h"

#include "kernel_table.h"
#include "lanes.h"

namespace ts {

namespace {

constexpr int sum_at(int row, int panel) { return (row * ProductF32::kPanels + panel) * kPanelRows; }

// One tile: x [Rows] rows `x_stride` floats apart.
template <int Rows, int Panels>
void compute_tile(WeightTile& weights, Span columns, const float* x, size_t x_stride, float* sums) {
  Lanes total[Rows][Panels];
  for (int row = 0; row < Rows; ++row) {
    for (int p = 0; p < Panels; ++p) {
      total[row][p] = columns.begin == 0 ? zero() : load(sums + sum_at(row, p));
    }
  }
  const float* panel = reinterpret_cast<const float*>(weights.panel(0)) + size_t(columns.begin) * kPanelRows;
  const size_t panel_stride = weights.stride() / sizeof(float);
  Prefetch prefetch = weights.prefetch();
  for (int column = columns.begin; column < columns.end; ++column, panel += kPanelRows) {
    if (column % kColumnMultiple == 0) prefetch.step();
    Lanes weight[Panels];
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) weight[p] = load(panel + size_t(p) * panel_stride);
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      const Lanes value = broadcast(x[size_t(row) * x_stride + size_t(column)]);
#pragma GCC unroll 3
      for (int p = 0; p < Panels; ++p) total[row][p] = fma(value, weight[p], total[row][p]);
    }
  }
  weights.prefetch() = prefetch;
  for (int row = 0; row < Rows; ++row) {
    for (int p = 0; p < Panels; ++p) store(sums + sum_at(row, p), total[row][p]);
  }
}

using Kernel = void (*)(WeightTile&, Span, const float*, size_t, float*);

struct Kernels {
  template <int Rows, int Panels>
  static constexpr Kernel get() {
    return compute_tile<Rows, Panels>;
  }
};

}  // namespace

void ProductF32::compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const {
  static constexpr auto kernels = kernel_table<Kernel, Kernels, kRows, kPanels>();
  const Kernel kernel = kernels[rows.end - rows.begin - 1][weights.panels() - 1];
  kernel(weights, columns, x_.f32_row(rows.begin), x_.f32_stride(), sums);
}

}  // namespace ts
