// Matrix products: y = x W^T + b.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "matrix.h"
#include "operand.h"
#include "product_amx.h"
#include "product_bf16.h"
#include "product_f32.h"
#include "product_int8.h"
#include "product_int8_amx.h"
#include "product_scratch.h"
#include "product_split.h"
#include "segment_product.h"
#include "thread_pool.h"

namespace ts {

// Some rows, by the product for the segment's format on this tier.
template <typename Epilogue>
void multiply_rows(const Segment& segment, int columns, const Operand& x, Span rows, Span panels,
                   ProductScratch& scratch, Epilogue& epilogue) {
  const auto by = [&](const auto& product) {
    using Product = std::decay_t<decltype(product)>;
    SegmentProduct<Product, Epilogue>(product, segment, columns, rows, scratch, epilogue).multiply(panels);
  };
  switch (operand_kind(segment.format)) {
#if defined(__AMX_BF16__)
    case OperandKind::bf16: return by(ProductAmx(columns, x, rows, scratch));
    case OperandKind::split: return by(ProductSplit(x));
#elif defined(__AVX512BF16__)
    case OperandKind::bf16: return by(ProductBf16(x));
#endif
#if defined(__AVX512VNNI__)
    case OperandKind::int8:
#if defined(__AMX_INT8__)
      if (rows.end - rows.begin >= ProductInt8Amx::kFewestRows)
        return by(ProductInt8Amx(segment.format, columns, x, rows, scratch));
#endif
      return by(ProductInt8(segment.format, columns, x, rows, scratch));
#endif
    default: return by(ProductF32(x));
  }
}

// As many rows at a time as the second-level cache keeps while panels pass by.
template <typename Epilogue>
void multiply_segment(const Segment& segment, int columns, const Operand& x, Span rows, Span panels,
                      ProductScratch& scratch, Epilogue& epilogue) {
  constexpr size_t kKeptBytes = 800 << 10;
  constexpr int kMultiple = 96;  // a multiple of each product's tiles
  constexpr size_t kValueBytes[] = {sizeof(float), sizeof(bf16), sizeof(int8_t) + 1, 2 * sizeof(bf16)};  // by kind of operand
  const size_t row_bytes = size_t(columns) * kValueBytes[int(operand_kind(segment.format))];
  const int kept = std::max(int(kKeptBytes / row_bytes) / kMultiple, 1) * kMultiple;
  for (int row = rows.begin; row < rows.end; row += kept) {
    multiply_rows(segment, columns, x, {row, std::min(row + kept, rows.end)}, panels, scratch, epilogue);
  }
}

// rows.begin is a multiple of 16. For each row in `rows` and each panel in `panels`, in any order, calls
//
//   epilogue(int row, int panel, Lanes outputs)
//
// once, with the 16 outputs of the panel, bias added; or, if it takes them,
//
//   epilogue(int row, int panel, Lanes outputs, Lanes outputs of the next panel)
//
// for two at a time. Each output is summed over the columns in one and the same order, whatever rows and panels
// are asked for. Weights of the panels are read once, in order (more often only if there are more rows than fit
// the caches together with a panel).
template <typename Epilogue>
void multiply(const Matrix& matrix, const Operand& x, Span rows, Span panels, ProductScratch& scratch,
              Epilogue&& epilogue) {
  const float* bias = matrix.bias.empty() ? nullptr : matrix.bias.data();
  const auto with_bias = [&](int row, int panel,
                             auto... outputs) -> decltype(epilogue(row, panel, outputs...)) {
    if (bias) {
      const float* own = bias + size_t(panel) * kPanelRows;
      ((outputs = outputs + load(own), own += kPanelRows), ...);
    }
    return epilogue(row, panel, outputs...);
  };
  if (rows.begin >= rows.end) return;
  for (const Segment& segment : matrix.segments) {
    const Span part = {std::max(panels.begin, segment.first_panel),
                       std::min(panels.end, segment.first_panel + segment.panels)};
    if (part.begin >= part.end) continue;
    multiply_segment(segment, matrix.columns, x, rows, part, scratch, with_bias);
  }
}

}  // namespace ts
