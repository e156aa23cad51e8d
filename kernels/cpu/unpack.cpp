#include "unpack.h"

#include <algorithm>

#include "unpack_lanes.h"
#if defined(__AVX512BF16__)
#include "unpack_bf16_avx512.h"
#endif

namespace ts {

namespace {

constexpr size_t kCacheLineBytes = 64;

// Writes 32 columns of floats as columns of bf16, [16][16][2].
inline void pair_columns(const float* values, bf16* out) {
  for (int pair = 0; pair < kColumnMultiple / 2; ++pair) {
    for (int row = 0; row < kPanelRows; ++row) {
      *out++ = to_bf16(values[2 * pair * kPanelRows + row]);
      *out++ = to_bf16(values[(2 * pair + 1) * kPanelRows + row]);
    }
  }
}

template <Format format>
inline void unpack_block_f32(const uint8_t* panel, int columns, int block, float* out) {
  unpack_columns<format>(panel, columns, block,
                         [=](int column, Lanes weights) { store(out + column * kPanelRows, weights); });
}

template <Format format>
inline void unpack_block_bf16(const uint8_t* panel, int columns, int block, bf16* out) {
#if defined(__AVX512BF16__)
  unpack_block_bf16_avx512<format>(panel, columns, block, out);
#else
  alignas(64) float values[kColumnMultiple * kPanelRows];
  unpack_block_f32<format>(panel, columns, block, values);
  pair_columns(values, out);
#endif
}

template <Format format>
void unpack_quants(const uint8_t* panel, int columns, Format form, uint8_t* out, const uint8_t* next) {
  const int blocks = columns / kColumnMultiple;
  const size_t block_bytes = panel_bytes(format, columns) / size_t(blocks);
  for (int block = 0; block < blocks; ++block) {
    if (next) {
      const uint8_t* ahead = next + size_t(block) * block_bytes;
      for (size_t byte = 0; byte < block_bytes; byte += kCacheLineBytes) {
        __builtin_prefetch(ahead + byte, 0, 2);
      }
    }
    const size_t values = size_t(block) * kColumnMultiple * kPanelRows;
    if (form == Format::bf16) {
      unpack_block_bf16<format>(panel, columns, block, reinterpret_cast<bf16*>(out) + values);
    } else {
      unpack_block_f32<format>(panel, columns, block, reinterpret_cast<float*>(out) + values);
    }
  }
}

// f32 as bf16.
void narrow(const uint8_t* panel, int columns, uint8_t* out) {
  const float* values = reinterpret_cast<const float*>(panel);
  for (int column = 0; column < columns; column += kColumnMultiple) {
    pair_columns(values + column * kPanelRows, reinterpret_cast<bf16*>(out) + column * kPanelRows);
  }
}

// bf16 as f32.
void widen(const uint8_t* panel, int columns, uint8_t* out) {
  const bf16* pairs = reinterpret_cast<const bf16*>(panel);
  float* values = reinterpret_cast<float*>(out);
  for (int column = 0; column < columns; column += 2) {
    Lanes even, odd;
    load_bf16_pairs(pairs + column * kPanelRows, even, odd);
    store(values + column * kPanelRows, even);
    store(values + (column + 1) * kPanelRows, odd);
  }
}

}  // namespace

void unpack_panel(Format format, const uint8_t* panel, int columns, Format form, uint8_t* out,
                  const uint8_t* next) {
  if (format == form) {
    std::copy_n(panel, panel_bytes(format, columns), out);
    return;
  }
  switch (format) {
    case Format::f32: return narrow(panel, columns, out);
    case Format::bf16: return widen(panel, columns, out);
    case Format::q8: return unpack_quants<Format::q8>(panel, columns, form, out, next);
    case Format::q8_16: return unpack_quants<Format::q8_16>(panel, columns, form, out, next);
    case Format::q4: return unpack_quants<Format::q4>(panel, columns, form, out, next);
    case Format::q4_wide: return unpack_quants<Format::q4_wide>(panel, columns, form, out, next);
  }
}

}  // namespace ts
