// Lanes in two registers of AVX2. What they mean: lanes.h.
#pragma once

#include "intrinsics.h"
#include "numbers.h"

namespace ts {

struct Lanes {
  __m256 low, high;  // lanes 0 to 7, 8 to 15
};

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }

inline Lanes load(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
inline void store(float* out, Lanes a) {
  _mm256_storeu_ps(out, a.low);
  _mm256_storeu_ps(out + 8, a.high);
}

// All ones in lane i if first + i < count.
inline __m256i below(int first, int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count - first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline Lanes load_first(const float* values, int count) {
  return {_mm256_maskload_ps(values, below(0, count)), _mm256_maskload_ps(values + 8, below(8, count))};
}
inline void store_first(float* out, Lanes a, int count) {
  _mm256_maskstore_ps(out, below(0, count), a.low);
  _mm256_maskstore_ps(out + 8, below(8, count), a.high);
}

// 8 integers as floats with these bits, moved up by 16.
inline __m256 upper_half(__m256i values) { return _mm256_castsi256_ps(_mm256_slli_epi32(values, 16)); }

// Of 8 floats, the bits of to_bf16 in numbers.h.
inline __m256i rounded_upper_half(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i high = _mm256_srli_epi32(bits, 16);
  const __m256i tie = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(tie, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

inline __m256i narrow_bf16(Lanes a) {
  const __m256i packed = _mm256_packus_epi32(rounded_upper_half(a.low), rounded_upper_half(a.high));
  return _mm256_permute4x64_epi64(packed, 0xd8);  // packing is done within each 128 bits
}

inline Lanes load_bf16(const bf16* values) {
  const __m256i packed = _mm256_loadu_si256((const __m256i*)values);
  return {upper_half(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(packed))),
          upper_half(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(packed, 1)))};
}
inline void store_bf16(bf16* out, Lanes a) { _mm256_storeu_si256((__m256i*)out, narrow_bf16(a)); }

inline Lanes load_first_bf16(const bf16* values, int count) {
  bf16 padded[16] = {};
  for (int i = 0; i < 16 && i < count; ++i) padded[i] = values[i];
  return load_bf16(padded);
}
inline void store_first_bf16(bf16* out, Lanes a, int count) {
  bf16 all[16];
  store_bf16(all, a);
  for (int i = 0; i < 16 && i < count; ++i) out[i] = all[i];
}

inline void load_bf16_pairs(const bf16* values, Lanes& even, Lanes& odd) {
  const __m256i first = _mm256_loadu_si256((const __m256i*)values);
  const __m256i second = _mm256_loadu_si256((const __m256i*)(values + 16));
  const __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  even = {upper_half(first), upper_half(second)};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(first, mask)),
         _mm256_castsi256_ps(_mm256_and_si256(second, mask))};
}

inline Lanes load_fp16(const fp16* values) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)values)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(values + 8)))};
}
inline Lanes load_u8(const uint8_t* values) {
  const __m128i packed = _mm_loadu_si128((const __m128i*)values);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(packed)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(packed, 8)))};
}
inline Lanes load_i8(const int8_t* values) {
  const __m128i packed = _mm_loadu_si128((const __m128i*)values);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(packed)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(packed, 8)))};
}
inline void store_i8(int8_t* out, Lanes a) {
  const __m256i packed = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)), 0xd8);
  _mm_storeu_si128((__m128i*)out,
                   _mm_packs_epi16(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1)));
}

inline Lanes operator+(Lanes a, Lanes b) {
  return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
}
inline Lanes operator-(Lanes a, Lanes b) {
  return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)};
}
inline Lanes operator*(Lanes a, Lanes b) {
  return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)};
}
inline Lanes operator/(Lanes a, Lanes b) {
  return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)};
}
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Lanes min(Lanes a, Lanes b) {
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}
inline Lanes abs(Lanes a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
inline Lanes copy_sign(Lanes a, Lanes sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  const Lanes size = abs(a);
  return {_mm256_or_ps(size.low, _mm256_and_ps(sign.low, mask)),
          _mm256_or_ps(size.high, _mm256_and_ps(sign.high, mask))};
}
inline Lanes round(Lanes a) {
  constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, kToNearest), _mm256_round_ps(a.high, kToNearest)};
}

// 2^n of whole numbers from -126 to 127.
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

// In two steps, each a factor that a float can hold.
inline __m256 scale_by_power_of_two(__m256 x, __m256 n) {
  const __m256 limited = _mm256_min_ps(_mm256_max_ps(n, _mm256_set1_ps(-252.0f)), _mm256_set1_ps(252.0f));
  const __m256i whole = _mm256_cvtps_epi32(limited);
  const __m256i half = _mm256_srai_epi32(whole, 1);
  const __m256 once = _mm256_mul_ps(x, power_of_two(half));
  return _mm256_mul_ps(once, power_of_two(_mm256_sub_epi32(whole, half)));
}
inline Lanes scale_by_power_of_two(Lanes x, Lanes n) {
  return {scale_by_power_of_two(x.low, n.low), scale_by_power_of_two(x.high, n.high)};
}
inline Lanes floor(Lanes a) { return {_mm256_floor_ps(a.low), _mm256_floor_ps(a.high)}; }
// From 2^23 on floats have no fraction.
inline Lanes fraction(Lanes a) {
  const Lanes near = min(broadcast(8388608.0f), max(broadcast(-8388608.0f), a));
  return near - floor(near);
}
inline Lanes scale_by_floor(Lanes x, Lanes n) { return scale_by_power_of_two(x, floor(n)); }

inline Lanes select_below(int count, Lanes a, Lanes b) {
  return {_mm256_blendv_ps(b.low, a.low, _mm256_castsi256_ps(below(0, count))),
          _mm256_blendv_ps(b.high, a.high, _mm256_castsi256_ps(below(8, count)))};
}

inline Lanes swap_halves(Lanes a) { return {a.high, a.low}; }
inline Lanes reciprocal_coarse(Lanes a) { return broadcast(1.0f) / a; }
inline Lanes low_halves(Lanes a, Lanes b) { return {a.low, b.low}; }
inline Lanes high_halves(Lanes a, Lanes b) { return {a.high, b.high}; }

inline float sum(Lanes a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float highest(Lanes a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline bool any_reaches(Lanes a, float bound) {
  const __m256 bounds = _mm256_set1_ps(bound);
  const __m256 low = _mm256_cmp_ps(a.low, bounds, _CMP_GE_OQ);
  const __m256 high = _mm256_cmp_ps(a.high, bounds, _CMP_GE_OQ);
  return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}

inline void store_low_half(float* out, Lanes a) { _mm256_storeu_ps(out, a.low); }
inline void store_low_half_bf16(bf16* out, Lanes a) {
  _mm_storeu_si128((__m128i*)out, _mm256_castsi256_si128(narrow_bf16(a)));
}

}  // namespace ts
