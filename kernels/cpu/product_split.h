// Products of floats by tiles (AMX): of weights and activations that are each the sum of two bf16 values.
//
//   (a + b) (c + d) = a c + a d + b c, and b d, which is below 2^-18 of the whole and left out
//
// so that a product is within 1e-5 of fp32's (relative, at worst; the errors of a sum's terms are as random as
// rounding), at a third of bf16's speed and about five times that of vector registers.
//
// Tiles as in product_amx.h. Of 32 columns eight tiles are loaded for twelve products.
#pragma once

#if defined(__AMX_BF16__)

#include <algorithm>

#include "operand.h"
#include "outputs.h"
#include "tiles.h"
#include "weight_tile.h"

namespace ts {

class ProductSplit {
 public:
  static constexpr int kRows = 2 * kTileRows, kPanels = 2;
  // All at once: to store tiles and load them again costs more than weights that come from the second-level cache.
  static constexpr int kColumns = 1 << 24;

  explicit ProductSplit(const Operand& x) : x_(x) {}

  static Format form(Format) { return Format::split; }
  static int tile_rows(int rows) { return std::min(rows, kRows); }
  // rows.begin: a multiple of 16.
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile& meanwhile) const;

 private:
  const Operand& x_;
};

// out [rows][stride] = x W^T for up to 32 rows, and whole tiles of 16 are written: for products of few columns, whose
// sums are best left where they are wanted. The sums are those of ProductSplit. matrix: of one segment, no bias.
void multiply_split(const Matrix& matrix, const Operand& x, int rows, float* out, size_t stride);

}  // namespace ts

#endif
