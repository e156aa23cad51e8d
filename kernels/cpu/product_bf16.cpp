#include "product_bf16.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

#include "intrinsics.h"
#include "kernel_table.h"

namespace ts {

namespace {

constexpr int sum_at(int row, int panel) { return (row * ProductBf16::kPanels + panel) * kPanelRows; }

// One tile: x [Rows] rows `x_stride` values apart.
template <int Rows, int Panels>
void compute_tile(WeightTile& weights, Span columns, const bf16* x, size_t x_stride, float* sums) {
  __m512 total[Rows][Panels];
  for (int row = 0; row < Rows; ++row) {
    for (int p = 0; p < Panels; ++p) {
      total[row][p] = columns.begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + sum_at(row, p));
    }
  }
  const uint8_t* panel = weights.panel(0) + size_t(columns.begin) * kPanelRows * sizeof(bf16);
  const size_t panel_stride = weights.stride();
  Prefetch prefetch = weights.prefetch();
  constexpr size_t kPairBytes = 2 * kPanelRows * sizeof(bf16);
  for (int column = columns.begin; column < columns.end; column += 2, panel += kPairBytes) {
    if (column % kColumnMultiple == 0) prefetch.step();
    __m512bh weight[Panels];
#pragma GCC unroll 3
    for (int p = 0; p < Panels; ++p) {
      weight[p] = (__m512bh)_mm512_load_si512(panel + size_t(p) * panel_stride);
    }
#pragma GCC unroll 8
    for (int row = 0; row < Rows; ++row) {
      int32_t pair;
      std::memcpy(&pair, x + size_t(row) * x_stride + size_t(column), sizeof pair);
      const __m512bh pairs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 3
      for (int p = 0; p < Panels; ++p) total[row][p] = _mm512_dpbf16_ps(total[row][p], weight[p], pairs);
    }
  }
  weights.prefetch() = prefetch;
  for (int row = 0; row < Rows; ++row) {
    for (int p = 0; p < Panels; ++p) _mm512_storeu_ps(sums + sum_at(row, p), total[row][p]);
  }
}

using Kernel = void (*)(WeightTile&, Span, const bf16*, size_t, float*);

struct Kernels {
  template <int Rows, int Panels>
  static constexpr Kernel get() {
    return compute_tile<Rows, Panels>;
  }
};

}  // namespace

void ProductBf16::compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const {
  static constexpr auto kernels = kernel_table<Kernel, Kernels, kRows, kPanels>();
  const Kernel kernel = kernels[rows.end - rows.begin - 1][weights.panels() - 1];
  kernel(weights, columns, x_.bf16_row(rows.begin), x_.bf16_stride(), sums);
}

}  // namespace ts

#endif
