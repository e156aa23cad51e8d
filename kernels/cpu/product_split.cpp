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

// Two tiles of activations and two of weights.
struct Parts {
  const uint8_t *above, *below, *panel;
  size_t panel_stride;
};

// 32 columns. Tiles 0 to 3 are sums, 4 and 5 activations, 6 and 7 weights.
template <int RowTiles, int Panels>
void multiply_step(const Parts& parts) {
  load_tile<4>(parts.above, kTileRowBytes);
  if constexpr (RowTiles == 2) load_tile<5>(parts.below, kTileRowBytes);
  load_tile<6>(parts.panel + kLowPart, kTileRowBytes);
  if constexpr (Panels == 2) load_tile<7>(parts.panel + parts.panel_stride + kLowPart, kTileRowBytes);
  multiply_parts<RowTiles, Panels>();  // high low
  load_tile<6>(parts.panel, kTileRowBytes);
  if constexpr (Panels == 2) load_tile<7>(parts.panel + parts.panel_stride, kTileRowBytes);
  multiply_parts<RowTiles, Panels>();  // high high
  load_tile<4>(parts.above + kLowPart, kTileRowBytes);
  if constexpr (RowTiles == 2) load_tile<5>(parts.below + kLowPart, kTileRowBytes);
  multiply_parts<RowTiles, Panels>();  // low high
}

void next_step(Parts& parts) { parts.above += kStep, parts.below += kStep, parts.panel += kStep; }

// A tile that is stored now and then, for nobody, makes products of 384 columns 10 to 20 % faster (measured). Perhaps
// because the stores behind the last column then wait for few products that are still on their way.
struct ShortQueue {
  alignas(64) uint8_t nowhere[kLowPart];

  void keep() { store_tile<4>(nowhere, kTileRowBytes); }
};

template <int RowTiles, int Panels>
void multiply_columns(WeightTile& weights, Span columns, Parts parts, Meanwhile& meanwhile) {
  Prefetch prefetch = weights.prefetch();
  ShortQueue queue;
  for (int column = columns.begin; column < columns.end; column += kColumnMultiple, next_step(parts)) {
    multiply_step<RowTiles, Panels>(parts);
    queue.keep();
    prefetch.step();
    meanwhile.step();
  }
  weights.prefetch() = prefetch;
}

template <int RowTiles, int Panels>
void compute_tile(WeightTile& weights, Span columns, const Parts& parts, float* sums, Meanwhile& meanwhile) {
  columns.begin == 0 ? zero_sums<RowTiles, Panels>() : load_sums<RowTiles, Panels>(sums);
  multiply_columns<RowTiles, Panels>(weights, columns, parts, meanwhile);
  store_sums<RowTiles, Panels>(sums);
}

using Kernel = void (*)(WeightTile&, Span, const Parts&, float*, Meanwhile&);

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
  const Parts parts = {above, below, weights.panel(0) + skipped, weights.stride()};
  kKernels[two][weights.panels() - 1](weights, columns, parts, sums, meanwhile);
}

namespace {

template <int RowTiles, int Panels>
void multiply_into(Parts parts, int columns, float* out, size_t stride) {
  ShortQueue queue;
  zero_sums<RowTiles, Panels>();
  for (int column = 0; column < columns; column += kColumnMultiple, next_step(parts)) {
    multiply_step<RowTiles, Panels>(parts);
    if (column + kColumnMultiple < columns) queue.keep();
  }
  store_sums<RowTiles, Panels>(out, stride);
}

template <int RowTiles>
void multiply_panels(const Matrix& matrix, Parts parts, float* out, size_t stride) {
  int panels = matrix.panels();
  for (; panels >= 2; panels -= 2, parts.panel += 2 * parts.panel_stride, out += 2 * kPanelRows)
    multiply_into<RowTiles, 2>(parts, matrix.columns, out, stride);
  if (panels == 1) multiply_into<RowTiles, 1>(parts, matrix.columns, out, stride);
}

}  // namespace

void multiply_split(const Matrix& matrix, const Operand& x, int rows, float* out, size_t stride) {
  const Parts parts = {x.split_tile(0), x.split_tile(kTileRows), matrix.segments[0].memory.bytes(),
                       panel_bytes(Format::split, matrix.columns)};
  rows > kTileRows ? multiply_panels<2>(matrix, parts, out, stride) : multiply_panels<1>(matrix, parts, out, stride);
}

}  // namespace ts

#endif
