#include "product_int8_amx.h"

#if defined(__AMX_INT8__)

#include <cstring>

#include "intrinsics.h"
#include "quantized_panel.h"

namespace ts {

namespace {

constexpr int kBlockBytes = kColumnMultiple * kPanelRows;  // unpacked quants of 32 columns

// Blocks of 32 columns that are multiplied before the first of them is added up.
constexpr int kUnderWay = 4;
// Weights are unpacked so many blocks before they are multiplied: a tile cannot be loaded from stores that
// are still under way.
constexpr int kBlocksAhead = 3;

// 32 columns as they lie in a panel to one signed quant in a byte: [8][16][4].
template <Format format>
inline void unpack_quants(const uint8_t* quants, uint8_t* out) {
  if constexpr (has_minima(format)) {
    const __m512i low = _mm512_set1_epi8(15);
    for (int i = 0; i < kBlockBytes / 2; i += 64) {
      const __m512i two = _mm512_load_si512(quants + i);
      _mm512_store_si512(out + i, _mm512_and_si512(two, low));
      _mm512_store_si512(out + i + kBlockBytes / 2, _mm512_and_si512(_mm512_srli_epi16(two, 4), low));
    }
  } else {
    const __m512i middle = _mm512_set1_epi8(-128);
    for (int i = 0; i < kBlockBytes; i += 64) {
      _mm512_store_si512(out + i, _mm512_xor_si512(_mm512_load_si512(quants + i), middle));
    }
  }
}

// A panel whose blocks are unpacked a little before they are asked for, or were in an earlier pass.
template <Format format>
class UnpackedBlocks {
 public:
  UnpackedBlocks(const QuantizedPanel<format>& panel, int begin, int end, bool unpacks, uint8_t* memory)
      : panel_(panel), begin_(begin), end_(end), reached_(unpacks ? begin : end), memory_(memory) {}

  const uint8_t* block(int index) {
    for (const int stop = std::min(index + kBlocksAhead, end_); reached_ < stop; ++reached_) {
      unpack_quants<format>(panel_.quants(size_t(reached_)), at(reached_));
    }
    return at(index);
  }

 private:
  uint8_t* at(int index) const { return memory_ + size_t(index - begin_) * kBlockBytes; }

  const QuantizedPanel<format>& panel_;
  const int begin_, end_;
  int reached_;
  uint8_t* const memory_;
};

// Sums of one tile product: [rows][16].
struct alignas(64) Dots {
  int32_t sums[kTileRows][kPanelRows];
};

// Which tile holds what: the processor renames them as it goes.
constexpr int kSums = 0, kRows = 1, kWeights = 2;

template <Format format>
inline void multiply_block(const RowBlock& rows, const uint8_t* weights, Dots* out) {
  constexpr int parts = int(QuantizedPanel<format>::kParts);
  for (int part = 0; part < parts; ++part) {
    zero_tile<kSums>();
    load_tile<kRows>(&rows.quants[0][part * group_columns(format)], kColumnMultiple);
    load_tile<kWeights>(weights + part * kBlockBytes / parts, kTileRowBytes);
    multiply_tiles_int8<kSums, kRows, kWeights>();
    store_tile<kSums>(out[part].sums, sizeof out[part].sums[0]);
  }
}

template <Format format, int Rows>
inline void add_block(const QuantizedPanel<format>& panel, int block, const RowBlock& rows, const Dots* dots,
                      __m512 (&totals)[Rows]) {
  for (size_t part = 0; part < QuantizedPanel<format>::kParts; ++part) {
    const __m512 scales = panel.scales(size_t(block), part);
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dots[part].sums[row]));
      const __m512 scaled = _mm512_mul_ps(dot, _mm512_set1_ps(rows.scales[row]));
      totals[row] = _mm512_fmadd_ps(scaled, scales, totals[row]);
    }
  }
  if constexpr (has_minima(format)) {
    const __m512 minima = panel.minima(size_t(block));
#pragma GCC unroll 16
    for (int row = 0; row < Rows; ++row) {
      totals[row] = _mm512_fmadd_ps(minima, _mm512_set1_ps(rows.sums[row]), totals[row]);
    }
  }
}

// Up to Rows rows by a panel. unpacks: in the first pass of rows.
template <Format format, int Rows>
void compute_tile(WeightTile& weights, Span columns, const RowBlock* rows, bool unpacks, uint8_t* unpacked,
                  float* sums) {
  const QuantizedPanel<format> panel(weights.panel(0), weights.columns());
  const int begin = columns.begin / kColumnMultiple, end = columns.end / kColumnMultiple;
  UnpackedBlocks<format> blocks(panel, begin, end, unpacks, unpacked);
  Dots dots[kUnderWay][QuantizedPanel<format>::kParts];
  Prefetch prefetch = weights.prefetch();
  __m512 totals[Rows];
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) {
    totals[row] = begin == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + row * kPanelRows);
  }
  for (int block = begin; block < std::min(begin + kUnderWay, end); ++block) {
    multiply_block<format>(rows[block], blocks.block(block), dots[block % kUnderWay]);
  }
  for (int block = begin; block < end; ++block) {
    add_block<format, Rows>(panel, block, rows[block], dots[block % kUnderWay], totals);
    prefetch.step();
    const int next = block + kUnderWay;
    if (next < end) multiply_block<format>(rows[next], blocks.block(next), dots[block % kUnderWay]);
  }
  weights.prefetch() = prefetch;
#pragma GCC unroll 16
  for (int row = 0; row < Rows; ++row) _mm512_storeu_ps(sums + row * kPanelRows, totals[row]);
}

using Kernel = void (*)(WeightTile&, Span, const RowBlock*, bool, uint8_t*, float*);

template <Format format>
Kernel kernel_for(int rows) {
  static constexpr Kernel kernels[] = {compute_tile<format, 4>, compute_tile<format, 8>,
                                       compute_tile<format, 12>, compute_tile<format, 16>};
  return kernels[(rows - 1) / 4];
}

Kernel kernel_for(Format format, int rows) {
  switch (format) {
    case Format::q8: return kernel_for<Format::q8>(rows);
    case Format::q8_16: return kernel_for<Format::q8_16>(rows);
    case Format::q4: return kernel_for<Format::q4>(rows);
    default: return kernel_for<Format::q4_wide>(rows);
  }
}

TileSizes tile_sizes(Format format) {
  TileSizes sizes;
  sizes.row_bytes[kRows] = uint16_t(group_columns(format));
  sizes.rows[kWeights] = uint8_t(group_columns(format) / 4);
  return sizes;
}

}  // namespace

ProductInt8Amx::ProductInt8Amx(Format format, int columns, const Operand& x, Span rows,
                               ProductScratch& scratch)
    : format_(format), blocks_(columns / kColumnMultiple), first_row_(rows.begin) {
  const int tiles = (rows.end - rows.begin + kTileRows - 1) / kTileRows;
  scratch.rows.reserve(size_t(tiles) * size_t(blocks_) * sizeof(RowBlock));
  scratch.weights.reserve(size_t(blocks_) * kBlockBytes);
  unpacked_ = scratch.weights.bytes();
  RowBlock* ordered = scratch.rows.as<RowBlock>();
  ordered_ = ordered;
  for (int row = rows.begin; row < rows.end; row += kTileRows, ordered += blocks_) {
    order_rows(x, {row, std::min(row + kTileRows, rows.end)}, ordered);
  }
  configure_tiles(tile_sizes(format));
}

// What the memory holds for rows that are not there is multiplied too, and nobody looks at it.
void ProductInt8Amx::order_rows(const Operand& x, Span rows, RowBlock* out) const {
  for (int row = rows.begin; row < rows.end; ++row) {
    const int8_t* quants = x.int8_row(row);
    const GroupScale* scales = x.scales_row(row);
    const int place = row - rows.begin;
    for (int block = 0; block < blocks_; ++block) {
      std::memcpy(out[block].quants[place], quants + block * kColumnMultiple, kColumnMultiple);
      out[block].scales[place] = scales[block].scale;
      out[block].sums[place] = scales[block].scale * float(scales[block].sum);
    }
  }
}

void ProductInt8Amx::compute(WeightTile& weights, Span rows, Span columns, float* sums,
                             Meanwhile&) const {
  const RowBlock* ordered = ordered_ + size_t((rows.begin - first_row_) / kTileRows) * size_t(blocks_);
  kernel_for(format_, rows.end - rows.begin)(weights, columns, ordered, rows.begin == first_row_, unpacked_,
                                             sums);
}

}  // namespace ts

#endif
