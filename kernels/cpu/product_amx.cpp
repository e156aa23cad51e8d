#include "product_amx.h"

#if defined(__AMX_BF16__)

#include "tile_sums.h"

namespace ts {

namespace {

constexpr size_t kTileBytes = kTileRows * kTileRowBytes;

// Of a tile of up to 16 rows: 32 columns of all rows lie side by side.
struct RowTile {
  const uint8_t* first;
  size_t step;  // bytes from 32 columns to the next

  explicit RowTile(const uint8_t* begin, int rows) : first(begin), step(size_t(rows) * kTileRowBytes) {}
};

// Load a tile of what passes by, or of what stays in the first-level cache.
template <int Tile, bool Passing>
void load_tile_of(const uint8_t* rows) {
  Passing ? load_passing_tile<Tile>(rows, kTileRowBytes) : load_tile<Tile>(rows, kTileRowBytes);
}

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
//
// RowsPass: whether the activations pass by, or the weights.
template <int RowTiles, int Panels, bool RowsPass>
void multiply_columns(WeightTile& weights, Span columns, RowTile above, RowTile below, Meanwhile& meanwhile) {
  const uint8_t* panel = weights.panel(0) + size_t(columns.begin) * kPanelRows * sizeof(bf16);
  const size_t panel_stride = weights.stride();
  Prefetch prefetch = weights.prefetch();
  for (int column = columns.begin; column < columns.end; column += kColumnMultiple) {
    load_tile_of<6, !RowsPass>(panel);
    if constexpr (Panels == 2) load_tile_of<7, !RowsPass>(panel + panel_stride);
    load_tile_of<4, RowsPass>(above.first);
    multiply_tiles_bf16<0, 4, 6>();
    if constexpr (Panels == 2) multiply_tiles_bf16<1, 4, 7>();
    if constexpr (RowTiles == 2) {
      load_tile_of<5, RowsPass>(below.first);
      multiply_tiles_bf16<2, 5, 6>();
      if constexpr (Panels == 2) multiply_tiles_bf16<3, 5, 7>();
    }
    prefetch.step();
    meanwhile.step();
    panel += kTileBytes;
    above.first += above.step;
    below.first += below.step;
  }
  weights.prefetch() = prefetch;
}

template <int RowTiles, int Panels, bool RowsPass>
void compute_tile(WeightTile& weights, Span columns, RowTile above, RowTile below, float* sums,
                  Meanwhile& meanwhile) {
  columns.begin == 0 ? zero_sums<RowTiles, Panels>() : load_sums<RowTiles, Panels>(sums);
  multiply_columns<RowTiles, Panels, RowsPass>(weights, columns, above, below, meanwhile);
  store_sums<RowTiles, Panels>(sums);
}

using Kernel = void (*)(WeightTile&, Span, RowTile, RowTile, float*, Meanwhile&);

constexpr Kernel kKernels[2][2][2] = {  // [rows pass][row tiles - 1][panels - 1]
    {{compute_tile<1, 1, false>, compute_tile<1, 2, false>},
     {compute_tile<2, 1, false>, compute_tile<2, 2, false>}},
    {{compute_tile<1, 1, true>, compute_tile<1, 2, true>},
     {compute_tile<2, 1, true>, compute_tile<2, 2, true>}}};

}  // namespace

ProductAmx::ProductAmx(int columns, const Operand& x, Span rows, ProductScratch& scratch)
    : columns_(columns), rows_(rows) {
  scratch.rows.reserve(size_t(rows.end - rows.begin) * row_bytes() + kTileBytes);
  ordered_ = scratch.rows.bytes();
  for (int row = rows.begin; row < rows.end; row += kTileRows) {
    const size_t offset = size_t(row - rows.begin) * row_bytes();
    order_rows(x, {row, std::min(row + kTileRows, rows.end)}, scratch.rows.bytes() + offset);
  }
}

// A tile's rows as [columns / 32][rows][32]. A tile is loaded with 16 rows, be there so many or not: what is
// read behind the last row of 32 columns are the next ones, whose sums nobody looks at.
void ProductAmx::order_rows(const Operand& x, Span rows, uint8_t* out) const {
  const size_t step = size_t(rows.end - rows.begin) * kTileRowBytes;
  for (int i = 0; i < rows.end - rows.begin; ++i) {
    const bf16* row = x.bf16_row(rows.begin + i);
    uint8_t* to = out + size_t(i) * kTileRowBytes;
    for (int column = 0; column < columns_; column += kColumnMultiple, to += step) {
      std::memcpy(to, row + column, kTileRowBytes);
    }
  }
}

void ProductAmx::compute(WeightTile& weights, Span rows, Span columns, float* sums,
                         Meanwhile& meanwhile) const {
  const int count = rows.end - rows.begin, below = std::max(count - kTileRows, 0), above = count - below;
  const uint8_t* first = ordered_ + size_t(rows.begin - rows_.begin) * row_bytes();
  const uint8_t* second = first + size_t(above) * row_bytes();
  const size_t skipped = size_t(columns.begin) * sizeof(bf16);
  const bool rows_pass = rows_.end - rows_.begin > kRows;
  const Kernel kernel = kKernels[rows_pass][below > 0][weights.panels() - 1];
  kernel(weights, columns, RowTile(first + skipped * size_t(above), above),
         RowTile(second + skipped * size_t(below), below), sums, meanwhile);
}

}  // namespace ts

#endif
