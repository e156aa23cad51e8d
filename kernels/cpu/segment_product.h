// The walk of a product through the panels of a segment.
#pragma once

#include <algorithm>

#include "outputs.h"
#include "product_scratch.h"
#include "tile_sizes.h"
#include "weight_tile.h"

namespace ts {

// A kind of product (product_f32.h and so on) multiplies tiles: some rows by some panels. It has
//
//   kRows, kPanels                the largest tile
//   kColumns                      of a tile's panels that the first-level cache keeps while rows pass by
//   static Format form(Format)    the form in which it takes weights of a format
//   static int tile_rows(int)     rows of the next tile if so many are left
//   void compute(WeightTile&, Span rows, Span columns, float* sums, Meanwhile&)
//                                 adds the products over some columns to a tile's sums,
//                                 [rows][kPanels][16]; the first columns set them
//
// Sums that wait for the next columns are kept as they are: an output's bits do not depend on where columns
// are cut.
template <typename Product, typename Epilogue>
class SegmentProduct {
 public:
  // rows: all of them; as many as the second-level cache keeps while panels pass by.
  SegmentProduct(const Product& product, const Segment& segment, int columns, Span rows,
                 ProductScratch& scratch, Epilogue& epilogue)
      : product_(product),
        weights_(segment, columns, Product::form(segment.format), kPanels, scratch),
        rows_(rows),
        row_tiles_((rows.end - rows.begin + kRows - 1) / kRows),
        columns_at_once_(row_tiles_ == 1 ? columns : part_of_columns(columns, Product::kColumns)),
        outputs_(kPanels, epilogue) {
    const int kept_tiles = columns_at_once_ == columns ? 2 : row_tiles_;
    scratch.sums.reserve(size_t(kept_tiles) * kTileSums * sizeof(float));
    sums_ = scratch.sums.template as<float>();
  }

  void multiply(Span panels) {
    for (int panel = panels.begin; panel < panels.end; panel += kPanels) {
      const Span tile = {panel, std::min(panel + kPanels, panels.end)};
      weights_.take(tile, panels.end, row_tiles_);
      multiply_tile(tile);
    }
    outputs_.finish();
  }

 private:
  static constexpr int kRows = Product::kRows, kPanels = Product::kPanels;
  static constexpr size_t kTileSums = size_t(kRows) * kPanels * kPanelRows;

  void multiply_tile(Span panels) {
    const int all = weights_.columns();
    for (int column = 0; column < all; column += columns_at_once_) {
      multiply_columns(panels, {column, std::min(column + columns_at_once_, all)});
    }
  }

  // All rows. What one tile has computed is passed on while the next is.
  void multiply_columns(Span panels, Span columns) {
    const bool is_part = columns_at_once_ < weights_.columns(), is_last = columns.end == weights_.columns();
    Span tile = {rows_.begin, rows_.begin};
    for (int index = 0; index < row_tiles_; ++index, tile.begin = tile.end) {
      tile.end += Product::tile_rows(rows_.end - tile.begin);
      float* sums = sums_ + size_t(is_part ? index : turn_++ % 2) * kTileSums;
      product_.compute(weights_, tile, columns, sums, outputs_);
      outputs_.finish();
      if (is_last) outputs_.begin(sums, tile, panels, columns_at_once_ / kColumnMultiple);
    }
  }

  const Product& product_;
  WeightTile weights_;
  const Span rows_;
  const int row_tiles_;
  const int columns_at_once_;
  float* sums_;  // of the tile at work and the one before, or of all tiles if they wait for more columns
  size_t turn_ = 0;
  Outputs<Epilogue> outputs_;
};

}  // namespace ts
