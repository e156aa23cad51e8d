// Lanes in one register of AVX-512. What they mean: lanes.h.
#pragma once

#include "intrinsics.h"
#include "numbers.h"

namespace ts {

struct Lanes {
  __m512 values;
};

inline Lanes zero() { return {_mm512_setzero_ps()}; }
inline Lanes broadcast(float value) { return {_mm512_set1_ps(value)}; }

inline Lanes load(const float* values) { return {_mm512_loadu_ps(values)}; }
inline void store(float* out, Lanes a) { _mm512_storeu_ps(out, a.values); }

inline __m512i indices() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline __mmask16 below(int count) { return _mm512_cmplt_epi32_mask(indices(), _mm512_set1_epi32(count)); }

inline Lanes load_first(const float* values, int count) {
  return {_mm512_maskz_loadu_ps(below(count), values)};
}
inline void store_first(float* out, Lanes a, int count) {
  _mm512_mask_storeu_ps(out, below(count), a.values);
}

// 16 values of bf16, one in each half word.
inline Lanes widen_bf16(__m256i values) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16))};
}

inline __m256i narrow_bf16(Lanes a) {
#if defined(__AVX512BF16__)
  // Takes denormal numbers (below 1.2e-38) for zeros.
  return (__m256i)_mm512_cvtneps_pbh(a.values);
#else
  // As to_bf16 in numbers.h.
  const __m512i bits = _mm512_castps_si512(a.values);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i tie = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.values, a.values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
#endif
}

inline Lanes load_bf16(const bf16* values) { return widen_bf16(_mm256_loadu_si256((const __m256i*)values)); }
inline void store_bf16(bf16* out, Lanes a) { _mm256_storeu_si256((__m256i*)out, narrow_bf16(a)); }

inline Lanes load_first_bf16(const bf16* values, int count) {
  return widen_bf16(_mm256_maskz_loadu_epi16(below(count), values));
}
inline void store_first_bf16(bf16* out, Lanes a, int count) {
  _mm256_mask_storeu_epi16(out, below(count), narrow_bf16(a));
}

inline void load_bf16_pairs(const bf16* values, Lanes& even, Lanes& odd) {
  const __m512i pairs = _mm512_loadu_si512(values);
  even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
  odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000))))};
}

inline Lanes load_fp16(const fp16* values) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)values))};
}
inline Lanes load_u8(const uint8_t* values) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)values)))};
}
inline Lanes load_i8(const int8_t* values) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)values)))};
}
inline void store_i8(int8_t* out, Lanes a) {
  _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.values)));
}

inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.values, b.values)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.values, b.values)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.values, b.values)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.values, b.values)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.values, b.values, c.values)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.values, b.values)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.values, b.values)}; }
inline Lanes abs(Lanes a) { return {_mm512_abs_ps(a.values)}; }
inline Lanes copy_sign(Lanes a, Lanes sign) {
  return {_mm512_or_ps(_mm512_abs_ps(a.values), _mm512_and_ps(sign.values, _mm512_set1_ps(-0.0f)))};
}
inline Lanes round(Lanes a) {
  return {_mm512_roundscale_ps(a.values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Lanes scale_by_power_of_two(Lanes x, Lanes n) { return {_mm512_scalef_ps(x.values, n.values)}; }
inline Lanes fraction(Lanes a) {
  return {_mm512_reduce_ps(a.values, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
}
// The instruction rounds down by itself.
inline Lanes scale_by_floor(Lanes x, Lanes n) { return scale_by_power_of_two(x, n); }

inline Lanes select_below(int count, Lanes a, Lanes b) {
  return {_mm512_mask_blend_ps(below(count), b.values, a.values)};
}

inline Lanes swap_halves(Lanes a) { return {_mm512_shuffle_f32x4(a.values, a.values, 0x4e)}; }
// 1 / a within 1e-4 of it (relative); of infinity 0.
inline Lanes reciprocal_coarse(Lanes a) { return {_mm512_rcp14_ps(a.values)}; }
inline Lanes low_halves(Lanes a, Lanes b) { return {_mm512_shuffle_f32x4(a.values, b.values, 0x44)}; }
inline Lanes high_halves(Lanes a, Lanes b) { return {_mm512_shuffle_f32x4(a.values, b.values, 0xee)}; }

inline float sum(Lanes a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.values), _mm512_extractf32x8_ps(a.values, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float highest(Lanes a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.values), _mm512_extractf32x8_ps(a.values, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline bool any_reaches(Lanes a, float bound) {
  return _mm512_cmp_ps_mask(a.values, _mm512_set1_ps(bound), _CMP_GE_OQ) != 0;
}

inline void store_low_half(float* out, Lanes a) { _mm256_storeu_ps(out, _mm512_castps512_ps256(a.values)); }
inline void store_low_half_bf16(bf16* out, Lanes a) {
  _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(narrow_bf16(a)));
}

}  // namespace ts
