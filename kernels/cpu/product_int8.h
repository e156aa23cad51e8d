// Products of quantized weights by integer dot products (VNNI): weights unsigned, activations int8 with a
// scale per 32 columns. A group's sum is an exact integer; groups are scaled and added up in fp32.
//
// Since sums are exact, product_int8_amx.h may make them in another way.
#pragma once

#include "operand.h"
#include "outputs.h"
#include "tile_sizes.h"
#include "weight_tile.h"

#if defined(__AVX512VNNI__)

namespace ts {

// What a product needs of 32 columns of a row of activations x = scale q.
struct GroupTerms {
  float scale;
  int32_t starts[2];  // of the sums, whose weights are 128 too large: -128 sum(q), q8_16: of each half
  float sum;          // of x: what a weights' minimum is multiplied by
};

class ProductInt8 {
 public:
  // Sums of 12 rows, 8 registers of weights and what the current row needs fit 32 registers.
  static constexpr int kRows = 12, kPanels = 1;

  // rows: all that will be asked for.
  ProductInt8(Format format, int columns, const Operand& x, Span rows, ProductScratch& scratch);

  static constexpr int kColumns = 1024;

  static Format form(Format format) { return format; }
  static int tile_rows(int rows) { return equal_part(rows, kRows); }
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const;

 private:
  void set_terms(int row, GroupTerms* terms) const;

  const Format format_;
  const int groups_;  // of 32 columns
  const Operand& x_;
  const int first_row_;
  const GroupTerms* terms_;  // [rows][groups]
};

}  // namespace ts

#endif
