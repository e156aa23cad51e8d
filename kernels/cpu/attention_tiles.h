// The two products of attention, from tile registers.
#pragma once

#if defined(__AMX_BF16__)

#include "attention_products.h"
#include "tiles.h"

namespace ts {

// Tiles 0 to 3: sums. 4, 5: queries and keys. 6, 7: probabilities and values of one page, which take half a
// tile.
//
// Both products are done in steps, so that a thread's vector registers can work on one tile of rows while its
// tile registers work on others. Sums stay in tiles 0 to 3 from step to step: begin one product when the
// other has come to its end.
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

  // Queries times keys, four pages a step.
  class Scores {
   public:
    Scores() = default;
    // out: [rows][kSegmentTokens].
    Scores(const ProductSizes& sizes, const bf16* queries, const bf16* const* keys, float* out)
        : queries_(queries), keys_(keys), out_(out), dim_(sizes.padded_dim), pages_(sizes.pages) {}

    int steps() const { return (pages_.end - pages_.begin + 3) / 4; }

    void step(Ahead& ahead) {
      with_columns(pages_.end - pages_.begin, [&](auto columns) { multiply<columns>(ahead); });
      pages_.begin += 4;
    }

   private:
    template <int Columns>
    void multiply(Ahead& ahead) const {
      const bf16* const* keys = keys_ + pages_.begin;
      float* out = out_ + pages_.begin * kPageTokens;
      for_each_column<Columns>([](auto c) { zero_tile<c>(); });
      for (int dim = 0; dim < dim_; dim += 32) {
        load_tile<4>(queries_ + dim, dim_ * sizeof(bf16));
        for_each_column<Columns>([&](auto c) {
          load_tile<5>(keys[c] + dim * kPageTokens, kTileRowBytes);
          multiply_tiles_bf16<c, 4, 5>();
          ahead.lines(kKeyLines);
        });
      }
      for_each_column<Columns>([&](auto c) { store_tile<c>(out + c * 16, kSegmentTokens * sizeof(float)); });
    }

    const bf16* queries_ = nullptr;
    const bf16* const* keys_ = nullptr;
    float* out_ = nullptr;
    int dim_ = 0;
    Stretch pages_{0, 0};  // still to be multiplied
  };

  // Probabilities times values, one page and 64 numbers of it a step.
  class Weighed {
   public:
    Weighed() = default;
    // out: [rows][padded_dim].
    Weighed(const ProductSizes& sizes, const bf16* probabilities, const bf16* const* values, float* out)
        : probabilities_(probabilities),
          values_(values),
          out_(out),
          dim_(sizes.padded_dim),
          pages_(sizes.pages),
          page_(sizes.pages.begin) {}

    int steps() const { return (pages_.end - pages_.begin) * ((dim_ / 16 + 3) / 4); }

    void step(Ahead& ahead) {
      with_columns(dim_ / 16 - first_, [&](auto columns) { multiply<columns>(ahead); });
    }

   private:
    template <int Columns>
    void multiply(Ahead& ahead) {
      if (page_ == pages_.begin) for_each_column<Columns>([](auto c) { zero_tile<c>(); });
      const bf16* values = values_[page_] + first_ * 32;
      load_tile<6>(probabilities_ + page_ * kPageTokens, kSegmentTokens * sizeof(bf16));
      for_each_column<Columns>([&](auto c) {
        load_tile<7>(values + c * 32, dim_ * 2 * sizeof(bf16));
        multiply_tiles_bf16<c, 6, 7>();
        ahead.lines(kValueLines);
      });
      if (++page_ < pages_.end) return;
      float* out = out_ + first_ * 16;
      for_each_column<Columns>([&](auto c) { store_tile<c>(out + c * 16, dim_ * sizeof(float)); });
      page_ = pages_.begin;
      first_ += 4;
    }

    const bf16* probabilities_ = nullptr;
    const bf16* const* values_ = nullptr;
    float* out_ = nullptr;
    int dim_ = 0;
    Stretch pages_{0, 0};
    int page_ = 0, first_ = 0;  // what comes next; `first_` in sixteens of the values' numbers
  };

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
};

}  // namespace ts

#endif
