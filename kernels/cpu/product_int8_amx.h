// The products of product_int8.h by tiles of integers (AMX), for more rows than a few: bit for bit the same.
//
// 16 rows by one panel and one group at a time. What a tile has summed is exact, and its rows are scaled and
// added up in fp32 by the same operations as there, while the tiles of the next groups are multiplied.
#pragma once

#if defined(__AMX_INT8__)

#include <algorithm>

#include "operand.h"
#include "outputs.h"
#include "product_scratch.h"
#include "tiles.h"
#include "weight_tile.h"

namespace ts {

// 32 columns of 16 rows of activations: x = scale q.
struct alignas(64) RowBlock {
  int8_t quants[kTileRows][kColumnMultiple];
  float scales[kTileRows];
  float sums[kTileRows];  // of x: what the weights' minima are multiplied by
};

class ProductInt8Amx {
 public:
  static constexpr int kRows = kTileRows, kPanels = 1;
  static constexpr int kColumns = 1024;
  // From so many rows on these products are the faster ones.
  static constexpr int kFewestRows = 6;

  // rows: all that will be asked for, in tiles that begin at rows.begin. While this lives, the thread's tiles
  // are of the sizes that it needs.
  ProductInt8Amx(Format format, int columns, const Operand& x, Span rows, ProductScratch& scratch);
  ~ProductInt8Amx() { configure_tiles(); }
  ProductInt8Amx(const ProductInt8Amx&) = delete;
  ProductInt8Amx& operator=(const ProductInt8Amx&) = delete;

  static Format form(Format format) { return format; }
  static int tile_rows(int rows) { return std::min(rows, kRows); }
  void compute(WeightTile& weights, Span rows, Span columns, float* sums, Meanwhile&) const;

 private:
  void order_rows(const Operand& x, Span rows, RowBlock* out) const;

  const Format format_;
  const int blocks_;  // of 32 columns
  const int first_row_;
  const RowBlock* ordered_;  // [tiles][blocks]
  uint8_t* unpacked_;        // quants of a tile's columns, signed: [blocks][8][16][4]
};

}  // namespace ts

#endif
