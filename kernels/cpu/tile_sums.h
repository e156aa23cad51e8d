// The sums of a product by tiles: two tiles of rows by two panels at most, in tiles 0 to 3, [row tile][panel].
#pragma once

#if defined(__AMX_BF16__)

#include "format.h"
#include "tiles.h"

namespace ts {

// In memory: [rows][2 panels][16].
constexpr size_t kSumsStride = 2 * kPanelRows * sizeof(float);
constexpr size_t kSumsTile = size_t(kTileRows) * 2 * kPanelRows;  // floats

template <int RowTiles, int Panels>
void zero_sums() {
  zero_tile<0>();
  if constexpr (Panels == 2) zero_tile<1>();
  if constexpr (RowTiles == 2) zero_tile<2>();
  if constexpr (RowTiles == 2 && Panels == 2) zero_tile<3>();
}

template <int RowTiles, int Panels>
void load_sums(const float* sums) {
  load_tile<0>(sums, kSumsStride);
  if constexpr (Panels == 2) load_tile<1>(sums + kPanelRows, kSumsStride);
  if constexpr (RowTiles == 2) load_tile<2>(sums + kSumsTile, kSumsStride);
  if constexpr (RowTiles == 2 && Panels == 2) load_tile<3>(sums + kSumsTile + kPanelRows, kSumsStride);
}

// Rows lie `stride` floats apart.
template <int RowTiles, int Panels>
void store_sums(float* sums, size_t stride = 2 * kPanelRows) {
  const size_t bytes = stride * sizeof(float), tile = kTileRows * stride;
  store_tile<0>(sums, bytes);
  if constexpr (Panels == 2) store_tile<1>(sums + kPanelRows, bytes);
  if constexpr (RowTiles == 2) store_tile<2>(sums + tile, bytes);
  if constexpr (RowTiles == 2 && Panels == 2) store_tile<3>(sums + tile + kPanelRows, bytes);
}

}  // namespace ts

#endif
