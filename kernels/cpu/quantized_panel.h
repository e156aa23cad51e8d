// A panel of quants as the int8 products read it.
#pragma once

#include "format.h"

#if defined(__AVX512VNNI__)

#include "intrinsics.h"

namespace ts {

template <Format format>
class QuantizedPanel {
 public:
  // Groups of the format in 32 columns.
  static constexpr size_t kParts = kColumnMultiple / group_columns(format);

  // columns: padded.
  QuantizedPanel(const uint8_t* panel, int columns)
      : quants_(panel),
        scales_(panel + scales_offset(format, columns)),
        minima_(panel + minima_offset(format, columns)) {}

  // Below, a block is 32 columns.
  const uint8_t* quants(size_t block) const { return quants_ + block * quants_bytes(format); }
  __m512 scales(size_t block, size_t part) const {
    return load(scales_ + (block * kParts + part) * kRowBytes);
  }
  __m512 minima(size_t block) const { return load(minima_ + block * kRowBytes); }

 private:
  static constexpr size_t kRowBytes = kPanelRows * scale_bytes(format);

  static __m512 load(const uint8_t* values) {
    if constexpr (has_wide_scales(format)) {
      return _mm512_load_ps(values);
    } else {
      return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(values)));
    }
  }

  const uint8_t* quants_;
  const uint8_t* scales_;
  const uint8_t* minima_;
};

}  // namespace ts

#endif
