// Products of bf16 values by tiles (AMX).
//
// 32 rows by two panels of weights at a time: four tiles of sums, two of activations, two of weights, so that
// each product of tiles needs one tile loaded. The time of a product of tiles does not depend on the number
// of rows.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "operand.h"
#include "outputs.h"
#include "tiles.h"
#include "weight_tile.h"

namespace ts {

class ProductAmx {
 public:
  static constexpr int kRows = 2 * kTileRows, kPanels = 2;
  static constexpr int kColumns = 576;  // of two panels that the first-level cache keeps while rows pass by

  // rows: all that will be asked for, in tiles that begin at rows.begin.
  ProductAmx(int columns, const Operand& x, Span rows, ProductScratch& scratch);

  static Format form(Format) { return Format::bf16; }
  static int tile_rows(int rows) { return std::min(rows, kRows); }
  size_t row_bytes() const { return size_t(columns_) * sizeof(bf16); }
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile& meanwhile) const;

 private:
  void order_rows(const Operand& x, Span rows, uint8_t* out) const;

  const int columns_;
  const Span rows_;
  const uint8_t* ordered_;  // the rows in the order in which tiles are loaded
};

}  // namespace ts

#endif
