// The two products of attention, from tile registers.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_products.h"
#include "tiles.h"

namespace ts {

// Tiles 0 to 3: sums. 4, 5: queries and keys. 6, 7: probabilities and values of one page, which take half a
// tile.
class TileProducts {
 public:
  using Value = bf16;

  // To be called before products of tiles of up to `rows` rows, at most kRowTile. A product computes, and
  // stores, that many rows, however few are asked for.
  static void begin(int rows) {
    TileSizes sizes;
    for (int tile : {0, 1, 2, 3, 4, 6}) sizes.rows[tile] = uint8_t(rows);
    sizes.row_bytes[6] = kPageTokens * sizeof(bf16);
    sizes.rows[7] = kPageTokens / 2;
    configure_tiles(sizes);
  }

  // To be called behind the last product: leaves the tiles as all others expect them.
  static void end() { configure_tiles(); }

  static void scores(const ProductSizes& sizes, const bf16* queries, const bf16* const* keys, float* out,
                     Ahead& ahead) {
    for (int page = sizes.pages.begin; page < sizes.pages.end; page += 4) {
      with_columns(sizes.pages.end - page, [&](auto columns) {
        score_pages<columns>(sizes.padded_dim, queries, keys + page, out + page * kPageTokens, ahead);
      });
    }
  }

  static void weigh(const ProductSizes& sizes, const bf16* probabilities, const bf16* const* values,
                    float* out, Ahead& ahead) {
    const int width = sizes.padded_dim / 16;
    for (int first = 0; first < width; first += 4) {
      with_columns(width - first, [&](auto columns) {
        weigh_columns<columns>(sizes, probabilities, values, first, out + first * 16, ahead);
      });
    }
  }

 private:
  // Brought closer with each product: a segment's keys and values are 16 and 8 lines a product.
  static constexpr int kKeyLines = 16, kValueLines = 8;

  template <typename Function>
  static void with_columns(int columns, Function&& function) {
    if (columns >= 4) return function(std::integral_constant<int, 4>());
    if (columns == 3) return function(std::integral_constant<int, 3>());
    if (columns == 2) return function(std::integral_constant<int, 2>());
    function(std::integral_constant<int, 1>());
  }

  // Calls function(column) with each column as a constant: tiles have no other names.
  template <int Columns, typename Function>
  static void for_each_column(Function&& function) {
    function(std::integral_constant<int, 0>());
    if constexpr (Columns > 1) function(std::integral_constant<int, 1>());
    if constexpr (Columns > 2) function(std::integral_constant<int, 2>());
    if constexpr (Columns > 3) function(std::integral_constant<int, 3>());
  }

  template <int Columns>
  static void score_pages(int padded_dim, const bf16* queries, const bf16* const* keys, float* out,
                          Ahead& ahead) {
    for_each_column<Columns>([](auto c) { zero_tile<c>(); });
    for (int dim = 0; dim < padded_dim; dim += 32) {
      load_tile<4>(queries + dim, padded_dim * sizeof(bf16));
      for_each_column<Columns>([&](auto c) {
        load_tile<5>(keys[c] + dim * kPageTokens, kTileRowBytes);
        multiply_tiles_bf16<c, 4, 5>();
        ahead.lines(kKeyLines);
      });
    }
    for_each_column<Columns>([&](auto c) { store_tile<c>(out + c * 16, kSegmentTokens * sizeof(float)); });
  }

  template <int Columns>
  static void weigh_columns(const ProductSizes& sizes, const bf16* probabilities, const bf16* const* values,
                            int first, float* out, Ahead& ahead) {
    const size_t stride = sizes.padded_dim * 2 * sizeof(bf16);
    for_each_column<Columns>([](auto c) { zero_tile<c>(); });
    for (int page = sizes.pages.begin; page < sizes.pages.end; ++page) {
      load_tile<6>(probabilities + page * kPageTokens, kSegmentTokens * sizeof(bf16));
      for_each_column<Columns>([&](auto c) {
        load_tile<7>(values[page] + (first + c) * 32, stride);
        multiply_tiles_bf16<c, 6, 7>();
        ahead.lines(kValueLines);
      });
    }
    for_each_column<Columns>([&](auto c) { store_tile<c>(out + c * 16, sizes.padded_dim * sizeof(float)); });
  }
};

}  // namespace ts

#endif
