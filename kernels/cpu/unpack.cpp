#include "unpack.h"

#include <cstring>

#include "unpack_lanes.h"

namespace ts {

namespace {

constexpr size_t kCacheLineBytes = 64;

template <Format format>
void unpack_quants(const uint8_t* panel, int columns, float* out, const uint8_t* next) {
  const int blocks = columns / kColumnMultiple;
  const size_t block_bytes = panel_bytes(format, columns) / size_t(blocks);
  for (int block = 0; block < blocks; ++block, out += kColumnMultiple * kPanelRows) {
    if (next) {
      const uint8_t* ahead = next + size_t(block) * block_bytes;
      for (size_t byte = 0; byte < block_bytes; byte += kCacheLineBytes) {
        __builtin_prefetch(ahead + byte, 0, 2);
      }
    }
    unpack_columns<format>(panel, columns, block,
                           [=](int column, Lanes weights) { store(out + column * kPanelRows, weights); });
  }
}

// bf16 as f32.
void widen(const uint8_t* panel, int columns, float* values) {
  const bf16* pairs = reinterpret_cast<const bf16*>(panel);
  for (int column = 0; column < columns; column += 2) {
    Lanes even, odd;
    load_bf16_pairs(pairs + column * kPanelRows, even, odd);
    store(values + column * kPanelRows, even);
    store(values + (column + 1) * kPanelRows, odd);
  }
}

// split as f32: exact.
void join(const uint8_t* panel, int columns, float* values) {
  constexpr int kHalf = kColumnMultiple * kPanelRows;
  const bf16* high = reinterpret_cast<const bf16*>(panel);
  for (int column = 0; column < columns; column += 2, high += 2 * kPanelRows) {
    if (column > 0 && column % kColumnMultiple == 0) high += kHalf;
    Lanes even, odd, low_even, low_odd;
    load_bf16_pairs(high, even, odd);
    load_bf16_pairs(high + kHalf, low_even, low_odd);
    store(values + column * kPanelRows, even + low_even);
    store(values + (column + 1) * kPanelRows, odd + low_odd);
  }
}

}  // namespace

void unpack_panel(Format format, const uint8_t* panel, int columns, float* out, const uint8_t* next) {
  switch (format) {
    case Format::f32: std::memcpy(out, panel, panel_bytes(format, columns)); return;
    case Format::bf16: return widen(panel, columns, out);
    case Format::q8: return unpack_quants<Format::q8>(panel, columns, out, next);
    case Format::q8_16: return unpack_quants<Format::q8_16>(panel, columns, out, next);
    case Format::q4: return unpack_quants<Format::q4>(panel, columns, out, next);
    case Format::q4_wide: return unpack_quants<Format::q4_wide>(panel, columns, out, next);
    case Format::split: return join(panel, columns, out);
  }
}

}  // namespace ts
