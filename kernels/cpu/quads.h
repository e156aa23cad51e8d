// Quants of 16 rows and 4 neighbouring columns, [16][4] bytes, as they lie in q8 and q4 panels: a double word
// per row, so that a column is a field of bits that is the same for all lanes.
#pragma once

#include "lanes.h"

namespace ts {

constexpr int kQuadBytes = 64;

#if defined(__AVX512F__)

using Quad = __m512i;

inline Quad load_quad(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }

// Bits [shift, shift + width) of each row, as floats.
template <int shift, int width>
inline Lanes bits_of_quad(Quad quad) {
  const __m512i field =
      _mm512_and_si512(_mm512_srli_epi32(quad, shift), _mm512_set1_epi32((1 << width) - 1));
  return {_mm512_cvtepi32_ps(field)};
}

#elif defined(__AVX2__)

struct Quad {
  __m256i low, high;  // rows 0 to 7, 8 to 15
};

inline Quad load_quad(const uint8_t* bytes) {
  return {_mm256_loadu_si256((const __m256i*)bytes), _mm256_loadu_si256((const __m256i*)(bytes + 32))};
}

template <int shift, int width>
inline Lanes bits_of_quad(Quad quad) {
  const __m256i mask = _mm256_set1_epi32((1 << width) - 1);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(quad.low, shift), mask)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(quad.high, shift), mask))};
}

#else

struct Quad {
  const uint8_t* bytes;
};

inline Quad load_quad(const uint8_t* bytes) { return {bytes}; }

template <int shift, int width>
inline Lanes bits_of_quad(Quad quad) {
  return each([=](int row) {
    return float((quad.bytes[4 * row + shift / 8] >> (shift % 8)) & ((1 << width) - 1));
  });
}

#endif

}  // namespace ts
