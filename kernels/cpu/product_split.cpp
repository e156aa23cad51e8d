#include "product_split.h"

#if defined(__AMX_BF16__)

#include "tile_sums.h"

namespace ts {

namespace {

// High parts of 32 columns, then low ones: of activations as of weights.
constexpr size_t kLowPart = kTileRows * kTileRowBytes;
constexpr size_t kStep = 2 * kLowPart;

template <int RowTiles, int Panels>
void multiply_parts() {
  multiply_tiles_bf16<0, 4, 6>();
  if constexpr (Panels == 2) multiply_tiles_bf16<1, 4, 7>();
  if constexpr (RowTiles == 2) multiply_tiles_bf16<2, 5, 6>();
  if constexpr (RowTiles == 2 && Panels == 2) multiply_tiles_bf16<3, 5, 7>();
}

// Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
template <int RowTiles, int Panels>
void multiply_columns(WeightTile& weights, Span columns, const uint8_t* above, const uint8_t* below,
                      Meanwhile& meanwhile) {
  const uint8_t* panel = weights.panel(0) + size_t(columns.begin / kColumnMultiple) * kStep;
  const size_t panel_stride = weights.stride();
  Prefetch prefetch = weights.prefetch();
  for (int column = columns.begin; column < columns.end; column += kColumnMultiple) {
    load_tile<4>(above, kTileRowBytes);
    if constexpr (RowTiles == 2) load_tile<5>(below, kTileRowBytes);
    load_tile<6>(panel + kLowPart, kTileRowBytes);
    if constexpr (Panels == 2) load_tile<7>(panel + panel_stride + kLowPart, kTileRowBytes);
    multiply_parts<RowTiles, Panels>();  // high low
    load_tile<6>(panel, kTileRowBytes);
    if constexpr (Panels == 2) load_tile<7>(panel + panel_stride, kTileRowBytes);
    multiply_parts<RowTiles, Panels>();  // high high
    load_tile<4>(above + kLowPart, kTileRowBytes);
    if constexpr (RowTiles == 2) load_tile<5>(below + kLowPart, kTileRowBytes);
    multiply_parts<RowTiles, Panels>();  // low high
    prefetch.step();
    meanwhile.step();
    panel += kStep, above += kStep, below += kStep;
  }
  weights.prefetch() = prefetch;
}

template <int RowTiles, int Panels>
void compute_tile(WeightTile& weights, Span columns, const uint8_t* above, const uint8_t* below, float* sums,
                  Meanwhile& meanwhile) {
  columns.begin == 0 ? zero_sums<RowTiles, Panels>() : load_sums<RowTiles, Panels>(sums);
  multiply_columns<RowTiles, Panels>(weights, columns, above, below, meanwhile);
  store_sums<RowTiles, Panels>(sums);
}

using Kernel = void (*)(WeightTile&, Span, const uint8_t*, const uint8_t*, float*, Meanwhile&);

constexpr Kernel kKernels[2][2] = {  // [row tiles - 1][panels - 1]
    {compute_tile<1, 1>, compute_tile<1, 2>},
    {compute_tile<2, 1>, compute_tile<2, 2>}};

}  // namespace

void ProductSplit::compute(WeightTile& weights, Span rows, Span columns, float* sums,
                           Meanwhile& meanwhile) const {
  const bool two = rows.end - rows.begin > kTileRows;
  const size_t skipped = size_t(columns.begin / kColumnMultiple) * kStep;
  const uint8_t* above = x_.split_tile(rows.begin) + skipped;
  const uint8_t* below = two ? x_.split_tile(rows.begin + kTileRows) + skipped : above;
  kKernels[two][weights.panels() - 1](weights, columns, above, below, sums, meanwhile);
}

}  // namespace ts

#endif
