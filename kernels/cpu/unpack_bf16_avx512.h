// Unpacking to bf16 where processors round to it in hardware: what every quantized weight goes through once
// per step if products are made by tiles.
//
// Bound by the two ports that do arithmetic on 512 bits: rounding 32 weights takes both for two cycles, and
// to widen, multiply and order them takes as long again. So what is tried here is to spend few instructions
// on the order.
#pragma once

#include <type_traits>

#include "unpack_lanes.h"

namespace ts {

// 32 floats as bf16, in that order.
inline __m512i narrow_both(__m512 first, __m512 last) { return (__m512i)_mm512_cvtne2ps_pbh(last, first); }

// 8 bits: floats are made in the order of pairs of columns, [16][2]: rows 0 to 7, then rows 8 to 15. Lanes
// for that, from one value per row:
struct PairLanes {
  __m512 low_rows, high_rows;

  explicit PairLanes(Lanes rows) {
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    low_rows = _mm512_permutexvar_ps(low, rows.values);
    high_rows = _mm512_permutexvar_ps(high, rows.values);
  }
};

// A float with this exponent and a byte q as its bits 8 to 15 is 2^15 + q.
constexpr int kByteFloat = 0x47000000;
constexpr float kByteFloatBase = 32768.0f;

// A quad so that each 128 bits hold rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9, since bytes move within 128 bits
// only.
inline __m512i load_spread_quad(const uint8_t* quants) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm512_permutexvar_epi64(order, _mm512_loadu_si512(quants));
}

// Of a spread quad, 2^15 + q of columns `column` and `column + 1`, of rows 0 to 7 or 8 to 15 (first_row).
template <int first_row, int column>
inline __m512 pairs_of_quad(__m512i spread) {
  constexpr int low = first_row + column, high = low + 4;  // of the lower one of two rows, and of the other
  const __m128i bytes =
      _mm_setr_epi8(0, low, 0, 0, 0, low + 1, 0, 0, 0, high, 0, 0, 0, high + 1, 0, 0);
  constexpr __mmask64 bits_8_to_15 = 0x2222222222222222;
  return _mm512_castsi512_ps(_mm512_mask_shuffle_epi8(_mm512_set1_epi32(kByteFloat), bits_8_to_15, spread,
                                                      _mm512_broadcast_i32x4(bytes)));
}

// Scales of q8 have 11 bits, so that scale (2^15 + q) - scale (2^15 + 128) is exact in one fma.
class ScaledBytes {
 public:
  explicit ScaledBytes(Lanes scales) : scale_(scales), offset_(scales * broadcast(-kByteFloatBase - 128)) {}

  __m512 low_rows(__m512 pairs) const { return _mm512_fmadd_ps(pairs, scale_.low_rows, offset_.low_rows); }
  __m512 high_rows(__m512 pairs) const { return _mm512_fmadd_ps(pairs, scale_.high_rows, offset_.high_rows); }

 private:
  PairLanes scale_, offset_;
};

// Any scale: two steps.
class ScaledBytesWide {
 public:
  explicit ScaledBytesWide(Lanes scales) : scale_(scales) {}

  __m512 low_rows(__m512 pairs) const { return centred(pairs) * scale_.low_rows; }
  __m512 high_rows(__m512 pairs) const { return centred(pairs) * scale_.high_rows; }

 private:
  static __m512 centred(__m512 pairs) { return pairs - _mm512_set1_ps(kByteFloatBase + 128); }

  PairLanes scale_;
};

template <Format format>
inline void unpack_bytes_bf16(const uint8_t* panel, int columns, int group, bf16* out) {
  using Scaled = std::conditional_t<has_wide_scales(format), ScaledBytesWide, ScaledBytes>;
  const Scaled scaled(load_group<format>(panel, columns, group).scale);
  constexpr int quads = group_columns(format) / 4;
  const uint8_t* quants = panel + size_t(group) * quads * kQuadBytes;
  for (int quad = 0; quad < quads; ++quad, out += 4 * kPanelRows) {
    const __m512i spread = load_spread_quad(quants + quad * kQuadBytes);
    _mm512_storeu_si512(out, narrow_both(scaled.low_rows(pairs_of_quad<0, 0>(spread)),
                                         scaled.high_rows(pairs_of_quad<8, 0>(spread))));
    _mm512_storeu_si512(out + 2 * kPanelRows, narrow_both(scaled.low_rows(pairs_of_quad<0, 2>(spread)),
                                                          scaled.high_rows(pairs_of_quad<8, 2>(spread))));
  }
}

// 4 bits: a lane is a row, and pairs are made afterwards. A nibble becomes a float by a table, which takes
// its index from the lowest four bits of a lane.
template <int shift>
inline __m512 weights_of_nibbles(__m512i quad, const GroupLanes& group) {
  const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512 q = _mm512_permutexvar_ps(_mm512_srli_epi32(quad, shift), numbers);
  return _mm512_fmadd_ps(q, group.scale.values, group.minimum.values);
}

// Two neighbouring columns, whose nibbles lie `shift` and `shift + 8` bits up.
template <int shift>
inline void store_nibble_pairs(__m512i quad, const GroupLanes& group, bf16* out) {
  const __m512i interleave =
      _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,  //
                       23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i columns =
      narrow_both(weights_of_nibbles<shift>(quad, group), weights_of_nibbles<shift + 8>(quad, group));
  _mm512_storeu_si512(out, _mm512_permutexvar_epi16(interleave, columns));
}

template <Format format>
inline void unpack_nibbles_bf16(const uint8_t* panel, int columns, int group, bf16* out) {
  const GroupLanes lanes = load_group<format>(panel, columns, group);
  const uint8_t* quants = panel + size_t(group) * quants_bytes(format);
  for (int j = 0; j < 4; ++j, out += 4 * kPanelRows) {
    const __m512i quad = _mm512_loadu_si512(quants + j * kQuadBytes);
    store_nibble_pairs<0>(quad, lanes, out);
    store_nibble_pairs<16>(quad, lanes, out + 2 * kPanelRows);
    store_nibble_pairs<4>(quad, lanes, out + 16 * kPanelRows);
    store_nibble_pairs<20>(quad, lanes, out + 18 * kPanelRows);
  }
}

// 32 columns, from 32 * block.
template <Format format>
inline void unpack_block_bf16_avx512(const uint8_t* panel, int columns, int block, bf16* out) {
  if constexpr (has_minima(format)) {
    unpack_nibbles_bf16<format>(panel, columns, block, out);
  } else {
    constexpr int groups = kColumnMultiple / group_columns(format);
    for (int part = 0; part < groups; ++part) {
      bf16* group_out = out + part * group_columns(format) * kPanelRows;
      unpack_bytes_bf16<format>(panel, columns, block * groups + part, group_out);
    }
  }
}

}  // namespace ts
