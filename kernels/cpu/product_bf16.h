// Products of bf16 values, by dot products of pairs; sums in fp32.
//
// amx has a product of tiles in place of it: product_amx.h.
#pragma once

#include "operand.h"
#include "outputs.h"
#include "tile_sizes.h"
#include "weight_tile.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace ts {

class ProductBf16 {
 public:
  // 24 of 32 registers for sums, three for weights, one for a pair of activations. Of the shapes that fit,
  // this one was the best or near it at every number of rows.
  static constexpr int kRows = 8, kPanels = 3;

  explicit ProductBf16(const Operand& x) : x_(x) {}

  static constexpr int kColumns = 1024;

  static Format form(Format) { return Format::bf16; }
  static int tile_rows(int rows) { return equal_part(rows, kRows); }
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const;

 private:
  const Operand& x_;
};

}  // namespace ts

#endif
